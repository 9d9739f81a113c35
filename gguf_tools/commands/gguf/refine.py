"""`gguf-tools refine`: scales and codes of a finished file move to where it diverges less from its base."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.argument_types import COUNT, MINUTES, NATURAL, RATE, SEED
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.forward import (
    add_dry_run,
    add_force_of_text,
    add_run_arguments,
    add_text_and_output,
    options_of_text,
)
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.text import say

if TYPE_CHECKING:
    from imatrix.calibrate.refine.options import RefineOptions

DETAIL = """
Every block of a quantized tensor has one or two floating-point scales. `refine` changes them step by step
along the gradient, so that FILE's predictions on a text diverge less from BASE's. Types and size stay the
same. FILE may come from anybody, with or without importances or calibration. Refined scales help most at 2
and 3 bits, and little from 4 bits on.

With --codes, `refine` first changes codes, the values that a scale multiplies. It works layer by layer, so
that each layer makes hidden states as near as possible to BASE's out of FILE's own. Three rates or more are
tried on the first layer, and all layers use the rate that is best on chunks held back. A layer that is not
better on these chunks keeps its codes. Two times through the text work much better than one. Tensors of all
quantized types of llama.cpp except Q1_0 can change; tensors of types that only ik_llama.cpp reads stay.

Use text that FILE was not calibrated on, and as much as possible. A step takes 2 chunks, and the default is
once through the text. One chunk of eight, and at most 8, is held back to judge the result: at least one chunk
of each class of a folder of texts, and none that FILE was calibrated on. The scales that are best on
the chunks held back are written. If none are better than FILE's, FILE's scales stay, and the run says so."""

EPILOG = """\
A step takes about five times as long as a forward pass over its chunks, and so does each time through the
text with --codes. Memory holds a layer of BASE and of FILE, and 12 bytes for each scale. --codes takes 24
bytes for each weight of a layer, up to --memory; tensors that do not fit keep their codes. After an
interruption, the same command resumes from the last layer or minute. What it needs for that is in OUT.work
until the run has ended.

examples:
  gguf-tools refine lite-Q2_K.gguf --base DeepSeek-V2-Lite -f text.txt -o lite-Q2_K-refined.gguf
  gguf-tools refine lite-Q2_K.gguf --base lite-bf16.gguf -f texts -o out.gguf --codes 2 --dtype bfloat16
"""


@dataclass(frozen=True)
class RefineRequest(command.Asked):
    """Request of the command line; `base` is a path, or a name on the Hub."""

    file: Path
    base: str
    text: Path
    output: Path
    options: RefineOptions


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "refine", lambda args: carry_out(_read(args)), "change a file's scales and codes so that it diverges"
        " less from its base", DETAIL, epilog=EPILOG, json=False,
    )  # fmt: skip
    sub.add_argument("file", type=Path, metavar="FILE", help="a GGUF file, or any file of a split set")
    what = sub.add_argument_group("what to do")
    what.add_argument(
        "--base", required=True, metavar="BASE", help="folder, GGUF file, or OWNER/NAME[@REVISION] on the Hub"
    )
    add_text_and_output(what, "OUT.gguf", "where the file goes")
    what.add_argument(
        "--from-chunk",
        type=command.number(NATURAL),
        default=0,
        metavar="N",
        help="skip the first N chunks, such as those of a calibration",
    )
    length = what.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=command.number(MINUTES),
        metavar="M",
        help="make as many steps as this machine can in about M minutes",
    )
    length.add_argument(
        "--steps",
        type=command.number(COUNT),
        metavar="N",
        help="make N steps (default: once through the text)",
    )
    what.add_argument(
        "--batch", type=command.number(COUNT), default=2, metavar="N", help="chunks per step (default: 2)"
    )
    what.add_argument(
        "--codes", type=command.number(NATURAL), default=0, metavar="N", dest="passes",
        help="first change codes, layer by layer, N times through the text (default: 0: none)",
    )  # fmt: skip
    what.add_argument(
        "--rate", type=command.number(RATE), default=0.004, metavar="R",
        help="about how much a scale changes in a step, relative to itself, at 2.5 bits per weight; the rate"
        " falls to zero by the last step (default: 0.004)",
    )  # fmt: skip
    what.add_argument(
        "--seed",
        type=command.number(SEED),
        default=0,
        metavar="N",
        help="decides the order of chunks (default: 0)",
    )
    run = add_run_arguments(sub)
    add_force_of_text(run)
    add_dry_run(run)


def _read(args: argparse.Namespace) -> RefineRequest:
    from imatrix.calibrate.refine.options import RefineOptions

    return filled(RefineRequest, args, options=options_of_text(RefineOptions, args))


def carry_out(request: RefineRequest) -> None:
    """Refine a file, and print what that gave."""
    from convert.sources import model_path
    from imatrix.calibrate.refine.pipeline import refine

    base = model_path(request.base, quiet=request.quiet)
    if request.dry_run:
        _foresee(request, base)
        return
    progress = not request.quiet
    done = refine(request.file, base, request.text, request.output, request.options, progress)
    if not request.quiet:
        say(*done.lines())


def _foresee(request: RefineRequest, base: Path) -> None:
    """Print what a run would take."""
    from gguf_tools.progress import reporting
    from imatrix.calibrate.refine.pipeline import LABEL, refuse_at_once

    file, text, output = request.file, request.text, request.output
    refuse_at_once(file, base, text, output)
    from imatrix.calibrate.passes import foresee_refinement
    from imatrix.calibrate.refine.run import open_refinement, was_refined

    with (
        reporting(not request.quiet, LABEL) as report,
        open_refinement(file, base, text, output, request.options, report) as planned,
    ):
        if not request.options.force and was_refined(output) == planned.digest:
            say(f"{output}: exists already, and is what you asked for; --force makes it anew")
            return
        refuse_to_replace([output], force=request.options.force)
        say(*foresee_refinement(planned).lines())
