"""Layers of Qwen that see the last positions alone."""

from __future__ import annotations

from typing import Any

from convert.architectures.config_reader import ConfigReader


def window_fields(read: ConfigReader) -> dict[str, Any]:
    """Return sliding_window and sliding_layers, which are those from max_window_layers on."""
    if not read.flag("use_sliding_window", False):
        return {}
    window = read.size_or_null("sliding_window", 4096)
    first = read.size("max_window_layers", 28, least=0)
    return {"sliding_window": window, "sliding_layers": tuple(range(first, read.size("num_hidden_layers")))}
