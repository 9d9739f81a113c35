"""Arguments of `quantize --size`: what to choose types by, and what to write of the choice."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.calibration import calibration_forward
from gguf_tools.commands.arguments.forward import options_of_text
from gguf_tools.commands.arguments.types import parsing_arguments
from gguf_tools.commands.command import StoreOutput, TakesArguments
from gguf_tools.errors import BadArgument
from gguf_tools.files.named_files import write_whole
from gguf_tools.hub.names import cached_name, folder_name
from gguf_tools.text import say
from quantize.size.parse import Size, parse_bytes, parse_sizes

if TYPE_CHECKING:
    from imatrix.sensitivities.options import SensitivityOptions
    from quantize.size.choose_types import TypeRules
    from quantize.size.solve import Sized, SizeRequest


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --size, the budgets, the rules and the exports."""
    group = parser.add_argument_group(
        "the best file of a given size",
        "Types are chosen so that the predicted divergence is least. --tensor-type fixes a tensor's type.",
    )
    _add_budgets(group)
    _add_rules(group)
    _add_exports(group)


def _add_budgets(group: TakesArguments) -> None:
    group.add_argument(
        "--size", type=command.argument(parse_sizes), metavar="SIZE,...",
        help="size of the complete file: 12.5GiB, 3.4bpw, or a file type, which stands for the size of a file"
        " of that type. Several sizes, separated by commas, make several files from one set of losses; OUTPUT"
        " then needs {ftype}, which becomes the size",
    )  # fmt: skip
    group.add_argument(
        "--vram", type=command.argument(parse_bytes), metavar="SIZE",
        help="budget for everything except routed experts; use with --ram, instead of --size",
    )  # fmt: skip
    group.add_argument(
        "--ram", type=command.argument(parse_bytes), metavar="SIZE",
        help="budget for routed experts, with --vram",
    )  # fmt: skip
    group.add_argument(
        "--losses",
        type=Path,
        metavar="FILE.json",
        help="divergence that each tensor adds at each type, as measured by `sensitivity`",
    )
    group.add_argument(
        "--sensitivity-text",
        type=command.text_file,
        metavar="TEXT",
        help="without --losses: measure the losses now, on this UTF-8 text or folder of classes of text"
        " (default: the text of --calibrate)",
    )


def _add_rules(group: TakesArguments) -> None:
    group.add_argument(
        "--for", dest="target", choices=("llama.cpp", "ik_llama.cpp"), default="llama.cpp",
        help="the program that will run the file",
    )  # fmt: skip
    group.add_argument(
        "--fast-on", action="append", choices=("cpu", "gpu"), default=[],
        help="choose no types that are slow on this device (repeatable)",
    )  # fmt: skip
    group.add_argument(
        "--equal-experts", action="store_true", help="give all expert tensors of a layer one type"
    )
    for option, what in (("--at-least", "fewer"), ("--at-most", "more")):
        group.add_argument(
            option, action="append", default=[], metavar="REGEX=TYPE",
            help=f"no {what} bits than TYPE for tensors whose name matches (repeatable)",
        )  # fmt: skip


def _add_exports(group: TakesArguments) -> None:
    for option, metavar, what in (
        ("--save-recipe", "FILE.yaml", "write the choice as a recipe file"),
        ("--save-tensor-types", "FILE", "... for llama-quantize --tensor-type-file"),
        ("--save-custom-q", "FILE", "... for ik_llama.cpp --custom-q"),
        ("--save-tensor-list", "FILE", "... with a line per tensor, as Thireus' tools have it"),
        ("--curve", "PLOT.svg", "draw the predicted divergence of ten sizes; needs matplotlib"),
    ):
        group.add_argument(option, type=command.output_file, action=StoreOutput, metavar=metavar, help=what)


def is_sized(args: argparse.Namespace) -> bool:
    """Whether the arguments ask for a size."""
    return any(value is not None for value in (args.size, args.vram, args.ram))


@dataclass(frozen=True)
class Measurement:
    """How to measure what each tensor of a model costs, where that was not done before.

    text    UTF-8 file, or folder of classes of texts
    silent  say nothing but errors, and show no bar
    quiet   don't say where the losses are
    """

    text: Path
    options: SensitivityOptions
    silent: bool
    quiet: bool

    def losses_of(self, source: Path, output: Path | None) -> Path:
        """Make a file with the losses of a model, beside the output that they are for.

        A file that an earlier run of the same command has left is taken as it is.

        raises  what `sensitivity` raises
        """
        from imatrix.sensitivities.measure import measured_before, sensitivity

        named = source if cached_name(source) is None else folder_name(source)
        path = Path(f"{output or named}.losses.json")
        if measured_before(source, self.text, path, self.options) is not None:
            return path
        sensitivity(source, self.text, path, self.options, progress=not self.silent)
        if not self.quiet:
            say(f"wrote {path}; --losses takes it for other sizes")
        return path


@dataclass(frozen=True)
class SizeArguments:
    """Sizes, what to choose types by, and what to write of the choice.

    sizes                         one for each file; none with vram and ram
    vram, ram, rules              as SizeRequest has them
    losses                        file of losses; None: `measurement` makes one
    curve, save_recipe, save_tensor_types, save_custom_q, save_tensor_list   files to write, None: not written
    """

    sizes: tuple[Size, ...]
    vram: int | None
    ram: int | None
    rules: TypeRules
    losses: Path | None
    measurement: Measurement | None
    curve: Path | None
    save_recipe: Path | None
    save_tensor_types: Path | None
    save_custom_q: Path | None
    save_tensor_list: Path | None

    def requests(self, source: Path, output: Path | None, *, calibrated: bool) -> list[SizeRequest]:
        """Measure what each tensor of `source` costs if that isn't known, and make a request for each file.

        calibrated  the file will be encoded with calibration
        raises      FormatError for a wrong losses file, and what measuring raises
        """
        from quantize.plan.sensitivities import read_sensitivities
        from quantize.size.solve import SizeRequest

        losses = self.losses
        if losses is None:
            assert self.measurement is not None
            losses = self.measurement.losses_of(source, output)
        known = read_sensitivities(losses)
        return [
            SizeRequest(known, size, self.vram, self.ram, self.rules, calibrated)
            for size in self.sizes or (None,)
        ]

    def save(self, sized: Sized) -> None:
        """Write the choice in the notations that are asked for; raises OutputError."""
        from quantize.size import show

        types = sized.chosen.types
        remarks = (
            f"{sized.total_bytes} bytes, predicted divergence {sized.chosen.predicted:.5f} nats a token",
            "made by quantize --size; the first rule that matches decides",
        )
        contents: tuple[tuple[Path | None, Iterable[str]], ...] = (
            (self.save_recipe, show.recipe_lines(sized.mixture.name, sized.base, types, remarks)),
            (self.save_tensor_types, show.tensor_type_lines(types)),
            (self.save_custom_q, [show.custom_q(types)]),
            (self.save_tensor_list, show.tensor_list_lines(types, remarks)),
        )
        for path, lines in contents:
            if path is not None:
                write_whole(path, "".join(f"{line}\n" for line in lines).encode())


_EXPORTS = ("curve", "save_recipe", "save_tensor_types", "save_custom_q", "save_tensor_list")
_OF_A_SIZE = ("losses", "sensitivity_text", "fast_on", "equal_experts", "at_least", "at_most", *_EXPORTS)
"""Arguments that mean something only with a size."""


def read_size(args: argparse.Namespace, named: str | None) -> SizeArguments | None:
    """Read the size that is asked for; None without one.

    named   TYPE, or None
    raises  BadArgument for sizes that contradict each other or can't be read, and where neither losses nor a
            text to measure them on are named
    """
    if not is_sized(args):
        for option in _OF_A_SIZE:
            if getattr(args, option):
                raise BadArgument(f"--{option.replace('_', '-')} is for --size, which is missing")
        return None
    from quantize.plan.overrides import parse_custom_q, parse_overrides
    from quantize.size.choose_types import TypeRules

    if named is not None:
        raise BadArgument(
            f"{named}: a size chooses the types, so leave TYPE out; --tensor-type REGEX=TYPE fixes some"
        )
    if args.size is not None and (args.vram or args.ram):
        raise BadArgument("--size and --vram/--ram can't be used together: one budget, or two")
    if args.size is None and (args.vram is None or args.ram is None):
        raise BadArgument("--vram and --ram go together: one for all but routed experts, one for them")
    with parsing_arguments():
        custom_q = [each for text in args.custom_q for each in parse_custom_q(text)]
        rules = TypeRules(
            target=args.target,
            fast_on=frozenset(args.fast_on),
            equal_experts=args.equal_experts,
            fixed=(*parse_overrides(args.tensor_type, must_match=True), *custom_q),
            at_least=parse_overrides(args.at_least),
            at_most=parse_overrides(args.at_most),
        )
    sizes = args.size or ()
    asked = next((name for name in _EXPORTS if getattr(args, name) is not None), None)
    if len(sizes) > 1 and asked is not None:
        raise BadArgument(f"--{asked.replace('_', '-')} is for one size, found {len(sizes)}")
    measurement = _read_measurement(args) if args.losses is None else None
    return filled(SizeArguments, args, sizes=sizes, rules=rules, measurement=measurement)


def _read_measurement(args: argparse.Namespace) -> Measurement:
    """Read what is to be measured; raises BadArgument where no text is named."""
    from imatrix.sensitivities.options import SensitivityOptions

    text = args.sensitivity_text or args.calibrate
    if text is None:
        raise BadArgument(
            "--size needs the divergence that each tensor adds at each type: name its file with --losses"
            " FILE.json, or a text to measure it on with --sensitivity-text TEXT"
        )
    how = {"forward": calibration_forward(args), "seed": 0}  # --seed is that of the calibration
    options = options_of_text(SensitivityOptions, args, **how)
    return Measurement(text, options, args.quiet, args.quiet or args.json)
