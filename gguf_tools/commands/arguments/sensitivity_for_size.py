"""Losses for `quantize --size` when none were measured before: measured now, and kept beside the output."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.commands.arguments.calibration import calibration_forward
from gguf_tools.commands.arguments.forward import cut_of
from gguf_tools.errors import BadArgument
from gguf_tools.hub.names import cached_name, folder_name
from gguf_tools.terminal import say
from imatrix.sensitivities.measure import SensitivityOptions, measured_before, sensitivity


@dataclass(frozen=True)
class Measurement:
    """How to measure what each tensor of a model costs.

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
        named = source if cached_name(source) is None else folder_name(source)
        path = Path(f"{output or named}.losses.json")
        if measured_before(source, self.text, path, self.options) is not None:
            return path
        sensitivity(source, self.text, path, self.options, progress=not self.silent)
        if not self.quiet:
            say(f"wrote {path}; --losses takes it for other sizes")
        return path


def read_measurement(args: argparse.Namespace) -> Measurement:
    """Read what is to be measured; raises BadArgument where no text is named."""
    text = args.sensitivity_text or args.calibrate
    if text is None:
        raise BadArgument(
            "--size needs to know what each tensor costs: --losses FILE.json, or --sensitivity-text TEXT"
        )
    options = SensitivityOptions(
        cut=cut_of(args), forward=calibration_forward(args), restart=args.restart, any_text=args.force,
        force=args.force, pad_hidden=args.pad_hidden,
    )  # fmt: skip
    return Measurement(text, options, args.quiet, args.quiet or args.json)
