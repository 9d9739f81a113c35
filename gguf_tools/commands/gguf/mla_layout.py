"""`gguf-tools mla-layout`: a GGUF file in another layout of multi-head latent attention."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.types import (
    add_matrix_arguments,
    add_restart_argument,
    parsing_arguments,
    read_importances,
)
from gguf_tools.commands.command import add_force
from gguf_tools.terminal import say
from gguf_tools.text import json_text

if TYPE_CHECKING:
    from quantize.mla_layout.pipeline import LayoutOptions
    from quantize.roles import MLALayout
    from quantize.run_options import RunOptions

DETAIL = """
For DeepSeek V2 and V3 files, quantized or not, from whichever of these layouts:
  split  attn_k_b and attn_v_b, a matrix per head: what llama.cpp wants
  both   attn_kv_b, attn_k_b and attn_v_b as 2-D matrices: what ik_llama.cpp wants
  none   attn_kv_b only: both programs run it as plain attention, with its large cache

The rest of the file stays as it is, in its order; of a float file the result is the converter's, byte for
byte. From both, nothing is encoded again. attn_v_b is whole rows of attn_kv_b and keeps its bits. attn_k_b
is the other rows transposed, so between quantized attn_kv_b and attn_k_b values are decoded and encoded
again: to Q8_0 (F16 where rows are no multiple of 32), which adds hardly any error, and is what ik_llama.cpp
makes of a missing tensor when it loads a file. --tensor-type names another type: with attn_v_b's own,
attn_kv_b takes attn_v_b's rows as they are and is smaller, but the keys suffer twice from 4 bits or fewer.

A file that has the layout already is not written again: the command says so and exits with 0."""

EPILOG = """\
examples:
  gguf-tools mla-layout ik.gguf llama.gguf --to split
  gguf-tools mla-layout model.gguf ik.gguf --to both --dry-run         what would be made of what
  gguf-tools mla-layout old.gguf new.gguf --to split --tensor-type attn_k_b=Q5_0 --imatrix m.imatrix
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "mla-layout",
        lambda args: _mla_layout(_read(args, sub)),
        "rewrite a file for llama.cpp or ik_llama.cpp: another layout of latent attention",
        DETAIL,
        epilog=EPILOG,
    )
    command.add_source_and_output(sub)
    sub.add_argument(
        "--to", required=True, choices=["split", "both", "none"], help="the layout that OUT shall have"
    )
    sub.add_argument(
        "--tensor-type", action="append", default=[], metavar="REGEX=TYPE",
        help="ggml type of tensors that IN lacks and whose name matches; the first match wins (repeatable)",
    )  # fmt: skip
    sub.add_argument("--keep-split", action="store_true", help="write as many parts as IN has")
    command.add_threads(sub)
    sub.add_argument("--dry-run", action="store_true", help="print what would be done; write nothing")
    add_restart_argument(sub)
    add_force(sub)
    add_matrix_arguments(sub)


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line.

    output   None: a dry run
    to       layout that the output shall have
    options  what to make of the source
    run      how to run
    """

    source: Path
    output: Path | None
    to: MLALayout
    options: LayoutOptions
    run: RunOptions


def _read(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _Request:
    from quantize.mla_layout.pipeline import LayoutOptions
    from quantize.plan.overrides import parse_overrides
    from quantize.run_options import RunOptions

    if args.output is None and not args.dry_run:
        parser.error("OUT is missing")
    with parsing_arguments():
        overrides = parse_overrides(args.tensor_type)
    options = filled(LayoutOptions, args, overrides=overrides, importances=read_importances(args))
    return filled(_Request, args, options=options, run=filled(RunOptions, args))


def _mla_layout(request: _Request) -> None:
    from gguf_tools.format.shards import open_gguf
    from quantize.mla_layout.pipeline import change_layout, change_lines, describe, prepare, result_lines

    path, to, options = request.source, request.to, request.options
    output = request.output or path.with_name(f"{path.stem}-{to}.gguf")
    if request.dry_run:
        with open_gguf(path) as source:
            change = prepare(source, output, to, options)
        lines, data = change_lines(change), describe(change, written=False)
    else:
        how = replace(request.run, progress=not request.quiet, label=f"laying out as {to}")
        result = change_layout(path, output, to, options, how)
        lines, data = result_lines(result), describe(result.change, written=result.written is not None)
    if request.json or not request.quiet:
        say(*json_text(data).split("\n") if request.json else lines)
