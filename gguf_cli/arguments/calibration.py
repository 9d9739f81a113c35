"""Command line arguments of a calibration, for the commands that quantize."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_cli import command
from gguf_cli.arguments.forward import add_context_argument, cut_of

if TYPE_CHECKING:
    from calibrate.calibration import Calibration
    from forward.options import ForwardOptions
    from quantize.run import Run


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --calibrate and what belongs to it."""
    group = parser.add_argument_group("encoding under the activations of a text (needs torch)")
    group.add_argument(
        "--calibrate", type=Path, metavar="TEXT",
        help="choose the bytes of every tensor so that the model errs little on this UTF-8 text",
    )  # fmt: skip
    add_context_argument(group)
    group.add_argument("--chunks", type=int, default=-1, metavar="N", help="use at most N chunks; -1: all")
    group.add_argument(
        "--force", action="store_true",
        help="calibrate with a text that is nonsense, too: one token over and over, copies of a passage",
    )  # fmt: skip
    group.add_argument(
        "--no-sequential",
        action="store_true",
        help="let all tensors see what the original makes of the text; half the time, larger errors",
    )
    group.add_argument(
        "--one-sided",
        action="store_true",
        help="leave out what errors at a matrix' outputs do to the model's predictions",
    )
    group.add_argument("--no-embedding", action="store_true", help="encode token_embd as without --calibrate")
    group.add_argument(
        "--evaluate", type=Path, metavar="TEXT",
        help="afterwards measure the divergence from INPUT on this text, which should be another one",
    )  # fmt: skip
    group.add_argument("--device", help="torch device: cpu, cuda, cuda:1 ... (default: CUDA if there is one)")
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="what the model is multiplied in (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--memory", type=command.gigabytes, default=4 << 30, metavar="GB",
        help="hidden states beyond so many gigabytes go to a file (default: 4)",
    )  # fmt: skip


def refuse_evaluation_text(args: argparse.Namespace, run: Run) -> None:
    """Raise BadRequest, before a weight is read, for a text that --evaluate can't use."""
    from calibrate.early import refuse_text
    from forward.text.tokens import Cut

    refuse_text(args.evaluate, Cut(args.ctx_size), run.preparation, measured=True)


def evaluate_output(args: argparse.Namespace, source: Path, output: Path) -> None:
    """Print how far the output is from its source on another text."""
    from forward.text.tokens import Cut
    from gguf_tools.progress import LayerBar
    from quality.options import EvaluateOptions
    from quality.pipeline import evaluate
    from quality.table import evaluation_lines

    options = EvaluateOptions(Cut(args.ctx_size), calibration_forward(args))
    with LayerBar("layers of all models") as bar:
        evaluation = evaluate(source, args.evaluate, [output], options, bar)
    for line in evaluation_lines(evaluation):
        print(line)


def read_calibration(args: argparse.Namespace) -> Calibration | None:
    """Return the calibration that the arguments ask for; None without --calibrate."""
    if args.calibrate is None:
        return None
    from forward.options import require_torch

    require_torch("--calibrate")
    from calibrate.calibration import Calibration

    return Calibration(
        args.calibrate,
        cut=cut_of(args),
        sequential=not args.no_sequential,
        two_sided=not args.one_sided,
        embedding=not args.no_embedding,
        any_text=args.force,
        forward=calibration_forward(args),
    )


def calibration_forward(args: argparse.Namespace) -> ForwardOptions:
    """Return how the model is computed; the threads are those of the run."""
    from forward.options import ForwardOptions

    return ForwardOptions(device=args.device, dtype=args.dtype, memory_bytes=args.memory)
