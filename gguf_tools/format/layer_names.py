"""Names of tensors in a form for people: those that differ only in the layer become one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_LAYER = re.compile(r"blk\.(\d+)")


def in_layer_ranges(names: Iterable[str]) -> list[str]:
    """Return `names` in a form for people: names that differ only in the layer become one.

    >>> in_layer_ranges(["output.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"])
    ['output.weight', 'blk.0-1.attn_q.weight']
    """
    layers: dict[str, list[int]] = {}
    for name in names:
        match = _LAYER.match(name)
        layer = int(match[1]) if match else None
        layers.setdefault(name if layer is None else _LAYER.sub("blk.{}", name, count=1), [])
        if layer is not None:
            layers[_LAYER.sub("blk.{}", name, count=1)].append(layer)
    return [
        name.replace("{}", _spans(sorted(numbers)), 1) if numbers else name
        for name, numbers in layers.items()
    ]


def _spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: 0, 1, 2, 5 is "0-2,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
