"""Whether a file was calibrated on what it is measured with: then its numbers flatter it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gguf_tools.findings import Finding, Level
from imatrix.forward.open import ModelSource
from quantize.importances.text_sketch import PASSAGE, TextSketch


def overlap_findings(
    models: Sequence[ModelSource], tokens: npt.NDArray[np.int64], text: str = "the text"
) -> Iterator[Finding]:
    """Yield a warning for each file whose calibration text shares passages with a text.

    tokens  int64 (n,), of the text that is measured, in order
    text    what it is called
    """
    for model in models:
        sketch = TextSketch.read(model.metadata)
        shared = 0.0 if sketch is None else sketch.shared(tokens)
        if shared:
            percent = f"about {100 * shared:.0f} %" if shared >= 0.005 else "less than 1 %"
            yield Finding(
                "calibrated on this",
                f"{model.path.name} was calibrated on {percent} of {text}, by passages of {PASSAGE} tokens:"
                " it is better there than elsewhere, and so are these numbers",
                Level.WARNING,
            )
