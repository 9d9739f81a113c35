"""Quantize GGUF files: the bytes of llama.cpp, the plan as data, importances with MLA done right.

>>> import quantize
>>> matrix = "model.imatrix"  # or what imatrix.load returns
>>> result = quantize.quantize("model-bf16.gguf", "model-Q4_K_M.gguf", "Q4_K_M", importances=matrix)
>>> result.paths[0].name
'model-Q4_K_M.gguf'

PlanOptions hold what the command's options say about types. A recipe file (see
`quantize.plan.recipe_files`) can take the place of the file type:

>>> options = quantize.PlanOptions(
...     overrides=quantize.parse_overrides(["ffn_down_exps=Q6_K"]),
...     fallbacks=quantize.parse_overrides(["attn_k_b=Q8_0"]),
... )
>>> report = quantize.lint("mine.yaml", "model-bf16.gguf", importances=matrix, options=options)
>>> report.stops
False
>>> result = quantize.quantize(
...     "model-bf16.gguf", "model-mine.gguf", "mine.yaml", importances=matrix, options=options
... )
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from gguf_tools import __version__
    from gguf_tools.errors import ToolkitError
    from gguf_tools.findings import Finding
    from quantize.arrays import decode, encode, read_values
    from quantize.calibration import Calibrating
    from quantize.importances.entries import Importance, ImportanceFile
    from quantize.linting import LintReport, lint
    from quantize.options import QuantizeOptions
    from quantize.pipeline import quantize, quantize_many
    from quantize.plan.decide import KeptGrid
    from quantize.plan.model_facts import ModelFacts
    from quantize.plan.overrides import Override, parse_overrides
    from quantize.plan.plan import Plan, PlanOptions, build_plan
    from quantize.plan.recipe import Recipe
    from quantize.plan.recipe_files import Mixture, find_mixture
    from quantize.prepare import Preparation
    from quantize.run import Result
    from quantize.run_options import RunOptions

__all__ = [
    "Calibrating",
    "Finding",
    "Importance",
    "ImportanceFile",
    "KeptGrid",
    "LintReport",
    "Mixture",
    "ModelFacts",
    "Override",
    "Plan",
    "PlanOptions",
    "Preparation",
    "QuantizeOptions",
    "Recipe",
    "Result",
    "RunOptions",
    "ToolkitError",
    "__version__",
    "build_plan",
    "decode",
    "encode",
    "find_mixture",
    "lint",
    "parse_overrides",
    "quantize",
    "quantize_many",
    "read_values",
]

_HOMES = {
    "Calibrating": "quantize.calibration",
    "Finding": "gguf_tools.findings",
    "Importance": "quantize.importances.entries",
    "ImportanceFile": "quantize.importances.entries",
    "KeptGrid": "quantize.plan.decide",
    "LintReport": "quantize.linting",
    "Mixture": "quantize.plan.recipe_files",
    "ModelFacts": "quantize.plan.model_facts",
    "Override": "quantize.plan.overrides",
    "Plan": "quantize.plan.plan",
    "PlanOptions": "quantize.plan.plan",
    "Preparation": "quantize.prepare",
    "QuantizeOptions": "quantize.options",
    "Recipe": "quantize.plan.recipe",
    "Result": "quantize.run",
    "RunOptions": "quantize.run_options",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "build_plan": "quantize.plan.plan",
    "decode": "quantize.arrays",
    "encode": "quantize.arrays",
    "find_mixture": "quantize.plan.recipe_files",
    "lint": "quantize.linting",
    "parse_overrides": "quantize.plan.overrides",
    "quantize": "quantize.pipeline",
    "quantize_many": "quantize.pipeline",
    "read_values": "quantize.arrays",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
