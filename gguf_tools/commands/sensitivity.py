"""The `sensitivity` command: what each tensor of a model costs at each type."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.options import AdapterOptions
from gguf_tools.argument_types import COUNT, SEED
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.forward import (
    add_dry_run,
    add_force_of_text,
    add_run_arguments,
    add_text_and_output,
    options_of_text,
)
from gguf_tools.commands.arguments.types import parsing_arguments
from gguf_tools.commands.parser import ForeignFlag, add_foreign_flags
from gguf_tools.files.early_checks import refuse_early, refuse_to_replace
from gguf_tools.text import say
from quantize.plan.overrides import parse_type

if TYPE_CHECKING:
    from imatrix.sensitivities.options import SensitivityOptions
    from quantize.plan.sensitivities import Sensitivities

DESCRIPTION = """\
Measure how much KL divergence each tensor of a model adds at each type that it could have, by one forward and
one backward pass over a text. MODEL is a Hugging Face folder or a GGUF file. The numbers, called losses, go
to a small file. `quantize --size` chooses types by this file."""

EPILOG = """\
The loss of a tensor is the mean KL divergence per token, in nats, that its rounding adds. To second order,
the losses of all tensors of a file add up to its divergence. The real divergence of a file is 1.5 to 3 times
as much, because a small change may send a token to another expert. But files of one model keep their order.

One layer is in memory at a time, and the hidden states of all layers are on the disk while the command runs.
After an interruption, the same command resumes after the last complete layer. What it needs for that is
beside FILE until the run has ended.

examples:
  sensitivity DeepSeek-V2-Lite -f calibration.txt --chunks 32 -o lite.losses.json
  quantize --size 7GiB --losses lite.losses.json --imatrix lite.imatrix DeepSeek-V2-Lite lite.gguf"""

_MLA = ForeignFlag(("--mla",), "losses fit files of every layout of attention", 1, refused=False)

_SHOWN_TYPE, _N_SHOWN = "Q4_K", 10


def main(argv: Sequence[str] | None = None, prog: str = "sensitivity") -> int:
    """Run the command; return its exit code."""
    return command.run(make_parser(prog), lambda args: _sensitivity(_read(args)), argv)


def make_parser(prog: str = "sensitivity") -> argparse.ArgumentParser:
    parser = command.make_parser(prog, DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face folder, GGUF file, or OWNER/NAME[@REVISION] on the Hub"
    )
    what = parser.add_argument_group("what to measure")
    add_text_and_output(what, "FILE.json", "where the losses go")
    what.add_argument(
        "--types", metavar="TYPE,TYPE...", help="candidate types (default: those of llama.cpp's recipes)"
    )
    what.add_argument(
        "--rows", type=command.number(COUNT), default=512, metavar="N",
        help="rows of a tensor that are encoded at every type (default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--seed", type=command.number(SEED), default=0, metavar="N",
        help="seed of the labels drawn at random from the model's predictions (default: 0)",
    )  # fmt: skip
    what.add_argument(
        "--pad-hidden", action="store_true",
        help="also measure types that rows fit only after `quantize --pad-hidden` has padded the hidden size;"
        " types for padded inner sizes are always measured",
    )  # fmt: skip
    run = add_run_arguments(parser)
    command.add_flags(run, AdapterOptions)
    add_force_of_text(run)
    add_dry_run(run)
    add_foreign_flags(parser, "imatrix", [_MLA])
    return parser


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line: the losses of a model (MODEL) on a text, in a file."""

    named: str
    text: Path
    output: Path
    options: SensitivityOptions


def _read(args: argparse.Namespace) -> _Request:
    from imatrix.sensitivities.options import SensitivityOptions

    types = None
    if args.types is not None:
        with parsing_arguments():
            types = tuple(parse_type(word).name for word in args.types.split(","))
    options = options_of_text(SensitivityOptions, args, types=types)
    return filled(_Request, args, named=args.model, options=options)


def _sensitivity(request: _Request) -> None:
    from convert.sources import model_path
    from imatrix.sensitivities.measure import measured_before, sensitivity

    output = request.output
    refuse_early([output], [request.text], folders=True)
    model = model_path(request.named, quiet=request.quiet)
    refuse_early(models=[model])
    done = f"{output}: exists already, and is what you asked for; --force makes it anew"
    losses = measured_before(model, request.text, output, request.options)
    if losses is None and request.dry_run:
        _foresee(request, model)
        return
    if losses is None:
        done = f"wrote {output}"
        losses = sensitivity(model, request.text, output, request.options, progress=not request.quiet)
    if request.quiet:
        return
    say(*losses_lines(losses))
    say(done)


def _foresee(request: _Request, model: Path) -> None:
    """Print what a run would take."""
    from gguf_tools.progress import reporting
    from imatrix.forward.options import require_torch

    require_torch("measuring sensitivities")
    from imatrix.calibrate.passes import foresee_measurement
    from imatrix.sensitivities.run import open_measurement

    refuse_to_replace([request.output], force=request.options.force)
    with (
        reporting(not request.quiet, "") as report,
        open_measurement(model, request.text, request.options, report) as planned,
    ):
        say(*foresee_measurement(planned, request.output).lines())


def losses_lines(losses: Sensitivities) -> Iterator[str]:
    """Yield which tensors cost most, at a type that most of them can have."""
    shown = {
        name: each.by_type[_SHOWN_TYPE]
        for name, each in losses.tensors.items()
        if _SHOWN_TYPE in each.by_type
    }
    if not shown:
        return
    total = sum(shown.values())
    n_tensors = len(losses.tensors)
    yield f"{n_tensors} tensors, of which {len(shown)} add {total:.5f} nats a token as {_SHOWN_TYPE}:"
    most = sorted(shown, key=lambda name: -shown[name])[:_N_SHOWN]
    width = max(map(len, most))
    for name in most:
        yield f"  {name:{width}}  {shown[name]:.6f}  {100 * shown[name] / total:4.1f} %"
