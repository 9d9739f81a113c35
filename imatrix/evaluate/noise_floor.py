"""Divergence that no file can avoid: that of the base from itself, once it is computed as other files are.

A difference between two files that is smaller than this can't be seen by whoever runs them: their engine's
rounding moves predictions by more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf_tools.text import table
from imatrix.evaluate.divergence import Divergence


@dataclass(frozen=True)
class NoiseFloor:
    """The base as two other files would be, each measured against the base itself.

    activations  its own weights, but activations rounded as llama.cpp's CPU kernels do for quantized weights
    weights      its weights rounded to BF16; None where that changes none: the base is BF16 already
    """

    activations: Divergence
    weights: Divergence | None

    @property
    def kld(self) -> float:
        """The mean divergence below which differences are noise: the larger of both."""
        return max(found.kld.mean.value for _, found in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, Divergence], ...]:
        """Name of each rounding, and the divergence that it causes."""
        measured = (("8-bit activations", self.activations), ("BF16 weights", self.weights))
        return tuple((name, found) for name, found in measured if found is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the floor as JSON data: shares as fractions, divergences in nats."""
        return {
            "kld": self.kld,
            "activations": _figures(self.activations),
            "bf16_weights": None if self.weights is None else _figures(self.weights),
        }


def _figures(found: Divergence) -> dict[str, float]:
    kld = found.kld
    return {
        "kld": kld.mean.value,
        "kld_error": kld.mean.error,
        **{name: kld.percentiles[name] for name in ("median", "p99", "p99_9")},
        "same_top": found.same_top.value,
        "flips": found.flips.value,
    }


def mean_floor(by_class: Iterable[NoiseFloor]) -> float:
    """Return the floor of the mean divergence over classes, which weigh the same; NaN without any."""
    klds = [each.kld for each in by_class]
    return sum(klds) / len(klds) if klds else math.nan


NOISE_HEADINGS = ("noise floor", "KLD", "median", "99%", "99.9%", "same top", "flips")


_NOTHING_LOST = "BF16 weights cost nothing: rounding to BF16 changes no weight of the base"


def noise_lines(noise: NoiseFloor, files: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Print the floor as a table, and the files below it.

    files  name and mean divergence of each
    """
    yield from table([NOISE_HEADINGS, *noise_rows(noise)], right=range(1, len(NOISE_HEADINGS)))
    if noise.weights is None:
        yield _NOTHING_LOST
    below = [name for name, kld in files if kld < noise.kld]
    if below:
        yield f"below the noise floor: {', '.join(below)}"


def noise_by_class_lines(
    by_class: Mapping[str, NoiseFloor], files: Iterable[tuple[str, Mapping[str, float]]]
) -> Iterator[str]:
    """Print the mean divergence of each part of the floor by class, and which files are below it where.

    files  name of each, and its mean divergence by class
    """
    parts = next(iter(by_class.values())).parts
    rows = [
        (name, *(f"{found.kld.mean.value:.6f}" for _, found in each.parts)) for name, each in by_class.items()
    ]
    yield from table([("noise floor", *(name for name, _ in parts)), *rows], right=range(1, 1 + len(parts)))
    if len(parts) < 2:
        yield _NOTHING_LOST
    for file, klds in files:
        below = [name for name, noise in by_class.items() if klds[name] < noise.kld]
        if below:
            yield f"{file} is below the noise floor on {', '.join(below)}"


def noise_rows(noise: NoiseFloor) -> list[Sequence[str]]:
    """Return a row for each part of the floor."""
    return [_row(*part) for part in noise.parts]


def noise_by_class_rows(by_class: Mapping[str, NoiseFloor]) -> list[Sequence[str]]:
    """Return a row for each part of the floor: its mean divergence on each class and over all of them."""
    rows: list[Sequence[str]] = []
    for name, _ in next(iter(by_class.values())).parts:
        klds = [dict(each.parts)[name].kld.mean.value for each in by_class.values()]
        rows.append((f"noise: {name}", *(f"{kld:.5f}" for kld in (*klds, sum(klds) / len(klds)))))
    return rows


def _row(name: str, found: Divergence) -> Sequence[str]:
    kld = found.kld
    return (
        name,
        f"{kld.mean.value:.6f} +/- {kld.mean.error:.6f}",
        *(f"{kld.percentiles[each]:.5f}" for each in ("median", "p99", "p99_9")),
        f"{found.same_top.value:.2%}",
        f"{found.flips.value:.3%}",
    )
