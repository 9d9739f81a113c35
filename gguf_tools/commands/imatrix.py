"""The `imatrix` command: collect importances from a model, and work with their files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.options import AdapterOptions
from gguf_tools.argument_types import NATURAL
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.forward import (
    OR_FOLDER,
    add_chunks_argument,
    add_context_argument,
    add_dry_run,
    add_force_of_text,
    add_run_arguments,
    options_of_text,
)
from gguf_tools.commands.arguments.imatrix_flags import FOREIGN_FLAGS
from gguf_tools.commands.command import StoreOnce, StoreOutput, TakesArguments, add_force, output_file
from gguf_tools.commands.parser import HelpFormatter, add_foreign_flags, otherwise
from gguf_tools.commands.roof import called_by
from gguf_tools.files.early_checks import refuse_early, refuse_shared, refuse_to_replace
from gguf_tools.text import counted, json_line, say

if TYPE_CHECKING:
    from convert.checkpoint.streamed import StreamedFolder
    from imatrix.options import CollectOptions
    from quantize.importances.entries import ImportanceFile, ImportanceFormat

_AddParser = Callable[..., argparse.ArgumentParser]

DESCRIPTION = """\
Collect importance matrices, and work with their files. An importance matrix says, for every weight matrix,
which of its columns meet large activations; `quantize --imatrix` uses it. With -m and -f, a matrix is
collected: the text goes through the model layer by layer, so every weight is read once, and one layer at a
time is in memory. A layer for multi-token prediction (MTP) is included. Two forms of file are read and
written: GGUF, and .dat."""

EPILOG = """\
examples:
  imatrix -m DeepSeek-V2-Lite -f calibration.txt -o lite.imatrix.gguf
  imatrix -m v3-Q8_0-00001-of-00015.gguf -f calibration.txt -o v3.imatrix.gguf --dtype bfloat16
  imatrix --in-file a.gguf --in-file b.gguf -o both.gguf
  imatrix show lite.imatrix.gguf
  imatrix convert lite.imatrix.dat lite.imatrix.gguf
  imatrix convert --mla both --model DeepSeek-V2-Lite lite.imatrix.gguf for-ik.dat    for ik_llama.cpp
  imatrix merge code.gguf prose.gguf -o both.gguf
  imatrix stats --plot lite.png lite.imatrix.gguf
  imatrix check lite.imatrix.gguf --model DeepSeek-V2-Lite --recipe IQ2_XS
  imatrix repair lite.imatrix.gguf -o whole.imatrix.gguf

After an interruption, the same command resumes after the last complete layer. What it needs for that is in
OUT.work until OUT is written."""

_EXAMPLES = {
    name: f"examples:\n  imatrix {lines}"
    for name, lines in {
        "show": "show lite.imatrix.gguf",
        "convert": "convert lite.imatrix.dat lite.imatrix.gguf\n"
        "  imatrix convert --mla both --model DeepSeek-V2-Lite lite.imatrix.gguf ik.dat    for ik_llama.cpp",
        "merge": "merge code.gguf prose.gguf -o both.gguf",
        "stats": "stats lite.imatrix.gguf\n  imatrix stats --plot lite.png lite.imatrix.gguf",
        "check": "check lite.imatrix.gguf --model DeepSeek-V2-Lite --recipe IQ2_XS",
        "repair": "repair lite.imatrix.gguf -o whole.imatrix.gguf --model DeepSeek-V2-Lite",
    }.items()
}
"""Examples that the help of each command ends with."""

_KINDS_OF_MODEL = "folder, GGUF file, or OWNER/NAME on the Hub"


def main(argv: Sequence[str] | None = None, prog: str = "imatrix") -> int:
    """Run the command; return its exit code."""
    return command.run(make_parser(prog), lambda args: args.body(args), argv)


def make_parser(prog: str = "imatrix") -> argparse.ArgumentParser:
    parser = command.make_parser(prog, DESCRIPTION, epilog=EPILOG)
    parser.set_defaults(body=lambda args: _collect_or_merge(args, parser))
    _add_collect_arguments(parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    otherwise(commands, "-m MODEL -f TEXT collects a matrix")
    _add_show(commands.add_parser)
    _add_convert(commands.add_parser)
    _add_merge(commands.add_parser)
    _add_stats(commands.add_parser)
    _add_check(commands.add_parser)
    _add_repair(commands.add_parser)
    for name, subparser in commands.choices.items():
        subparser.epilog, subparser.formatter_class = called_by(prog, _EXAMPLES[name]), HelpFormatter
        command.add_verbose(subparser)
    return parser


def _add_show(add_parser: _AddParser) -> None:
    show = add_parser("show", help="entries, sizes, counts", description="List what a file holds.")
    _add_file(show)
    show.add_argument("--json", action="store_true", help="as one JSON object")
    show.set_defaults(answers=True, body=lambda args: _show(args.file, as_json=args.json))


def _add_convert(add_parser: _AddParser) -> None:
    convert = add_parser(
        "convert",
        help="convert between GGUF and .dat",
        description="Write INPUT in the form that OUTPUT's name asks for: .dat, or GGUF for any other.",
    )
    convert.add_argument("input", type=Path, metavar="INPUT")
    convert.add_argument("output", type=output_file, metavar="OUTPUT")
    add_force(convert)
    _add_layout(convert)
    _add_model(convert, f"{_KINDS_OF_MODEL}; with --mla both the model says how many heads it has")

    def body(args: argparse.Namespace) -> None:
        if args.layout == "both" and args.for_model is None:
            convert.error("--mla both needs --model, because the model says how many heads it has")
        _convert(args.input, _NewFile(args.output, args.force), args.layout, args.for_model)

    convert.set_defaults(body=body)


def _add_merge(add_parser: _AddParser) -> None:
    merge = add_parser(
        "merge",
        help="add up several files",
        description="Add up sums and counts, per expert: what collecting all in one go would have given.",
    )
    merge.add_argument("inputs", type=Path, nargs="+", metavar="INPUT")
    _add_new_file(merge, "merged")
    merge.set_defaults(body=lambda args: _merge(args.inputs, _NewFile(args.merged, args.force)))


def _add_stats(add_parser: _AddParser) -> None:
    stats = add_parser(
        "stats",
        help="how the energy is distributed, and what was never seen",
        description="Show what llama-imatrix --show-statistics shows, and coverage.",
    )
    _add_file(stats)
    stats.add_argument("--json", action="store_true", help="as one JSON object")
    stats.add_argument(
        "--plot", type=output_file, action=StoreOutput, metavar="FILE.png",
        help="also draw the statistics, as PNG, SVG or PDF; needs matplotlib",
    )  # fmt: skip
    stats.set_defaults(answers=True, body=lambda args: _stats(args.file, as_json=args.json, plot=args.plot))


def _add_check(add_parser: _AddParser) -> None:
    check = add_parser(
        "check",
        help="is the matrix sound, and does it fit a model",
        description="Look for impossible numbers, gaps, and data that don't fit the model. The exit code is 1"
        " if there are errors; warnings are only printed.",
    )
    _add_file(check)
    _add_model(check, _KINDS_OF_MODEL)
    check.add_argument(
        "--recipe",
        metavar="TYPE",
        help="also list the tensors that this file type or recipe file has no data for; needs --model",
    )

    def body(args: argparse.Namespace) -> int:
        if args.recipe is not None and args.for_model is None:
            check.error("--recipe needs --model")
        return _check(args.file, args.for_model, args.recipe)

    check.set_defaults(answers=True, body=body)


def _add_repair(add_parser: _AddParser) -> None:
    repair = add_parser(
        "repair",
        help="fill gaps; every change is listed",
        description="Give neutral values to experts that saw no token; derive attn_kv_b and attn_v_b from"
        " each other, and gate and up, too.",
    )
    _add_file(repair)
    _add_new_file(repair, "repaired")
    _add_model(repair, f"{_KINDS_OF_MODEL}; says how many heads there are, and which tensors the model has")
    repair.set_defaults(
        body=lambda args: _repair(args.file, _NewFile(args.repaired, args.force), args.for_model)
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")


def _add_new_file(parser: argparse.ArgumentParser, dest: str) -> None:
    parser.add_argument("-o", "--output", dest=dest, type=output_file, required=True, metavar="OUT")
    add_force(parser)


def _add_model(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--model", dest="for_model", metavar="MODEL", help=text)


def _add_layout(parser: TakesArguments) -> None:
    parser.add_argument(
        "--mla", dest="layout", choices=("split", "both"), default="split",
        help="layout of attention in the model files that the matrix is for: split (default), with values for"
        " every head; both, with one row for all heads, as ik_llama.cpp's llama-quantize needs them, and"
        " llama.cpp's for attn_output_a of deepseek4",
    )  # fmt: skip


def _add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to collect")
    what.add_argument(
        "-m", "--model", metavar="MODEL",
        help="Hugging Face folder, GGUF file (any part of a split one), or OWNER/NAME[@REVISION] on the Hub",
    )  # fmt: skip
    what.add_argument(
        "-f", "--file", dest="text", type=command.text_file, metavar="TEXT", action=StoreOnce,
        instead=", and add the matrix of the other with --in-file",
        help=f"calibration text, UTF-8, {OR_FOLDER}",
    )  # fmt: skip
    what.add_argument(
        "-o", "--output", "--output-file", type=output_file, action=StoreOutput, may_be=("in_file",),
        default=Path("imatrix.gguf"), metavar="OUT", help="where to write (default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--in-file", type=Path, action="append", default=[], metavar="FILE",
        help="importances to add to; without -f, these files are merged (repeatable)",
    )  # fmt: skip
    add_context_argument(what)
    add_chunks_argument(what)
    what.add_argument(
        "--from-chunk", "--chunk", type=command.number(NATURAL), default=0, metavar="N",
        help="skip the first N chunks",
    )  # fmt: skip
    what.add_argument("--process-output", action="store_true", help="collect for output.weight, too")
    what.add_argument(
        "--parse-special", action="store_true", help="read <｜User｜> and the like as special tokens"
    )
    what.add_argument(
        "--all-experts", action="store_true",
        help="show every token to every expert; what the model computes stays the same",
    )  # fmt: skip
    what.add_argument("--no-ppl", dest="perplexity", action="store_false", help="don't measure perplexity")
    how = parser.add_argument_group("how to write it")
    _add_layout(how)
    how.add_argument(
        "--output-format", dest="form", choices=["gguf", "dat"], help="default: dat for a name in .dat"
    )
    how.add_argument(
        "--output-frequency", "-ofreq", dest="every", type=command.number(NATURAL), default=0, metavar="N",
        help="write the matrix as far as it is known after every N layers; 0: only at the end (default)",
    )  # fmt: skip
    how.add_argument(
        "--show-statistics", action="store_true",
        help="collect nothing, and print what `imatrix stats` says of the files of --in-file",
    )  # fmt: skip
    add_force_of_text(how)
    how.add_argument(
        "--dataset-name", dest="dataset", metavar="NAME", help="name of the text (default: its file's name)"
    )
    run = add_run_arguments(parser)
    command.add_flags(run, AdapterOptions)
    command.add_scheduler(run)
    add_dry_run(run)
    add_foreign_flags(parser, "llama-imatrix", FOREIGN_FLAGS)


@dataclass(frozen=True)
class _CollectRequest(command.Asked):
    """Request of the command line: importances of a model on a text, in a file.

    named     MODEL
    options   how to collect
    layout    of attention, in the files that the importances are for
    form      of the output; None: what its name says
    every     write what is known after so many layers; 0: only at the end
    """

    named: str
    text: Path
    output: Path
    options: CollectOptions
    layout: str
    form: ImportanceFormat | None
    every: int


def _collect_or_merge(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.show_statistics:
        if not args.in_file:
            parser.error("--show-statistics needs --in-file")
        for path in args.in_file:
            _stats(path)
    elif args.text is None and args.in_file:
        if args.layout != "split":
            parser.error("--mla both needs the model; merge first, then imatrix convert --mla both")
        _merge(args.in_file, _NewFile(args.output, args.force, args.form))
    else:
        _collect(_read(args, parser))


def _read(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _CollectRequest:
    missing = [
        option for option, value in (("-m MODEL", args.model), ("-f TEXT", args.text)) if value is None
    ]
    if missing:
        either = "" if args.model or args.text else ", or a COMMAND such as show"
        parser.error(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{either}")
    from imatrix.options import CollectOptions

    options = options_of_text(CollectOptions, args, earlier=args.in_file)
    return filled(_CollectRequest, args, named=args.model, options=options)


def _foresee(request: _CollectRequest, model: Path) -> None:
    """Print what a collection would take."""
    from gguf_tools.progress import reporting
    from imatrix.forward.options import require_torch
    from imatrix.options import LABEL

    require_torch("collecting importances")
    from imatrix.calibrate.passes import foresee_collection
    from imatrix.run import open_collection

    with (
        reporting(not request.quiet, LABEL) as report,
        open_collection(model, request.text, request.options, report) as planned,
    ):
        say(*foresee_collection(planned, request.output).lines())


def _collect(request: _CollectRequest) -> None:
    """Collect importances, and write them."""
    from convert.sources import model_path
    from gguf_tools.files.leftovers import forget
    from gguf_tools.files.owned_folder import work_path
    from gguf_tools.files.run_lock import in_use
    from gguf_tools.progress import reporting
    from imatrix.collecting import collect_beside
    from imatrix.options import LABEL, perplexity_lines
    from imatrix.repair import notes_on_groups
    from imatrix.store import not_held, save

    output, quiet = request.output, request.quiet
    refuse_shared({"-o": output}, (Path(request.named), request.text))  # also where it is the default
    refuse_to_replace([output], force=request.force)
    refuse_early([output], [request.text], folders=True)
    model = model_path(request.named, quiet=quiet)
    refuse_early(models=[model])

    if request.dry_run:
        _foresee(request, model)
        return

    def write(contents: ImportanceFile) -> None:
        save(output, _in_layout(contents, request.layout, model), request.form, force=True)

    def layer_done(layer: int, contents: Callable[[], ImportanceFile]) -> None:
        if request.every and (layer + 1) % request.every == 0:
            write(contents())

    replaces = output.exists()
    with in_use(work_path(output)):
        with reporting(not quiet, LABEL) as report:
            collected = collect_beside(model, request.text, output, request.options, report, layer_done)
        write(collected.importances)
        forget(work_path(output))
    if quiet:
        return
    if collected.perplexity is not None:
        say(*perplexity_lines(collected.perplexity))
    contents = collected.importances
    older = ", in place of an older file" if replaces else ""
    held = f"{counted(len(contents.entries), 'entry')}, {counted(contents.chunk_count, 'chunk')}"
    say(f"wrote {output}: {held}{older}")
    notes = [*collected.notes, *not_held(contents, _form(output, request.form))]
    if request.layout == "split":
        notes += notes_on_groups(contents)
    for note in notes:
        say(f"note: {note}")


def _show(path: Path, *, as_json: bool) -> None:
    from imatrix.stats import describe, description_lines
    from imatrix.store import load

    contents = load(path)
    say(*[json_line(describe(contents))] if as_json else description_lines(contents))


@dataclass(frozen=True)
class _NewFile:
    """A file of importances to write: its form, and whether it may replace one that is there."""

    path: Path
    force: bool
    form: ImportanceFormat | None = None


def _convert(path: Path, output: _NewFile, layout: str, model: str | None) -> None:
    from imatrix.store import load

    contents = load(path)
    if model is not None and layout == "both":
        contents = _in_layout(contents, layout, _headers_of(model))
    _write(contents, output)


def _headers_of(model: str) -> Path | StreamedFolder:
    """Open the model that --model names; of one on the Hub, headers are enough."""
    from convert.sources import source_folder

    return source_folder(model, dry_run=True)


def _in_layout(contents: ImportanceFile, layout: str, model: Path | StreamedFolder) -> ImportanceFile:
    """Turn importances into those for files with that layout of attention."""
    if layout == "split":
        return contents
    from imatrix.check import read_model
    from imatrix.repair import in_layout_both

    known = read_model(model)
    return in_layout_both(contents, known.facts.n_heads, {info.name: info.n_cols for info in known.tensors})


def _merge(paths: Sequence[Path], output: _NewFile) -> None:
    from imatrix.merge import merge
    from imatrix.store import load

    merged = merge([load(path) for path in paths])
    for note in merged.notes:
        say(f"note: {note}")
    _write(merged.importances, output)


def _stats(path: Path, *, as_json: bool = False, plot: Path | None = None) -> None:
    from imatrix import stats
    from imatrix.store import load

    contents = load(path)
    if plot is not None:
        stats.plot(contents, plot)
    say(*[json_line(stats.as_json(contents))] if as_json else stats.stats_lines(contents))


def _check(path: Path, model: str | None, recipe: str | None) -> int:
    from imatrix.check import as_text, check, read_model
    from imatrix.store import load

    contents = load(path)
    findings = check(contents, None if model is None else read_model(_headers_of(model)), recipe)
    for finding in findings:
        say(as_text(finding))
    n_errors = sum(finding.is_bad for finding in findings)
    say(f"{path}: {counted(n_errors, 'error')}, {counted(len(findings) - n_errors, 'warning')}")
    return 1 if n_errors else 0


def _repair(path: Path, output: _NewFile, model: str | None) -> None:
    from imatrix.check import read_model
    from imatrix.repair import repair
    from imatrix.store import load

    contents = load(path)
    checked = None if model is None else read_model(_headers_of(model))
    names = () if checked is None else [tensor.name for tensor in checked.tensors]
    done = repair(contents, None if checked is None else checked.facts.n_heads, names)
    say(*done.changes)
    say(counted(len(done.changes), "change"))
    _write(done.importances, output)


def _write(contents: ImportanceFile, output: _NewFile) -> None:
    from imatrix.store import not_held, save

    chosen = _form(output.path, output.form)
    save(output.path, contents, chosen, force=output.force)
    say(f"wrote {output.path}: {counted(len(contents.entries), 'entry')}, form {chosen}")
    for note in not_held(contents, chosen):
        say(f"note: {note}")


def _form(output: Path, form: ImportanceFormat | None) -> ImportanceFormat:
    from imatrix.store import format_of

    return form or format_of(output)
