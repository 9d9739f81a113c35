"""Measures what each tensor of a model costs at each type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from calibrate.sensitivities.options import SensitivityChoices, SensitivityOptions
from forward.options import require_torch
from gguf_tools.choices import with_choices
from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import output_path
from gguf_tools.progress import NoReport, Reporter
from quantize.formats import get_format
from quantize.plan.overrides import parse_type
from quantize.plan.sensitivities import Sensitivities


def sensitivity(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: SensitivityOptions | None = None,
    report: Reporter | None = None,
    **choices: Unpack[SensitivityChoices],
) -> Sensitivities:
    """Measure the divergence that each tensor of a model adds at each type, and write it to a file.

    model    Hugging Face folder, or GGUF file. A folder is seen as the file that the converter makes of it
    text     UTF-8 file
    output   where the sensitivities go. Work folders beside it keep finished layers until all is done
    report   is told how far it has come
    choices  fields of SensitivityOptions, and of the Cut and ForwardOptions in it, as keyword arguments; they
             replace those of `options`
    raises   ToolkitError: BadActivation naming layer and tensor for NaN or infinity, BadRequest for a text or
             options that don't fit, OutputError for a disk that is too small or an output that can't be
             written. Finished layers stay for the next run
    """
    require_torch("measuring sensitivities")
    from calibrate.sensitivities.run import measure

    options = with_choices(options or SensitivityOptions(), choices)
    text, output = Path(text), output_path(output)
    for name in options.types or ():
        get_format(parse_type(name))  # says now if there is no such type, or no codec
    if not output.parent.is_dir():
        raise OutputError(f"{output}: can't be written (no such folder)")
    return measure(model, text, output, options, report or NoReport())
