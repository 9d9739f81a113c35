"""Refines the scales and codes of a finished file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.files.early_checks import refuse_early, refuse_shared
from gguf_tools.files.named_files import output_path
from gguf_tools.progress import Reporter, Shown, reporting
from imatrix.calibrate.refine.options import RefineChoices, Refinement, RefineOptions
from imatrix.forward.options import require_torch

LABEL = "refining"
"""Label of the bar of a refinement."""


@checked
def refine(
    file: str | os.PathLike[str],
    base: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: RefineOptions | None = None,
    progress: Shown | Reporter = None,
    **choices: Unpack[RefineChoices],
) -> Refinement:
    """Move the scales of a quantized file to where its predictions are closer to its base's.

        refine("lite-Q2_K.gguf", "DeepSeek-V2-Lite", "text.txt", "lite-Q2_K-refined.gguf", minutes=60)

    With `passes` its codes move first; see imatrix/calibrate/refine/layers.py.

    file      GGUF file or split set, whoever made it; types that can't be refined stay as they are
    base      Hugging Face folder, or GGUF file: the original
    text      UTF-8 file, or folder of which every file and every folder in it is a class. One chunk of eight,
              8 at most, is held back to judge by; of a folder, at least one of each class that has two
    output    a file of the same types and size, but for what it says of its text. A work folder beside it
              keeps what is done until all is
    progress  True, a function, a bar of tqdm or rich, a CancelToken, or a Reporter
    choices   fields of RefineOptions, and of the Cut and ForwardOptions in it, as keyword arguments; they
              replace those of `options`
    raises    ToolkitError: BadRequest for a text or a model that doesn't fit, BadActivation naming layer and
              tensor for NaN or infinity, OutputError for an output that can't be written or is something else
    """
    options = with_choices(choices, options or RefineOptions())
    file, base, text, output = Path(file), Path(base), Path(text), output_path(output)
    refuse_at_once(file, base, text, output)
    from imatrix.calibrate.refine.run import run_refinement

    with reporting(progress, LABEL) as report:
        return run_refinement(file, base, text, output, options, report)


def refuse_at_once(file: Path, base: Path, text: Path, output: Path) -> None:
    """Raise the ToolkitError of what `refine` refuses before it loads torch."""
    refuse_shared({"the output": output}, [file, base, text])
    refuse_early([output], [text], [file, base], folders=True)
    require_torch("refining")
