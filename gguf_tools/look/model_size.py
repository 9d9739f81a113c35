"""The number of weights of a model, and its size label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterCounts:
    """Weights of a model, as its size label needs them.

    total      all weights
    shared     weights outside of routed experts
    expert     weights of one routed expert, over all layers
    n_experts  routed experts of a layer; 0 for a dense model
    """

    total: int = 0
    shared: int = 0
    expert: int = 0
    n_experts: int = 0

    @property
    def size_label(self) -> str:
        """Return `16x5.7M`: number of experts, and size of one with the shared weights; `1.5B` if dense."""
        if self.n_experts:
            return f"{self.n_experts}x{rounded(self.shared + self.expert)}"
        return rounded(self.total)


def count_parameters(tensors: Iterable[tuple[str, Sequence[int]]]) -> ParameterCounts:
    """Return the counts of GGUF tensors given as (name, shape), shapes rows first as in numpy.

    Routed experts are the stacked tensors `..._exps.weight` (experts, rows, columns) and
    `..._exps.bias` (experts, columns).
    """
    total = shared = expert = 0
    experts_of_tensors: list[int] = []
    for name, shape in tensors:
        n_elems = math.prod(shape)
        total += n_elems
        if "_exps." in name and len(shape) >= 3:
            n_experts = shape[-2] if ".bias" in name else shape[-3]
            expert += n_elems // n_experts
            experts_of_tensors.append(n_experts)
        else:
            shared += n_elems
    n_experts = sum(experts_of_tensors) // len(experts_of_tensors) if experts_of_tensors else 0
    return ParameterCounts(total, shared, expert, n_experts)


def rounded(n_params: int) -> str:
    """Return a number of weights with at least two digits: 671026419200 -> 671B, 5700000 -> 5.7M."""
    units = ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M"), (0, 1e-3, "K"))
    scale, suffix = next((scale, suffix) for limit, scale, suffix in units if n_params > limit or not limit)
    scaled = n_params * scale
    n_digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - n_digits, 0)}f}{suffix}"
