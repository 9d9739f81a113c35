"""Command line arguments about types and importances, shared by `quantize`, its `lint` and the converter."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.commands import command
from gguf_tools.errors import BadArgument, BadOverride, BadRequest
from gguf_tools.files.named_files import read_input_text

if TYPE_CHECKING:
    from quantize.importances.entries import ImportanceFile
    from quantize.plan.decide import PlanOptions
    from quantize.plan.overrides import Override


def add_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --imatrix and what selects from it."""
    matrix = parser.add_argument_group("importance matrix")
    matrix.add_argument(
        "--imatrix", type=Path, action=command.StoreOnce, instead=", or add them up with imatrix merge",
        metavar="FILE", help="importance matrix, GGUF or .dat",
    )  # fmt: skip
    matrix.add_argument(
        "--include-weights", action="append", default=[], metavar="NAME",
        help="use importances only for tensors whose name contains NAME (repeatable)",
    )  # fmt: skip
    matrix.add_argument(
        "--exclude-weights", action="append", default=[], metavar="NAME",
        help="use no importances for tensors whose name contains NAME (repeatable)",
    )  # fmt: skip


def add_type_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide about types."""
    types_ = parser.add_argument_group("which type for which tensor")
    types_.add_argument("--pure", action="store_true", help="one type for all tensors, no mixture")
    types_.add_argument("--leave-output-tensor", action="store_true", help="don't quantize output.weight")
    types_.add_argument("--output-tensor-type", metavar="TYPE", help="ggml type of output.weight")
    types_.add_argument("--token-embedding-type", metavar="TYPE", help="ggml type of token_embd.weight")
    types_.add_argument(
        "--tensor-type", action="append", default=[], metavar="REGEX=TYPE",
        help="ggml type of tensors whose name matches; the first match wins (repeatable)",
    )  # fmt: skip
    types_.add_argument(
        "--tensor-type-file", action="append", default=[], type=Path, metavar="FILE",
        help="REGEX=TYPE words, separated by spaces or newlines (repeatable)",
    )  # fmt: skip
    types_.add_argument(
        "--custom-q", action="append", default=[], metavar="REGEX=TYPE,...",
        help="the same in ik_llama.cpp's notation; tried after --tensor-type (repeatable)",
    )  # fmt: skip
    types_.add_argument(
        "--fallback", action="append", default=[], metavar="REGEX=TYPE",
        help="ggml type of tensors whose name matches and whose rows do not fit the type they got; the first"
        " match wins (repeatable)",
    )  # fmt: skip


def refuse_grids_for_sizes(keep_grid: bool, has_sizes: bool) -> None:
    """Raise BadArgument for --keep-grid where the types of all tensors are chosen."""
    if keep_grid and has_sizes:
        raise BadArgument("--keep-grid is for a TYPE; a size chooses the types of all tensors")


def add_requantize_argument(parser: argparse.ArgumentParser) -> None:
    """Add --allow-requantize, for commands whose input may be quantized."""
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="quantize tensors that are quantized already; quality suffers",
    )


def add_stream_argument(parser: argparse.ArgumentParser) -> None:
    """Add --stream and --timeout, for commands that convert a model of the Hub."""
    parser.add_argument(
        "--stream",
        action="store_true",
        help="read the weights of a model on the Hub as they are used, and keep none of them on the disk",
    )
    command.add_timeout(parser)


def add_restart_argument(parser: argparse.ArgumentParser) -> None:
    """Add --restart and --quiet, for commands whose runs are long and can be resumed."""
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start over; without it, the same command resumes where an interrupted run stopped",
    )
    command.add_quiet(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dry-run, --json and --summary, for commands that plan a run; see `check_plan_arguments`."""
    plan = parser.add_argument_group("looking before writing")
    plan.add_argument(
        "--dry-run", action="store_true",
        help="print the plan and the exact size. No weight is read, except with --keep-grid, which reads all."
        " Nothing is written, except files that other options name, such as --save-recipe",
    )  # fmt: skip
    plan.add_argument(
        "--json", action="store_true", help="print the outcome (with --dry-run: the plan) as one JSON object"
    )
    plan.add_argument("--summary", action="store_true", help="with --dry-run: print only the totals")


def check_plan_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse a --summary of what is no plan."""
    if args.summary and not args.dry_run:
        parser.error("--summary needs --dry-run, because it shortens the plan")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --reuse, --no-provenance and --verify, for commands that write models."""
    group = parser.add_argument_group("reusing older files, and checking")
    group.add_argument(
        "--reuse", action="append", default=[], type=Path, metavar="OLD.gguf",
        help="copy every tensor that was made from the same weights, type and importances from OLD.gguf,"
        " which may be the file that is replaced (repeatable; a dry run says how many tensors can be copied)",
    )  # fmt: skip
    group.add_argument(
        "--no-provenance",
        dest="provenance",
        action="store_false",
        help="don't record what each tensor was made from; --reuse needs that record",
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="before the output gets its name, read a sample of every tensor and compare it with the source",
    )


def is_type(word: str) -> bool:
    """Whether a word names a type, a recipe file, or several with commas between them."""
    from quantize.plan.recipe_files import is_recipe_file
    from quantize.plan.recipes import find_recipe

    first, comma, rest = word.partition(",")
    try:
        find_recipe(first)
    except BadRequest:
        if not is_recipe_file(first):
            return False
    return is_type(rest) if comma else True


@contextmanager
def parsing_arguments() -> Iterator[None]:
    """Turn the refusal of a word into one of an argument, which has an exit code of its own."""
    try:
        yield
    except BadOverride as error:
        raise BadArgument(str(error)) from error


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """Read which type is for which tensor."""
    from quantize.plan.decide import PlanOptions
    from quantize.plan.overrides import parse_custom_q, parse_overrides, parse_type

    with parsing_arguments():
        overrides = parse_overrides(args.tensor_type, must_match=True)
        fallbacks = parse_overrides(args.fallback)
        output_type = parse_type(args.output_tensor_type) if args.output_tensor_type else None
        embedding_type = parse_type(args.token_embedding_type) if args.token_embedding_type else None
    overrides += overrides_of_files(args)
    with parsing_arguments():
        overrides += tuple(each for text in args.custom_q for each in parse_custom_q(text))
    return PlanOptions(
        overrides=overrides,
        fallbacks=fallbacks,
        pure=args.pure,
        leave_output=args.leave_output_tensor,
        output_type=output_type,
        embedding_type=embedding_type,
        allow_requantize=getattr(args, "allow_requantize", False),
    )


def overrides_of_files(args: argparse.Namespace) -> tuple[Override, ...]:
    """Read the types that the files of --tensor-type-file set."""
    from quantize.plan.overrides import parse_override_file

    return tuple(
        each for path in args.tensor_type_file for each in parse_override_file(read_input_text(path), path)
    )


def read_importances(args: argparse.Namespace) -> ImportanceFile | None:
    """Read --imatrix and select from it; None without it."""
    if args.imatrix is None:
        if args.include_weights or args.exclude_weights:
            raise BadArgument("--include-weights and --exclude-weights need --imatrix")
        return None
    from dataclasses import replace

    from quantize.importances.entries import select
    from quantize.importances.files import load

    matrix = load(args.imatrix)
    entries = select(matrix.entries, args.include_weights, args.exclude_weights)
    if not entries:
        raise BadRequest(
            f"{args.imatrix}: none of its {len(matrix.entries)} entries is left by --include-weights"
            " or --exclude-weights"
        )
    return replace(matrix, entries=entries)
