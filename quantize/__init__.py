"""Quantize GGUF files: the bytes of llama.cpp, the plan as data, importances with MLA done right.

>>> import imatrix, quantize
>>> quantize.quantize("model-bf16.gguf", "model-Q4_K_M.gguf", "Q4_K_M",          # doctest: +SKIP
...                   importances=imatrix.load("model.imatrix"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantize.importance import Importance, ImportanceFile
    from quantize.pipeline import quantize
    from quantize.plan import Plan, PlanOptions, build_plan

__all__ = ["Importance", "ImportanceFile", "Plan", "PlanOptions", "build_plan", "quantize"]

_HOMES = {
    "Importance": "quantize.importance",
    "ImportanceFile": "quantize.importance",
    "Plan": "quantize.plan",
    "PlanOptions": "quantize.plan",
    "build_plan": "quantize.plan",
    "quantize": "quantize.pipeline",
}


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is used, so that a command's --help stays instant.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
