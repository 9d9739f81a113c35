"""Losses for `quantize --size` when none were measured before: measured now, and kept beside the output."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Measurement:
    """How to measure what each tensor of a model costs.

    text    UTF-8
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
        named = source if cached_name(source) is None else folder_name(source)
        path = Path(f"{output or named}.losses.json")
        if (
            path.exists()
            and not self.options.restart
            and _are_the_same(path, source, self.text, self.options.cut)
        ):
            forget_folders(path)  # of a run that was killed while it removed them
            return path
        with LayerBar("measuring what each tensor costs", quiet=self.silent) as bar:
            sensitivity(source, self.text, path, self.options, bar)
        if not self.quiet:
            print(f"wrote {path}; --losses takes it for other sizes")
        return path


def read_measurement(args: argparse.Namespace) -> Measurement:
    """Read what is to be measured; raises BadArgument where no text is named."""
    text = args.sensitivity_text or args.calibrate
    if text is None:
        raise BadArgument(
            "--size needs to know what each tensor costs: --losses FILE.json, or --sensitivity-text TEXT"
        )
    options = SensitivityOptions(
        cut=cut_of(args), forward=calibration_forward(args), restart=args.restart, any_text=args.force
    )
    return Measurement(text, options, args.quiet, args.quiet or args.json)


def _are_the_same(path: Path, source: Path, text: Path, cut: Cut) -> bool:
    """Whether a file has the losses that would be measured."""
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
