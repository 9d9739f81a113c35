"""Command line arguments of `quantize --size`: what to choose by, and what to write of the choice."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.size.parse import parse_size
from gguf_cli import command
from gguf_cli.arguments.types import parsing_arguments
from gguf_cli.outputs import StoreOutput
from gguf_tools.errors import BadArgument
from gguf_tools.files.atomic_write import write_whole

if TYPE_CHECKING:
    from calibrate.size.solve import Sized, SizeRequest


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --size, the budgets, the rules and the exports."""
    group = parser.add_argument_group(
        "the best file of a given size",
        "Types are chosen so that the predicted divergence is least. --tensor-type fixes a tensor's type.",
    )
    group.add_argument(
        "--size", metavar="SIZE", help="of the whole file: 12.5GiB, 3.4bpw, or a file type: as large as that"
    )
    group.add_argument(
        "--vram", metavar="SIZE", help="of all but routed experts; instead of --size, with --ram"
    )
    group.add_argument("--ram", metavar="SIZE", help="of routed experts, with --vram")
    group.add_argument(
        "--losses",
        type=Path,
        metavar="FILE.json",
        help="what each tensor costs at each type, as `sensitivity` has measured it",
    )
    group.add_argument(
        "--sensitivity-text",
        type=Path,
        metavar="TEXT",
        help="without --losses: measure them now on this UTF-8 text (default: that of --calibrate)",
    )
    group.add_argument(
        "--for", dest="target", choices=("llama.cpp", "ik_llama.cpp"), default="llama.cpp",
        help="the program that is to run the file",
    )  # fmt: skip
    group.add_argument(
        "--fast-on", action="append", choices=("cpu", "gpu"), default=[],
        help="leave out types that are slow there (repeatable)",
    )  # fmt: skip
    group.add_argument(
        "--equal-experts", action="store_true", help="one type for the expert stacks of a layer"
    )
    for option, what in (("--at-least", "fewer"), ("--at-most", "more")):
        group.add_argument(
            option, action="append", default=[], metavar="REGEX=TYPE",
            help=f"no {what} bits than TYPE for tensors whose name matches (repeatable)",
        )  # fmt: skip
    group.add_argument(
        "--save-recipe", type=command.output_file, action=StoreOutput, metavar="FILE.yaml",
        help="write the choice as a recipe file",
    )  # fmt: skip
    group.add_argument(
        "--save-tensor-types", type=command.output_file, action=StoreOutput, metavar="FILE",
        help="... for llama-quantize --tensor-type-file",
    )  # fmt: skip
    group.add_argument(
        "--save-custom-q", type=command.output_file, action=StoreOutput, metavar="FILE",
        help="... for ik_llama.cpp --custom-q",
    )  # fmt: skip
    group.add_argument(
        "--save-tensor-list",
        type=command.output_file,
        action=StoreOutput,
        metavar="FILE",
        help="... with a line per tensor, as Thireus' tools have it",
    )
    group.add_argument(
        "--curve", type=command.output_file, action=StoreOutput, metavar="PLOT.svg",
        help="draw the predicted divergence of ten sizes; needs matplotlib",
    )  # fmt: skip


def is_sized(args: argparse.Namespace) -> bool:
    """Return whether the arguments ask for a size."""
    return any(value is not None for value in (args.size, args.vram, args.ram))


def check_size_arguments(args: argparse.Namespace) -> None:
    """Raise BadRequest for sizes that contradict each other or can't be read."""
    if args.size is not None and (args.vram or args.ram):
        raise BadArgument("--size and --vram/--ram can't be used together: one budget, or two")
    if args.size is None and (args.vram is None or args.ram is None):
        raise BadArgument("--vram and --ram go together: one for all but routed experts, one for them")
    for text in (args.size, args.vram, args.ram):
        if text is not None:
            parse_size(text)


def size_request(args: argparse.Namespace, base: str | None, losses_file: Path) -> SizeRequest:
    """Return what arguments ask for that `check_size_arguments` has let pass.

    base    file type that was named beside the size, or None
    raises  BadRequest for arguments that contradict each other; FormatError for a wrong losses file
    """
    from calibrate.size.choose_types import TypeRules
    from calibrate.size.solve import SizeRequest
    from quantize.plan.overrides import parse_custom_q, parse_overrides
    from quantize.plan.sensitivities import read_sensitivities

    with parsing_arguments():
        custom_q = [each for text in args.custom_q for each in parse_custom_q(text)]
        rules = TypeRules(
            target=args.target,
            fast_on=frozenset(args.fast_on),
            equal_experts=args.equal_experts,
            fixed=(*parse_overrides(args.tensor_type), *custom_q),
            at_least=parse_overrides(args.at_least),
            at_most=parse_overrides(args.at_most),
        )
    return SizeRequest(
        read_sensitivities(losses_file),
        size=None if args.size is None else parse_size(args.size),
        vram=_bytes(args.vram, "--vram"),
        ram=_bytes(args.ram, "--ram"),
        rules=rules,
        calibrated=args.calibrate is not None,
        base=base,
    )


def _bytes(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    size = parse_size(text)
    if size.kind != "bytes":
        raise BadArgument(f"{option} {text}: expected bytes, for instance 24GiB")
    return int(size.amount)


def save_choice(args: argparse.Namespace, sized: Sized) -> list[Path]:
    """Write the choice in the notations that the arguments ask for; return the files.

    raises  OutputError for a file that can't be written
    """
    from calibrate.size import export

    types = sized.chosen.types
    remarks = (
        f"{sized.total_bytes} bytes, predicted divergence {sized.chosen.predicted:.5f} nats a token",
        "made by quantize --size; the first rule that matches decides",
    )
    contents: tuple[tuple[Path | None, Iterable[str]], ...] = (
        (args.save_recipe, export.recipe_lines(sized.mixture.name, sized.base, types, remarks)),
        (args.save_tensor_types, export.tensor_type_lines(types)),
        (args.save_custom_q, [export.custom_q(types)]),
        (args.save_tensor_list, export.tensor_list_lines(types, remarks)),
    )
    written = []
    for path, lines in contents:
        if path is not None:
            write_whole(path, "".join(f"{line}\n" for line in lines).encode())
            written.append(path)
    return written
