"""Regroup the rows of a finished file for ik_llama.cpp, and take them apart again; no weight changes.

>>> from quantize.repack import repack
>>> result = repack("model-bf16.gguf", "model-r16.gguf", to=("BF16_R16",))
>>> result = repack("model-r16.gguf", "model-again.gguf", undo=True)
>>> result.paths[0].name
'model-again.gguf'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from quantize.repack.pipeline import repack
    from quantize.repack.rules import RepackOptions

__all__ = ["RepackOptions", "repack"]

_HOMES = {
    "RepackOptions": "quantize.repack.rules",
    "repack": "quantize.repack.pipeline",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
