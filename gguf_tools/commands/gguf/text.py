"""`gguf-tools text`: the calibration texts of the package, listed or written to a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.command import StoreOutput, add_force
from gguf_tools.errors import BadArgument
from gguf_tools.text import counted, say, say_json, size_text, table

if TYPE_CHECKING:
    from imatrix.texts.shipped import ShippedTexts

_DETAIL = """
Nine kinds: English prose, documentation, source in 17 languages, six scripts, mathematics, JSON, chats,
summaries and calls of tools. The bytes are those of this version of the package. None of the texts shares
12 words in a row with the suite `default`, so a file that was calibrated on them can be measured with it.

Without -o the texts are listed, with size, licence and source. With -o they are written to a folder, beside
manifest.yaml, which has the source of each, and LICENCES.md. The SHA-256 of the folder is printed, and with
--json also that of each text.
An existing folder must hold nothing else, because calibration uses every file in it."""

_EXAMPLES = """\
examples:
  gguf-tools text                  which texts there are, and where they are from
  gguf-tools text -o texts
  gguf-tools text --json | jq .sha256
then:
  quantize --calibrate texts --chunks 64 lite-bf16.gguf lite-Q4_K_M.gguf Q4_K_M
  imatrix -m lite-bf16.gguf -f texts --chunks 64 -o lite.imatrix.gguf
"""


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line; output: None lists."""

    output: Path | None


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "text",
        lambda args: _text(filled(_Request, args)),
        "write texts of nine kinds to calibrate with",
        _DETAIL,
        epilog=_EXAMPLES,
        answers=True,
    )
    sub.add_argument(
        "-o", "--output", type=command.output_folder, action=StoreOutput, metavar="FOLDER",
        help="where the texts go; made if it is not there",
    )  # fmt: skip
    command.add_quiet(sub)
    add_force(sub)


def _text(request: _Request) -> None:
    from imatrix.texts.shipped import shipped_texts, write_texts

    if request.force and request.output is None:
        raise BadArgument("--force is for what is written: -o FOLDER is missing")
    shipped = shipped_texts() if request.output is None else write_texts(request.output, force=request.force)
    if request.json:
        say_json(asdict(shipped))
    elif request.output is None:
        say(*_listed(shipped))
    elif not request.quiet:
        say(*_kinds(shipped), f"wrote {request.output}: {_summary(shipped)}")
        say(f"SHA-256 of the folder: {shipped.sha256}")


def _listed(shipped: ShippedTexts) -> Iterator[str]:
    rows = [(text.file, size_text(text.bytes), text.licence, text.source) for text in shipped.texts]
    yield from table(rows, right=(1,))
    yield ""
    yield from _kinds(shipped)
    yield _summary(shipped)


def _kinds(shipped: ShippedTexts) -> Iterator[str]:
    sizes, tokens = Counter[str](), Counter[str]()
    for text in shipped.texts:
        sizes[text.kind] += text.bytes
        tokens[text.kind] += text.tokens
    kinds = [(kind, size_text(sizes[kind]), f"{tokens[kind]:,} tokens") for kind in sizes]
    yield from table(kinds, right=(1, 2))


def _summary(shipped: ShippedTexts) -> str:
    n_kinds = len({text.kind for text in shipped.texts})
    size = size_text(sum(text.bytes for text in shipped.texts))
    return f"{counted(len(shipped.texts), 'text')} of {counted(n_kinds, 'kind')}, {size}"
