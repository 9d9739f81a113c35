"""Checkpoint formats, and which one a checkpoint is in.

The registry is the order in which formats are tried; `plain` is last because it takes what is left. A
module is imported when its turn comes, and none of them loads numba before a weight is decoded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gguf_tools.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.weights.base import WeightsLoader

LOADERS: tuple[tuple[str, str], ...] = (
    ("convert.weights.fp8", "Fp8Loader"),
    ("convert.weights.plain", "PlainLoader"),
)
"""Module and class of every loader, in the order of trying."""

QUANT_METHODS: tuple[str, ...] = ("fp8",)
"""The values of quantization_config.quant_method that some loader reads."""


def choose_loader(checkpoint: Checkpoint) -> WeightsLoader:
    """Return the loader for the format of `checkpoint`.

    raises  UnsupportedCheckpoint naming the method, the key and the first tensor that shows it
    """
    from convert.weights.base import quantization_config
    from convert.weights.plain import TYPES

    first = next((n for n in checkpoint.names() if checkpoint.raw(n).dtype not in TYPES), None)
    shown = (
        "no tensor shows it"
        if first is None
        else f"first such tensor: {first} ({checkpoint.raw(first).dtype})"
    )
    config = quantization_config(checkpoint)
    method = config.get("quant_method", config.get("method"))
    if config and method not in QUANT_METHODS:
        raise UnsupportedCheckpoint(
            f"{checkpoint.config_path}: quantization_config.quant_method is {method!r}, which is not read"
            f" (read: {', '.join(QUANT_METHODS)}); {shown}"
        )
    for module, name in LOADERS:
        loader: type[WeightsLoader] = getattr(import_module(module), name)
        if loader.matches(checkpoint):
            return loader(checkpoint)
    said = f"quant_method {method!r}" if config else "no quantization_config"
    raise UnsupportedCheckpoint(
        f"{checkpoint.config_path}: {said}, and weights in no format that is read; {shown}"
    )
