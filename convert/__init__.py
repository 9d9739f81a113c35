"""Convert Hugging Face folders of DeepSeek V2 and V3 into GGUF files; read checkpoints of any format.

>>> import convert
>>> convert.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16")          # doctest: +SKIP
>>> convert.open_checkpoint("DeepSeek-V3-AWQ").read("lm_head.weight")              # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.pipeline import ConvertOptions, convert
    from convert.weights import open_checkpoint

__all__ = ["ConvertOptions", "convert", "open_checkpoint"]

_HOMES = {
    "ConvertOptions": "convert.pipeline",
    "convert": "convert.pipeline",
    "open_checkpoint": "convert.weights",
}


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is used, so that a command's --help stays instant.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
