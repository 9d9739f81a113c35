"""A card as text: front matter, a table of the files, how they were made, what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from convert.card.facts import CalibrationFacts, FileFacts, Matrix, Origin, Report
from convert.card.markdown import as_address, as_code, as_markdown
from convert.card.shell import command_line, comment, shell_word
from convert.card.usage import memory_lines, recommended, run_lines
from gguf_tools import __version__
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.text import printable, size_text

MARK = "<!-- gguf-tools card: what stands above the next such line is written anew -->"
"""Line that tells our cards from others; everything after its second occurrence is kept."""

COMMANDS_HEADING = "## How they were made"
_FENCE = "```"


@dataclass(frozen=True)
class Card:
    """Contents of a card.

    files         in the order of the table
    commands      file name -> the command that made it, as typed
    report        measured quality, None: not measured
    home          OWNER/NAME of the files on the Hub, None: not known
    quantized_by  name of who made the files, None: not said
    remarks       paragraphs in Markdown between table and commands
    own_text      what somebody wrote below the second mark of an older card
    """

    files: Sequence[FileFacts]
    origin: Origin
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    report: Report | None = None
    home: str | None = None
    quantized_by: str | None = None
    remarks: Sequence[str] = ()
    own_text: str = ""


def card_text(card: Card) -> str:
    """Return the text of a README.md.

    raises  BadRequest for a report on other files of the same names
    """
    entries = yaml.dump(front_matter(card), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    lines = [
        "---",
        # What yaml leaves as it is, such as marks of direction, is escaped, too.
        *map(printable, entries.rstrip().split("\n")),
        "---",
        MARK,
        "",
        *_body(card),
        "",
        MARK,
    ]
    return "\n".join(lines) + "\n" + card.own_text


class _Dumper(yaml.SafeDumper):
    """Writes texts with characters that don't print in quotes, where they can be escaped."""

    def represent_str(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


def front_matter(card: Card) -> dict[str, Any]:
    """Return the entries that the Hub reads."""
    origin = card.origin
    quantized_by = card.quantized_by or _first_stated(card.files, keys.QUANTIZED_BY)
    imatrix = ["imatrix"] if any(each.matrix for each in card.files) else []
    calibrated = ["calibrated"] if any(each.calibration for each in card.files) else []
    entries: dict[str, Any] = {
        "base_model": origin.repo,
        "base_model_relation": "quantized" if origin.repo is not None else None,
        "quantized_by": quantized_by,
        **origin.license,
        "language": list(origin.languages),
        "library_name": "gguf",
        "pipeline_tag": origin.pipeline_tag,
        "tags": list(dict.fromkeys(["gguf", "quantized", *imatrix, *calibrated, *origin.tags])),
    }
    return {name: value for name, value in entries.items() if value}


def _body(card: Card) -> Iterator[str]:
    name = _model_name(card)
    base = f"[{as_markdown(card.origin.repo)}]({card.origin.address})" if card.origin.repo else name
    yield f"# {name}, GGUF"
    yield ""
    yield f"Quantized files of {base} for llama.cpp and its relatives, made with gguf-tools {__version__}."
    yield ""
    yield "## Files"
    yield ""
    yield from _table(card)
    yield ""
    yield from memory_lines(card.files, card.report)
    yield ""
    yield "## How to run them"
    yield ""
    yield from run_lines(recommended(card.files), card.home)
    yield ""
    yield "## What they are"
    yield ""
    yield from _types(card)
    for calibration in dict.fromkeys(each.calibration for each in card.files if each.calibration):
        yield ""
        yield _calibration_text(calibration)
    for matrix in dict.fromkeys(each.matrix for each in card.files if each.matrix):
        yield ""
        yield _matrix_text(matrix)
    yield from _padding_lines(card.files)
    yield ""
    yield _check_text(card)
    if card.report is not None:
        yield ""
        yield _report_text(card.report)
    for remark in card.remarks:
        yield ""
        yield remark
    if card.commands:
        yield ""
        yield COMMANDS_HEADING
        yield ""
        yield f"{_FENCE}sh"
        for words in dict.fromkeys(map(tuple, card.commands.values())):
            yield from (comment(file) for file, made_by in card.commands.items() if tuple(made_by) == words)
            yield command_line(words)
        yield _FENCE


def _model_name(card: Card) -> str:
    if card.origin.repo is not None:
        return as_markdown(card.origin.repo.partition("/")[2])
    return as_markdown(_first_stated(card.files, keys.NAME) or card.files[0].name.removesuffix(".gguf"))


def _first_stated(files: Sequence[FileFacts], key: str) -> str | None:
    return next((each.model[key] for each in files if key in each.model), None)


def _table(card: Card) -> Iterator[str]:
    heads = ["file", "size", "bits per weight"]
    measured = card.report is not None and any(each.name in card.report.by_name for each in card.files)
    if measured:
        heads += ["KL divergence", "its 99th percentile", "same top token", "perplexity"]
    yield _row(heads)
    yield _row(["---", "--:", "--:", *["--:"] * (len(heads) - 3)])
    for each in card.files:
        bits = f"{each.bits_per_weight:.2f}{', types chosen' if each.is_chosen else ''}"
        name = f"[{as_markdown(each.name)}]({as_address(each.name)})"
        if len(each.paths) > 1:
            name += f" and {len(each.paths) - 1} more parts"
        cells = [name, size_text(each.n_bytes), bits]
        yield _row([*cells, *(_measured_cells(each, card.report) if measured else ())])


def _types(card: Card) -> Iterator[str]:
    """Yield the types of the tensors, folded: they are for those who want to know."""
    yield "<details><summary>Types of the tensors</summary>"
    yield ""
    yield _row(["file", "tensors by type"])
    yield _row(["---", "---"])
    for each in card.files:
        types = ", ".join(f"{type_} {count}" for type_, count in each.types.items())
        yield _row([as_markdown(each.name), types])
    yield ""
    yield "</details>"


def _calibration_text(calibration: CalibrationFacts) -> str:
    """Describe how files were calibrated, in a sentence."""
    text = "a text" if calibration.text is None else as_code(calibration.text)
    chunks = f" ({calibration.chunks:,} chunks)" if calibration.chunks else ""
    how = "" if calibration.method is None else f": {as_markdown(calibration.method)}"
    return (
        f"Calibrated on {text}{chunks}{how}. SHA-256 of the text: {as_code(calibration.sha256)}. The bytes of"
        " every tensor were chosen so that predictions on it stay close to the original's."
    )


def _measured_cells(file: FileFacts, report: Report | None) -> Sequence[str]:
    assert report is not None
    found = report.by_name.get(file.name)
    if found is None:
        return ("", "", "", "")
    if found.n_bytes != file.n_bytes:
        raise BadRequest(
            f"{report.path}: measured a {file.name} of {found.n_bytes:,} bytes, and the one that is here has"
            f" {file.n_bytes:,}; evaluate it again"
        )
    error = "" if math.isnan(found.kld_error) else f" ± {found.kld_error:.5f}"
    return (
        f"{found.kld:.5f}{error}",
        f"{found.kld_p99:.4f}",
        f"{found.same_top:.2%}",
        f"{found.ppl:.4f}",
    )


def _report_text(report: Report) -> str:
    text, n_tokens = report.texts[0], sum(each.n_tokens for each in report.texts)
    what = "divergence from the unquantized model in nats a token (less is better), and perplexity"
    measured = f"{n_tokens:,} tokens measured, in chunks of {text.chunk_size}."
    if report.suite is not None:
        names = ", ".join(as_markdown(each.name or "") for each in report.texts)
        return f"Means over the classes {names} of the suite {as_code(report.suite)}: {what}. {measured}"
    name = "a text" if text.file is None else as_code(text.file)
    return f"{what.capitalize()} (its own: {text.base_ppl:.4f}), on {name}: {measured}"


def _check_text(card: Card) -> str:
    """Say how anyone can check a file."""
    file = recommended(card.files)
    words = ["gguf-tools", "rederive", file.name, "--source", card.origin.repo or "MODEL"]
    if file.calibration is not None:
        words += ["--calibrate", file.calibration.text or "TEXT"]
    elif file.matrix is not None:
        words += ["--imatrix", file.matrix.file or "MATRIX"]
    return f"Check that a file is what the original makes of it: {as_code(' '.join(map(shell_word, words)))}."


def _matrix_text(matrix: Matrix) -> str:
    """Return a sentence about an importance matrix."""
    name = "" if matrix.file is None else f" {as_code(matrix.file)}"
    text = "" if matrix.dataset is None else f", collected on {as_code(matrix.dataset)}"
    chunks = "" if matrix.chunks == 0 else f" ({matrix.chunks:,} chunks)"
    return f"Importance matrix{name}{text}{chunks}: data for {matrix.entries:,} tensors."


def _padding_lines(files: Sequence[FileFacts]) -> Iterator[str]:
    """Yield a paragraph about sizes that are padded."""
    padded = {key: sizes for each in files for key, sizes in each.padded.items()}
    if not padded:
        return
    sizes = ", ".join(f"{as_code(key)} from {old} to {new}" for key, (old, new) in padded.items())
    where = [each.name for each in files if each.padded]
    which = "" if len(where) == len(files) else f" of {', '.join(as_code(name) for name in where)}"
    yield ""
    yield (
        f"Sizes{which} are padded with zeros: {sizes}. So rows are whole blocks of 256, and have the types"
        " that were asked for instead of larger or coarser ones. The zeros multiply nothing: the model"
        " computes what it computes without them."
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
