"""Round numbers on logarithmic axes, as many as there is room for.

matplotlib labels what is between two powers of ten in a notation of its own, and only where it sees fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from gguf_tools.text import size_text

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_ENOUGH = 3
"""Fewer labels than this say little about an axis; then it gets steps of equal size."""

_IN_A_DECADE = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
_IN_A_DOUBLING = ((1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875), (1, 1.25, 1.5, 1.75), (1, 1.5), (1,))
"""Numbers to label between a power of the base and the next one, from many to few."""

_POINTS_A_NUMBER_ACROSS, _POINTS_A_SIZE_ACROSS, _POINTS_UP = 44, 58, 36
"""The least distance of two labels, in points."""


def label_numbers(axis: Axis, length: float) -> None:
    """Label a logarithmic axis with numbers, once its limits are final.

    length  of the axis in points
    """
    from matplotlib.axis import XAxis

    gap = (_POINTS_A_NUMBER_ACROSS if isinstance(axis, XAxis) else _POINTS_UP) / length
    _label(axis, log_ticks(*_limits(axis), 10, _IN_A_DECADE, gap), number_text)


def label_sizes(axis: Axis, length: float) -> None:
    """Label a logarithmic axis with sizes of files, in bytes; see `label_numbers`."""
    _label(axis, log_ticks(*_limits(axis), 2, _IN_A_DOUBLING, _POINTS_A_SIZE_ACROSS / length), _size_label)


def log_ticks(
    lowest: float, highest: float, base: int, choices: Sequence[Sequence[float]], gap: float
) -> list[float]:
    """Return round numbers between two, no pair of them nearer to each other than `gap`.

    choices  the numbers to label between a power of `base` and the next, from many to few
    gap      a share of the axis
    """
    powers = range(math.floor(math.log(lowest, base)), math.ceil(math.log(highest, base)) + 1)
    for ticks in (
        *([part * float(base) ** power for power in powers for part in parts] for parts in choices),
        *([float(base) ** power for power in powers if power % every == 0] for every in (2, 3, 5, 10, 20)),
    ):
        inside = [tick for tick in ticks if lowest <= tick <= highest]
        if _nearest(inside, lowest, highest) >= gap:
            break
    return inside if len(inside) >= _ENOUGH else _even_ticks(lowest, highest, gap)


def _nearest(ticks: Sequence[float], lowest: float, highest: float) -> float:
    """Return the least distance of two neighbours as a share of the axis."""
    ratios = (above / below for below, above in pairwise(ticks))
    return math.log(min(ratios, default=math.inf)) / math.log(highest / lowest)


def _even_ticks(lowest: float, highest: float, gap: float) -> list[float]:
    """Return round numbers at equal steps, for an axis so short that it is nearly linear."""
    from matplotlib.ticker import MaxNLocator

    for most in range(8, 1, -1):
        steps = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(lowest, highest)
        ticks = [float(tick) for tick in steps if lowest <= tick <= highest]
        if _nearest(ticks, lowest, highest) >= gap:
            break
    return ticks


def _limits(axis: Axis) -> tuple[float, float]:
    lowest, highest = sorted(axis.get_view_interval())
    return float(lowest), float(highest)


def _label(axis: Axis, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    from matplotlib.ticker import NullFormatter

    axis.set_ticks(ticks, list(map(text, ticks)))
    axis.set_minor_formatter(NullFormatter())


def number_text(value: float) -> str:
    """Return a number as people write it.

    >>> number_text(1e-5), number_text(0.002), number_text(0.30000000000000004)
    ('1e-5', '0.002', '0.3')
    """
    return f"{value:.6g}".replace("e-0", "e-")


def _size_label(n_bytes: float) -> str:
    number, unit = size_text(n_bytes).split(" ")
    return f"{float(number):g} {unit}"
