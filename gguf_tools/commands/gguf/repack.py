"""`gguf-tools repack` and `quantize --repack`: rows regrouped for ik_llama.cpp, or taken apart."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.types import add_restart_argument
from gguf_tools.commands.command import add_force
from gguf_tools.terminal import say
from gguf_tools.text import json_text
from quantize.repack.rules import RepackOptions

if TYPE_CHECKING:
    from quantize.run_options import RunOptions

DETAIL = """
ik_llama.cpp computes faster on CPUs with 4, 8 or 16 rows in one block: Q4_K becomes Q4_K_R4, IQ4_XS becomes
IQ4_XS_R8, and so on. The bits are the same in another order, so nothing is lost: --undo gives back the file
that was repacked, byte for byte. llama.cpp can't read interleaved rows, and on a GPU they are slower.

Without --to every type that has an interleaved form gets it, as in ik_llama.cpp; BF16 only by --to BF16_R16.
token_embd stays, and so do matrices whose rows fill no group. Experts are interleaved one by one."""

EPILOG = """\
examples:
  gguf-tools repack model-Q4_K_M.gguf model-Q4_K_R4.gguf
  gguf-tools repack model-Q4_K_R4.gguf again-Q4_K_M.gguf --undo
  gguf-tools repack in.gguf out.gguf --only '_exps' --to IQ4_K_R4,IQ3_K_R4     experts of these two types
  gguf-tools repack in.gguf --dry-run
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "repack",
        lambda args: carry_out(_read(args, sub)),
        "interleave rows for ik_llama.cpp on CPUs, or take them apart again",
        DETAIL,
        epilog=EPILOG,
    )
    command.add_source_and_output(sub)
    sub.add_argument(
        "--to", metavar="TYPES",
        help="make these interleaved types and no others, for instance Q4_K_R4,Q6_K_R4; rows that one can't"
        " hold are an error",
    )  # fmt: skip
    sub.add_argument("--undo", action="store_true", help="take interleaved rows apart")
    sub.add_argument(
        "--only", action="append", default=[], metavar="REGEX",
        help="leave tensors alone in whose names no REGEX matches (repeatable)",
    )  # fmt: skip
    sub.add_argument("--keep-split", action="store_true", help="write as many parts as IN has")
    command.add_threads(sub)
    sub.add_argument("--dry-run", action="store_true", help="print what would be done; write nothing")
    sub.add_argument(
        "--verify", action="store_true", help="before OUT gets its name, compare a sample of it with IN"
    )
    add_restart_argument(sub)
    add_force(sub)


@dataclass(frozen=True)
class RepackRequest(command.Asked):
    """Request of the command line.

    output   None: a dry run
    options  what to regroup
    run      how to run
    """

    source: Path
    output: Path | None
    options: RepackOptions
    run: RunOptions


def _read(args: argparse.Namespace, parser: argparse.ArgumentParser) -> RepackRequest:
    from quantize.run_options import RunOptions

    if args.output is None and not args.dry_run:
        parser.error("OUT is missing")
    to = () if args.to is None else tuple(args.to.split(","))
    options = filled(RepackOptions, args, to=to)
    return filled(RepackRequest, args, options=options, run=filled(RunOptions, args))


def carry_out(request: RepackRequest) -> None:
    """Regroup a file, or say what would be done, and print the outcome."""
    from gguf_tools.format.shards import open_gguf
    from quantize.repack.pipeline import prepare, repack
    from quantize.report import found_lines

    source, output, options = request.source, request.output, request.options
    if request.dry_run or output is None:
        with open_gguf(source) as opened:
            change = prepare(opened, output or source.with_name(f"{source.stem}-repacked.gguf"), options)
        lines, is_written, wrote = list(change.lines()), False, ""
    else:
        how = replace(request.run, progress=not request.quiet, label="regrouping")
        result = repack(source, output, options, how)
        change, is_written = result.change, result.written is not None
        first = result.paths[0] if is_written else ""
        more = f" and {len(result.paths) - 1} more parts" if len(result.paths) > 1 else ""
        wrote = f"wrote {first}{more} in {result.seconds:.1f} s"
        lines = [*change.lines(), *([wrote] if is_written else [])]
        if result.is_found:
            lines = list(found_lines(result.paths))
    if request.json or not request.quiet:
        say(*json_text(change.describe(written=is_written)).split("\n") if request.json else lines)
