"""Convert Hugging Face folders of DeepSeek V2 and V3 into GGUF files; read checkpoints of any format.

>>> import convert
>>> convert.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16")          # doctest: +SKIP
>>> convert.open_checkpoint("DeepSeek-V3-AWQ").read("lm_head.weight")              # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from convert.pipeline import ConvertOptions, convert
    from convert.weights import open_checkpoint

__all__ = ["ConvertOptions", "convert", "open_checkpoint"]

_HOMES = {
    "ConvertOptions": "convert.pipeline",
    "convert": "convert.pipeline",
    "open_checkpoint": "convert.weights",
}

__getattr__ = lazy_names(__name__, _HOMES)
