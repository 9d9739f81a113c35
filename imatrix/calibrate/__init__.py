"""Files of the same types and size whose errors the model notices less, and the types that a size deserves.

>>> import calibrate, quantize
>>> calibration = gguf_tools.Calibration("text.txt")
>>> result = quantize.quantize("model-bf16.gguf", "model-Q4_K_M.gguf", "Q4_K_M", calibration=calibration)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from gguf_tools import __version__
    from gguf_tools.errors import ToolkitError
    from gguf_tools.progress import Reporter
    from imatrix.calibrate.calibration import Calibration
    from imatrix.forward.options import ForwardOptions
    from imatrix.sensitivities.measure import sensitivity
    from imatrix.sensitivities.options import SensitivityOptions
    from imatrix.texts.tokens import Cut
    from quantize.plan.sensitivities import Sensitivities

__all__ = [
    "Calibration",
    "Cut",
    "ForwardOptions",
    "Reporter",
    "Sensitivities",
    "SensitivityOptions",
    "ToolkitError",
    "__version__",
    "sensitivity",
]

_HOMES = {
    "Calibration": "imatrix.calibrate.calibration",
    "Cut": "imatrix.texts.tokens",
    "ForwardOptions": "imatrix.forward.options",
    "Sensitivities": "quantize.plan.sensitivities",
    "Reporter": "gguf_tools.progress",
    "SensitivityOptions": "imatrix.sensitivities.options",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "sensitivity": "imatrix.sensitivities.measure",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
