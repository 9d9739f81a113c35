"""How good is a quantized model? Perplexity and divergence from its base, and where it drifts away.

>>> import quality
>>> evaluation = quality.evaluate("DeepSeek-V2-Lite", "text.txt", ["model-bf16.gguf"])
>>> evaluation.models[0].divergence.kld.mean.value < 0.001
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from forward.options import ForwardOptions
    from forward.text import Cut
    from gguf_tools import __version__
    from gguf_tools.errors import ToolkitError
    from quality.calibrate.options import Calibration
    from quality.damage.measure import SensitivityOptions, sensitivity
    from quality.evaluation import Evaluation
    from quality.options import EvaluateOptions, LogitsFile, Reporter
    from quality.pipeline import evaluate
    from quantize.plan.losses import Losses

__all__ = [
    "Calibration",
    "Cut",
    "EvaluateOptions",
    "Evaluation",
    "ForwardOptions",
    "LogitsFile",
    "Losses",
    "Reporter",
    "SensitivityOptions",
    "ToolkitError",
    "__version__",
    "evaluate",
    "sensitivity",
]

_HOMES = {
    "Calibration": "quality.calibrate.options",
    "Cut": "forward.text",
    "EvaluateOptions": "quality.options",
    "Evaluation": "quality.evaluation",
    "ForwardOptions": "forward.options",
    "LogitsFile": "quality.options",
    "Losses": "quantize.plan.losses",
    "Reporter": "quality.options",
    "SensitivityOptions": "quality.damage.measure",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "evaluate": "quality.pipeline",
    "sensitivity": "quality.damage.measure",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
