"""Command line arguments of a calibration, for the commands that quantize."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.argument_types import SEED
from gguf_tools.commands import command
from gguf_tools.commands.arguments.forward import (
    DEFAULT_CONTEXT,
    add_chunks_argument,
    add_context_argument,
    forward_options,
    options_of_text,
)
from gguf_tools.errors import BadArgument, MissingFile
from gguf_tools.files.early_checks import refuse_early
from gguf_tools.text import say

if TYPE_CHECKING:
    from imatrix.calibrate.calibration import BegunCalibration
    from imatrix.evaluate.options import EvaluateOptions
    from imatrix.forward.options import ForwardOptions
    from quantize.run import Run


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --calibrate and what belongs to it."""
    group = parser.add_argument_group("calibration on a text (needs torch)")
    group.add_argument(
        "--calibrate", type=command.text_file, action=command.StoreOnce, metavar="TEXT",
        help="choose the bytes of every tensor so that predictions on this UTF-8 text stay close to the"
        " original model's. TEXT may be a folder: each file and folder in it is a class of text (prose,"
        " code, chats.jsonl ...), each class gets an equal share of --chunks, and the report says what each"
        " class has gained",
    )  # fmt: skip
    add_context_argument(group)
    add_chunks_argument(group)
    group.add_argument(
        "--no-sequential",
        action="store_true",
        help="calibrate every tensor on the original model's activations: twice as fast, larger errors",
    )
    group.add_argument(
        "--one-sided",
        action="store_true",
        help="skip the backward pass, and ignore the gradients at the outputs of each matrix",
    )
    group.add_argument("--no-embedding", action="store_true", help="encode token_embd as without --calibrate")
    group.add_argument(
        "--seed", type=command.number(SEED), default=0, metavar="N",
        help="seed of the random labels for the backward pass (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--evaluate", type=command.text_file, metavar="TEXT",
        help="afterwards measure the KL divergence from INPUT on this text; it should differ from the text of"
        " --calibrate",
    )  # fmt: skip
    group.add_argument("--device", help="torch device: cpu, cuda, cuda:1 ... (default: CUDA if available)")
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="number format of matrix products (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--memory", dest="memory_bytes", type=command.gigabytes, default=4 << 30, metavar="GB",
        help="keep at most GB gigabytes of hidden states in memory; the rest goes to a file (default: 4)",
    )  # fmt: skip


def refuse_early_of(args: argparse.Namespace, output: Path | None) -> None:
    """Refuse a text that is not there, as the flag may have taken INPUT for it, and an odd output.

    raises  as `refuse_early`
    """
    texts: dict[str, Path | None] = {
        f"--{option.replace('_', '-')}": getattr(args, option)
        for option in ("calibrate", "evaluate", "sensitivity_text")
    }
    for flag, text in texts.items():
        if text is not None and not text.exists():
            raise MissingFile(f"{text}: can't be read (No such file or directory), and {flag} takes a text")
    refuse_early([output], texts.values(), folders=True)


@dataclass(frozen=True)
class Divergence:
    """Measurement of an output for --evaluate: how far it is from its source on another text."""

    text: Path
    options: EvaluateOptions

    def refuse(self, run: Run) -> None:
        """Raise BadRequest, before a weight is read, for a text that can't be used."""
        from imatrix.calibrate.plan import refuse_text

        refuse_text(self.text, self.options.cut, run.preparation, measured=True)

    def print_of(self, source: Path, output: Path) -> None:
        """Measure an output, and print the result."""
        from imatrix.evaluate.pipeline import evaluate

        say(*evaluate(source, self.text, [output], self.options, progress=True).lines())


def read_divergence(args: argparse.Namespace) -> Divergence | None:
    """Read --evaluate; None without it."""
    if args.evaluate is None:
        return None
    from imatrix.evaluate.options import EvaluateOptions
    from imatrix.texts.tokens import Cut

    adapter = {"lora": args.lora, "lora_scale": args.lora_scale}
    options = EvaluateOptions(Cut(args.chunk_size), calibration_forward(args), **adapter)
    return Divergence(args.evaluate, options)


def read_calibration(args: argparse.Namespace) -> BegunCalibration | None:
    """Read --calibrate and what belongs to it; None without it.

    raises  BadArgument for what belongs to it where it is missing
    """
    if args.calibrate is None:
        for option in ("no_sequential", "one_sided", "no_embedding", "seed"):
            if getattr(args, option):
                raise BadArgument(f"--{option.replace('_', '-')} is for --calibrate, which is missing")
        if args.evaluate is None and args.sensitivity_text is None:
            for option, is_given in (
                ("--chunks", args.n_chunks is not None), ("-c", args.chunk_size != DEFAULT_CONTEXT),
            ):  # fmt: skip
                if is_given:
                    raise BadArgument(
                        f"{option} is for a text, and none is given: --calibrate, --evaluate or"
                        " --sensitivity-text names one"
                    )
        return None
    from imatrix.forward.options import require_torch

    require_torch("--calibrate")
    from imatrix.calibrate.calibration import Calibration

    calibration = options_of_text(
        Calibration,
        args,
        text=args.calibrate,
        sequential=not args.no_sequential,
        method="one-sided" if args.one_sided else "two-sided",
        embedding=not args.no_embedding,
        forward=calibration_forward(args),
    )
    return calibration.begin()


def calibration_forward(args: argparse.Namespace) -> ForwardOptions:
    """Read how the model is computed; threads and scheduler are those of the run."""
    return forward_options(args, scheduler=None)
