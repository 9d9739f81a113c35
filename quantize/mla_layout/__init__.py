"""Rewrite a GGUF file between the layouts of multi-head latent attention, without the checkpoint.

>>> from quantize.mla_layout import change_layout
>>> result = change_layout("lite-ik.gguf", "lite.gguf", "split")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from quantize.mla_layout.pipeline import LayoutChange, change_layout
    from quantize.roles import MLALayout

__all__ = ["LayoutChange", "MLALayout", "change_layout"]

_HOMES = {
    "LayoutChange": "quantize.mla_layout.pipeline",
    "MLALayout": "quantize.roles",
    "change_layout": "quantize.mla_layout.pipeline",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
