"""What no file can avoid: the divergence of the base from itself, once it is computed as other files are.

A difference between two files that is smaller than this can't be seen by whoever runs them: their engine's
rounding moves predictions by more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf_tools.text import table
from quality.divergence import Divergence


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
        """What was rounded, and what that costs."""
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


_HEADINGS = ("noise floor", "KLD", "median", "99%", "99.9%", "same top", "flips")


def noise_lines(noise: NoiseFloor) -> list[str]:
    """Print the floor as a table."""
    lines = table([_HEADINGS, *(_row(*part) for part in noise.parts)], right=range(1, len(_HEADINGS)))
    if noise.weights is None:
        lines.append("BF16 weights cost nothing: rounding to BF16 changes no weight of the base")
    return lines


def _row(name: str, found: Divergence) -> Sequence[str]:
    kld = found.kld
    return (
        name,
        f"{kld.mean.value:.6f} +/- {kld.mean.error:.6f}",
        *(f"{kld.percentiles[each]:.5f}" for each in ("median", "p99", "p99_9")),
        f"{found.same_top.value:.2%}",
        f"{found.flips.value:.3%}",
    )
