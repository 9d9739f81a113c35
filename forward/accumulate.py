"""Sums of squared activations in float64, for every matrix of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from forward.device import to_numpy
from forward.layers.kernels import sums_of_squares
from forward.observe import Arrays
from gguf_tools.errors import BadActivation
from quantize.importances.entries import Importance


@dataclass(frozen=True)
class Sums:
    """What one tensor has seen.

    squares  float64 (n_mats, n_cols)
    counts   int64: rows per expert, (n_mats,); for any other tensor rows per matrix, (1,)
    """

    squares: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    def importance(self) -> Importance:
        """Return the sums as an importance matrix file holds them: heads end to end in one row."""
        values = self.squares.reshape(len(self.counts), -1)
        return Importance(values.astype(np.float32), self.counts.astype(np.float32))


@dataclass
class _Matrices:
    """Sums of an ordinary tensor, or of a stack of heads, all of which see every row.

    squares  float64 (n_mats, n_cols)
    """

    squares: torch.Tensor
    count: int = 0


@dataclass
class _Experts:
    """Sums of a stack of experts; those that have seen nothing take no memory.

    seen  expert -> (squares float64 (n_cols,), count)
    """

    n_experts: int
    n_cols: int
    seen: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def add(self, expert: int, squares: torch.Tensor, count: int) -> None:
        before = self.seen.get(expert)
        self.seen[expert] = (squares, count) if before is None else (before[0] + squares, before[1] + count)


class Accumulator:
    """An Observer that keeps the sum of the squares of every column."""

    def __init__(self) -> None:
        self._matrices: dict[str, _Matrices] = {}
        self._experts: dict[str, _Experts] = {}

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        squares = sums_of_squares(x[None])
        for name in names:
            self._add(name, 0, 1, squares, len(x))

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        # All heads see the same rows, so those of the first head are counted for all.
        self._add(name, first, n_heads, sums_of_squares(x.transpose(0, 1)), 0 if first else len(x))

    def row_groups(self, name: str, x: torch.Tensor) -> None:
        self.heads(name, 0, x.shape[1], x)

    def expert(self, names: Sequence[str], expert: int, n_experts: int, x: torch.Tensor) -> None:
        (squares,) = sums_of_squares(x[None])
        for name in names:
            self._stack(name, n_experts, len(squares)).add(expert, squares, len(x))

    def routes(self, router: str, experts: torch.Tensor) -> None:
        """Ignore where tokens go: experts are counted by what they are shown."""

    def fresh(self) -> Self:
        return type(self)()

    def merge(self, other: Self) -> None:
        for name, matrices in other._matrices.items():
            self._add(name, 0, len(matrices.squares), matrices.squares, matrices.count)
        for name, stack in other._experts.items():
            mine = self._stack(name, stack.n_experts, stack.n_cols)
            for expert, (squares, count) in stack.seen.items():
                mine.add(expert, squares, count)

    def _add(self, name: str, first: int, n_mats: int, squares: torch.Tensor, count: int) -> None:
        n_some, n_cols = squares.shape
        matrices = self._matrices.get(name)
        if matrices is None:
            matrices = _Matrices(torch.zeros((n_mats, n_cols), dtype=torch.float64))
            self._matrices[name] = matrices
        matrices.squares[first : first + n_some] += squares
        matrices.count += count

    def _stack(self, name: str, n_experts: int, n_cols: int) -> _Experts:
        stack = self._experts.get(name)
        if stack is None:
            stack = self._experts[name] = _Experts(n_experts, n_cols)
        return stack

    def refuse_nonfinite(self) -> None:
        for name, matrices in self._matrices.items():
            _refuse_nonfinite(name, matrices.squares)
        for name, stack in self._experts.items():
            for squares, _ in stack.seen.values():
                _refuse_nonfinite(name, squares)

    def sums(self) -> dict[str, Sums]:
        """Return the sums by tensor, in the order in which tensors were first seen."""
        sums = {
            name: Sums(to_numpy(matrices.squares), np.array([matrices.count], np.int64))
            for name, matrices in self._matrices.items()
        }
        for name, stack in self._experts.items():
            squares = np.zeros((stack.n_experts, stack.n_cols))
            counts = np.zeros(stack.n_experts, np.int64)
            for expert, (row, count) in stack.seen.items():
                squares[expert], counts[expert] = to_numpy(row), count
            sums[name] = Sums(squares, counts)
        return sums

    def arrays(self) -> Arrays:
        """Return the sums as `sums_of` takes them."""
        sums = self.sums()
        squares = {f"sums:{name}": tensor.squares for name, tensor in sums.items()}
        return squares | {f"counts:{name}": tensor.counts for name, tensor in sums.items()}


def sums_of(arrays: Arrays) -> dict[str, Sums]:
    """Return the sums by tensor; the inverse of `Accumulator.arrays`."""
    names = [name.removeprefix("sums:") for name in arrays if name.startswith("sums:")]
    return {name: Sums(arrays[f"sums:{name}"], arrays[f"counts:{name}"]) for name in names}


def _refuse_nonfinite(name: str, squares: torch.Tensor) -> None:
    if not bool(torch.isfinite(squares).all()):
        raise BadActivation(f"{name}: its input has NaN or infinity")
