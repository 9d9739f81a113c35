"""Rules that towers share: matrices with biases, and matrices that clip what they take and give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from convert.architectures.decoder.rules import one
from convert.architectures.rules import Rule, Where
from convert.architectures.vision.arrange import bound


def layers(config: Any, options: Any) -> range:
    return range(config.num_hidden_layers)


def with_bias(where: Where, name: str, source: str, rows: str, cols: str = "") -> tuple[Rule, ...]:
    """Return the rules of a weight, and of the bias that is as long as the weight has rows."""
    return (
        one(where, f"{name}.weight", f"{source}.weight", f"{rows} {cols}"),
        one(where, f"{name}.bias", f"{source}.bias", rows),
    )


_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def clipped(where: Where, name: str, source: str, sizes: str) -> Iterator[Rule]:
    """Yield the rules of a matrix, and of the bounds that a checkpoint may have beside it."""
    yield one(where, f"{name}.weight", f"{source}.weight", sizes)
    for side in _BOUNDS:
        yield replace(one(where, f"{name}.{side}", f"{source}.{side}", "", bound), optional=True)
