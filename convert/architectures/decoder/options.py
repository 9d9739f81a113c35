"""The options of a family without choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""
