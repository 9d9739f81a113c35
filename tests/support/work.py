"""How much work a call is, counted in steps of the interpreter: the same on every machine, idle or busy."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def count_steps(work: Callable[[], T]) -> tuple[T, Counter[str]]:
    """Return the result of `work`, how many Python functions it called ("call") and lines it ran ("line")."""
    steps: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        steps[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return result, steps
