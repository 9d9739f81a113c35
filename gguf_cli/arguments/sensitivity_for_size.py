"""Losses for `quantize --size` when none were measured before: measured now, and kept beside the output."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from calibrate.sensitivities.measure import SensitivityOptions, sensitivity
from forward.gradients.forward_backward import forget_folders
from forward.text.tokens import Cut
from gguf_cli.arguments.calibration import calibration_forward
from gguf_cli.arguments.forward import cut_of
from gguf_tools.errors import BadArgument, ToolkitError
from gguf_tools.files.named_files import read_input
from gguf_tools.hub.names import cached_name, folder_name
from gguf_tools.progress import LayerBar
from quantize.plan.sensitivities import Sensitivities, read_sensitivities


def losses_for_size(args: argparse.Namespace, source: Path, output: Path | None) -> Path:
    """Return a file with the losses of a model on the text of --sensitivity-text, or else --calibrate.

    A file that an earlier run of the same command has left is taken as it is.

    raises  BadRequest when neither text is given, and what `sensitivity` raises
    """
    text = args.sensitivity_text or args.calibrate
    if text is None:
        raise BadArgument(
            "--size needs to know what each tensor costs: --losses FILE.json, or --sensitivity-text TEXT"
        )
    named = source if cached_name(source) is None else folder_name(source)
    path = Path(f"{output or named}.losses.json")
    cut = cut_of(args)
    if path.exists() and not args.restart and _are_the_same(path, source, text, cut):
        forget_folders(path)  # of a run that was killed while it removed them
        return path
    options = SensitivityOptions(
        cut=cut, forward=calibration_forward(args), restart=args.restart, any_text=args.force
    )
    with LayerBar("measuring what each tensor costs", quiet=args.quiet) as bar:
        sensitivity(source, text, path, options, bar)
    if not args.quiet and not args.json:
        print(f"wrote {path}; --losses takes it for other sizes")
    return path


def _are_the_same(path: Path, source: Path, text: Path, cut: Cut) -> bool:
    """Return whether a file has the losses that would be measured."""
    from forward.open import open_model

    try:
        losses: Sensitivities = read_sensitivities(path)
        digest = hashlib.sha256(read_input(text)).hexdigest()
        with open_model(source) as model:
            files = model.watch.recognised_by()
    except (OSError, ToolkitError):
        return False
    return (
        losses.model.get("files") == files
        and losses.text.get("sha256") == digest
        and losses.text.get("context") == cut.chunk_size
        and (cut.n_chunks is None or losses.text.get("chunks") == cut.n_chunks)
    )
