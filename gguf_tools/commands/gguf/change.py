"""`gguf-tools repack` and `mla-layout`: a finished file in another form; also `quantize --repack`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.types import (
    add_matrix_arguments,
    add_restart_argument,
    parsing_arguments,
    read_importances,
)
from gguf_tools.commands.command import add_force
from gguf_tools.text import json_text, say
from quantize.repack.rules import RepackOptions

if TYPE_CHECKING:
    from gguf_tools.format.shards import GGUFSet
    from quantize.change import Change, Changed
    from quantize.mla_layout.pipeline import LayoutOptions
    from quantize.roles import MLALayout
    from quantize.run_options import RunOptions

_REPACK_DETAIL = """
ik_llama.cpp computes faster on CPUs with 4, 8 or 16 rows in one block: Q4_K becomes Q4_K_R4, IQ4_XS becomes
IQ4_XS_R8, and so on. The bits are the same in another order, so nothing is lost: --undo gives back the file
that was repacked, byte for byte. llama.cpp can't read interleaved rows, and on a GPU they are slower.

Without --to every type that has an interleaved form gets it, as in ik_llama.cpp; BF16 only by --to BF16_R16.
token_embd stays, and so do matrices whose rows fill no group. Experts are interleaved one by one."""

_REPACK_EXAMPLES = """\
examples:
  gguf-tools repack model-Q4_K_M.gguf model-Q4_K_R4.gguf
  gguf-tools repack model-Q4_K_R4.gguf again-Q4_K_M.gguf --undo
  gguf-tools repack in.gguf out.gguf --only '_exps' --to IQ4_K_R4,IQ3_K_R4     experts of these two types
  gguf-tools repack in.gguf --dry-run
"""

_LAYOUT_DETAIL = """
For DeepSeek V2 and V3 files, quantized or not. These layouts can be turned into each other:
  split  attn_k_b and attn_v_b, a matrix per head: what llama.cpp needs
  both   attn_kv_b, attn_k_b and attn_v_b as 2-D matrices: what ik_llama.cpp needs
  none   attn_kv_b only: both programs run it as plain attention, with its large cache

The rest of the file stays the same, in the same order. From a float file, the result equals the converter's,
byte for byte. From the layout both, nothing is encoded again. attn_v_b consists of rows of attn_kv_b and
keeps its bits. attn_k_b consists of the other rows, transposed, so its values are decoded and encoded again
if the tensors are quantized: to Q8_0 (F16 where the row length is no multiple of 32). This adds hardly any
error, and is what ik_llama.cpp makes of a missing tensor when it loads a file. --tensor-type names another
type. If it names attn_v_b's type for attn_kv_b, attn_kv_b copies the rows of attn_v_b and is smaller, but
keys are rounded twice, which does harm at 4 bits or fewer.

A file that has the layout already is not written again: the command says so and exits with 0."""

_LAYOUT_EXAMPLES = """\
examples:
  gguf-tools mla-layout ik.gguf llama.gguf --to split
  gguf-tools mla-layout model.gguf ik.gguf --to both --dry-run         what each tensor would be made from
  gguf-tools mla-layout old.gguf new.gguf --to split --tensor-type attn_k_b=Q5_0 --imatrix m.imatrix
"""


def add_repack(commands: command.Subcommands) -> None:
    """Add `repack`."""
    sub = commands.add(
        "repack",
        lambda args: repack(_read_repack(args, sub)),
        "interleave rows for ik_llama.cpp on CPUs, or take them apart again",
        _REPACK_DETAIL,
        epilog=_REPACK_EXAMPLES,
    )
    _add_source_and_output(sub)
    sub.add_argument(
        "--to", metavar="TYPES",
        help="make these interleaved types and no others, for instance Q4_K_R4,Q6_K_R4; rows that one can't"
        " hold are an error",
    )  # fmt: skip
    sub.add_argument("--undo", action="store_true", help="take interleaved rows apart")
    sub.add_argument(
        "--only", action="append", default=[], metavar="REGEX",
        help="change only tensors whose name a REGEX matches (repeatable)",
    )  # fmt: skip
    _add_parts_and_run(sub)
    sub.add_argument(
        "--verify", action="store_true", help="before OUT gets its name, compare a sample of it with IN"
    )
    add_restart_argument(sub)
    add_force(sub)


def add_mla_layout(commands: command.Subcommands) -> None:
    """Add `mla-layout`."""
    sub = commands.add(
        "mla-layout",
        lambda args: _mla_layout(_read_layout(args, sub)),
        "rewrite a file for llama.cpp or ik_llama.cpp: another layout of latent attention",
        _LAYOUT_DETAIL,
        epilog=_LAYOUT_EXAMPLES,
    )
    _add_source_and_output(sub)
    sub.add_argument(
        "--to", required=True, choices=["split", "both", "none"], help="the layout that OUT shall have"
    )
    sub.add_argument(
        "--tensor-type", action="append", default=[], metavar="REGEX=TYPE",
        help="ggml type of tensors that IN lacks and whose name matches; the first match wins (repeatable)",
    )  # fmt: skip
    _add_parts_and_run(sub)
    add_restart_argument(sub)
    add_force(sub)
    add_matrix_arguments(sub)


def _add_source_and_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="a GGUF file, or any file of a split set")
    parser.add_argument(
        "output", type=command.output_file, metavar="OUT", nargs="?", help="not needed with --dry-run"
    )


def _add_parts_and_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-split", action="store_true", help="write as many parts as IN has")
    command.add_threads(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done; write nothing")


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line; output: None in a dry run, which gives it a name."""

    source: Path
    output: Path | None
    run: RunOptions


@dataclass(frozen=True)
class RepackRequest(_Request):
    """Request to regroup rows, as the options say."""

    options: RepackOptions


@dataclass(frozen=True)
class _LayoutRequest(_Request):
    """Request for the layout `to`; the options say what to make of the source."""

    to: MLALayout
    options: LayoutOptions


def _read_repack(args: argparse.Namespace, parser: argparse.ArgumentParser) -> RepackRequest:
    run = _read_run(args, parser)
    to = () if args.to is None else tuple(args.to.split(","))
    return filled(RepackRequest, args, options=filled(RepackOptions, args, to=to), run=run)


def _read_layout(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _LayoutRequest:
    from quantize.mla_layout.pipeline import LayoutOptions
    from quantize.plan.overrides import parse_overrides

    run = _read_run(args, parser)
    with parsing_arguments():
        overrides = parse_overrides(args.tensor_type)
    options = filled(LayoutOptions, args, overrides=overrides, importances=read_importances(args))
    return filled(_LayoutRequest, args, options=options, run=run)


def _read_run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> RunOptions:
    from quantize.run_options import RunOptions

    if args.output is None and not args.dry_run:
        parser.error("OUT is missing")
    return filled(RunOptions, args)


def repack(request: RepackRequest) -> None:
    """Regroup a file, or say what would be done, and print the outcome."""
    from quantize.repack import pipeline

    source, options = request.source, request.options
    output = request.output or source.with_name(f"{source.stem}-repacked.gguf")
    _carry_out(
        request,
        "regrouping",
        lambda opened: pipeline.prepare(opened, output, options),
        lambda run: pipeline.repack(source, output, options, run),
    )


def _mla_layout(request: _LayoutRequest) -> None:
    from quantize.mla_layout.pipeline import change_layout, prepare

    source, to, options = request.source, request.to, request.options
    output = request.output or source.with_name(f"{source.stem}-{to}.gguf")
    _carry_out(
        request,
        f"laying out as {to}",
        lambda opened: prepare(opened, output, to, options),
        lambda run: change_layout(source, output, to, options, run),
    )


def _carry_out(
    request: _Request,
    label: str,
    prepare: Callable[[GGUFSet], Change],
    change: Callable[[RunOptions], Changed[Any]],
) -> None:
    """Change a file, or find out what would be done, and print the outcome.

    label    what is being done
    prepare  decides the change of a file that is open
    change   writes it
    """
    from gguf_tools.format.shards import open_gguf
    from quantize.change import Changed

    if request.dry_run:
        with open_gguf(request.source) as opened:
            result = Changed(prepare(opened), None, 0.0)
    else:
        result = change(replace(request.run, progress=not request.quiet, label=label))
    if request.json or not request.quiet:
        say(*json_text(result.describe()).split("\n") if request.json else result.lines())
