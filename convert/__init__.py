"""Convert Hugging Face folders (DeepSeek, Kimi, GLM, Llama, Qwen ...) into GGUF files; read checkpoints.

>>> import convert
>>> result = convert.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16")
>>> result.paths[0].name
'lite-bf16.gguf'

Weights come out as float32, in whatever format a checkpoint keeps them:

>>> weights = convert.open_checkpoint("DeepSeek-V2-Lite")
>>> weights.read("lm_head.weight").dtype
dtype('float32')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from convert.options import ConvertOptions
    from convert.pipeline import convert
    from convert.weights import open_checkpoint
    from convert.weights.model_weights import ModelWeights
    from gguf_tools import __version__
    from gguf_tools.errors import ToolkitError
    from quantize.calibration import Calibrating
    from quantize.plan.decide import KeptGrid
    from quantize.plan.overrides import Override
    from quantize.plan.plan import PlanOptions
    from quantize.plan.recipe_files import Mixture
    from quantize.prepare import Preparation
    from quantize.run import Result
    from quantize.run_options import RunOptions

__all__ = [
    "Calibrating",
    "ConvertOptions",
    "KeptGrid",
    "Mixture",
    "ModelWeights",
    "Override",
    "PlanOptions",
    "Preparation",
    "Result",
    "RunOptions",
    "ToolkitError",
    "__version__",
    "convert",
    "open_checkpoint",
]

_HOMES = {
    "Calibrating": "quantize.calibration",
    "ConvertOptions": "convert.options",
    "KeptGrid": "quantize.plan.decide",
    "Mixture": "quantize.plan.recipe_files",
    "ModelWeights": "convert.weights.model_weights",
    "Override": "quantize.plan.overrides",
    "PlanOptions": "quantize.plan.plan",
    "Preparation": "quantize.prepare",
    "Result": "quantize.run",
    "RunOptions": "quantize.run_options",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "convert": "convert.pipeline",
    "open_checkpoint": "convert.weights",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
