"""Observers: who is shown the activations that a model's matrices multiply, and decides what to keep of them.

An importance matrix keeps sums of squares. Other observers may keep more (second moments) or nothing: a run
that only wants the model's predictions is observed by `Silent`.

Several threads compute a layer at a time. Each works with an observer of its own, made by `fresh`, and the
layer's observer takes them in one by one with `merge`, always in the same order. So what an observer adds up
does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy.typing as npt
import torch

Arrays = Mapping[str, npt.NDArray[Any]]
"""What an observer has kept, as named arrays that can be written to a file."""


class Observer(Protocol):
    """Is shown activations while a layer is computed.

    Activations are float32 or bfloat16, on the device that computes, and may be overwritten as soon as a
    method returns. `names` are the matrices' names in a GGUF file.
    """

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        """Take the rows `x`, (n_tokens, n_cols), that each of the matrices `names` multiplies."""
        ...

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        """Take what some of the `n_heads` matrices in the stack `name` multiply.

        x  (n_tokens, n_some, n_cols): for the heads from `first` on. Every head is shown every token
        """
        ...

    def expert(self, names: Sequence[str], expert: int, n_experts: int, x: torch.Tensor) -> None:
        """Take the rows `x`, (n_tokens, n_cols), that one expert of each of the stacks `names` multiplies."""
        ...

    def routes(self, router: str, experts: torch.Tensor) -> None:
        """Take the experts that the matrix `router` has chosen for each token, int64 (n_tokens, n_used)."""
        ...

    def fresh(self) -> Self:
        """Return an observer of the same kind that has seen nothing."""
        ...

    def merge(self, other: Self) -> None:
        """Take in what `other` has seen."""
        ...

    def refuse_nonfinite(self) -> None:
        """Raise BadActivation naming the first matrix whose input had NaN or infinity, if that shows."""
        ...

    def arrays(self) -> Arrays:
        """Return what has been kept, for the work folder."""
        ...


class Silent:
    """Keeps nothing."""

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        pass

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        pass

    def expert(self, names: Sequence[str], expert: int, n_experts: int, x: torch.Tensor) -> None:
        pass

    def routes(self, router: str, experts: torch.Tensor) -> None:
        pass

    def fresh(self) -> Self:
        return self

    def merge(self, other: Self) -> None:
        pass

    def refuse_nonfinite(self) -> None:
        pass

    def arrays(self) -> Arrays:
        return {}
