"""Observers: who is shown the activations that a model's matrices multiply, and decides what to keep of them.

An importance matrix keeps sums of squares (`SumsOfSquares`). Other observers may keep more (second moments)
or nothing: a run that only wants the model's predictions is observed by `Silent`.

Several threads compute a layer at a time. Each works with an observer of its own, made by `fresh`, and the
layer's observer takes them in one by one with `merge`, always in the same order. So what an observer adds up
does not depend on the number of threads.

In a pass that is differentiated (gradients/differentiate.py), an observer that is `ObservesGradients` is
shown the gradient of the loss at every product of a matrix, beside what the matrix multiplied. Parts of a
layer name their products to `watch`, which does nothing in an ordinary pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadActivation
from imatrix.forward.device import to_numpy
from imatrix.forward.kernels import sums_of_squares
from quantize.importances.entries import Importance

Arrays = Mapping[str, npt.NDArray[Any]]
"""Named arrays that an observer has kept, and that can be written to a file."""


class Observer(Protocol):
    """Is shown activations while a layer is computed.

    Activations are float32 or bfloat16, on the device that computes, and may be overwritten as soon as a
    method returns. `names` are the matrices' names in a GGUF file.
    """

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        """Take the rows `x`, (n_tokens, n_cols), that each of the matrices `names` multiplies."""

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        """Take what some of the `n_heads` matrices in the stack `name` multiply.

        x  (n_tokens, n_some, n_cols): for the heads from `first` on. Every head is shown every token
        """

    def row_groups(self, name: str, x: torch.Tensor) -> None:
        """Take what the matrix `name` multiplies, whose rows are in groups of equal size.

        x  (n_tokens, n_groups, n_cols): each group multiplies its own
        """

    def expert(self, names: Sequence[str], expert: int, n_experts: int, x: torch.Tensor) -> None:
        """Take the rows `x`, (n_tokens, n_cols), that one expert of each of the stacks `names` multiplies."""

    def routes(self, router: str, experts: torch.Tensor) -> None:
        """Take the experts that the matrix `router` has chosen for each token, int64 (n_tokens, n_used)."""

    def fresh(self) -> Self:
        """Return an observer of the same kind that has seen nothing."""

    def merge(self, other: Self) -> None:
        """Take in what `other` has seen."""

    def refuse_nonfinite(self) -> None:
        """Raise BadActivation naming the first matrix whose input had NaN or infinity, if that shows."""

    def arrays(self) -> Arrays:
        """Give the arrays that have been kept, for the work folder."""


@runtime_checkable
class ObservesGradients(Protocol):
    """Is shown gradients while a layer is differentiated."""

    def tokens(self, numbers: torch.Tensor) -> None:
        """Take the numbers of the tokens, ascending, whose gradients this observer will be shown, int64.

        It is called once, before any gradient. A call of `gradient` may be about some of them, in their
        order. Those of one chunk of the text come to one observer, unless an expert gets too many of them.
        """

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take the gradient of the loss at the product of some rows of the tensor `name` as it is stored.

        The rows of the tensor, those of a stack one matrix after the other, are `n_blocks` blocks of equal
        size: the matrices of a stack, or the heads of a matrix.

        gradient  (n_tokens, n_some, n_rows): at the products of the blocks from `first` on
        x         (n_tokens, n_some, n_cols): what they multiplied; (n_tokens, 1, n_cols) where it is the same
        """


def watch(
    observer: Observer, name: str, x: torch.Tensor, product: torch.Tensor, first: int = 0, n_blocks: int = 1
) -> None:
    """Have an observer of gradients shown the gradient at `product` as soon as it is known.

    product       what some rows of the tensor `name` make of `x`: (n_tokens, n_rows) of one block, or
                  (n_tokens, n_some, n_rows). Nothing happens unless it is differentiated
    x             (n_tokens, n_cols), or one row for each block, (n_tokens, n_some, n_cols)
    first         the first block
    n_blocks      blocks of the whole tensor, see `ObservesGradients`
    """

    def show(observer: ObservesGradients, gradient: torch.Tensor) -> None:
        observer.gradient(name, first, n_blocks, _in_blocks(x.detach()), _in_blocks(gradient))

    watch_gradient(observer, product, show)


def watch_gradient(
    observer: Observer, value: torch.Tensor, show: Callable[[ObservesGradients, torch.Tensor], None]
) -> None:
    """Call `show` with the observer and the gradient at `value`; nothing happens in an ordinary pass.

    This is for a product that the pass takes in another form: `show` makes the product's gradient of what it
    is given.
    """
    if value.requires_grad and isinstance(observer, ObservesGradients):
        seen_by = observer
        value.register_hook(lambda gradient: show(seen_by, gradient.detach()))


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dim() == 3 else rows[:, None]


class Silent:
    """Keeps nothing."""

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        pass

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        pass

    def row_groups(self, name: str, x: torch.Tensor) -> None:
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


@dataclass(frozen=True)
class TensorSums:
    """TensorSums over all rows that one tensor has seen.

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

    def sums(self) -> dict[str, TensorSums]:
        """Return the sums by tensor, in the order in which tensors were first seen."""
        sums = {
            name: TensorSums(to_numpy(matrices.squares), np.array([matrices.count], np.int64))
            for name, matrices in self._matrices.items()
        }
        for name, stack in self._experts.items():
            squares = np.zeros((stack.n_experts, stack.n_cols))
            counts = np.zeros(stack.n_experts, np.int64)
            for expert, (row, count) in stack.seen.items():
                squares[expert], counts[expert] = to_numpy(row), count
            sums[name] = TensorSums(squares, counts)
        return sums

    def arrays(self) -> Arrays:
        """Return the sums as `sums_of` takes them."""
        sums = self.sums()
        squares = {f"sums:{name}": tensor.squares for name, tensor in sums.items()}
        return squares | {f"counts:{name}": tensor.counts for name, tensor in sums.items()}


def sums_of(arrays: Arrays) -> dict[str, TensorSums]:
    """Return the sums by tensor; the inverse of `Accumulator.arrays`."""
    names = [name.removeprefix("sums:") for name in arrays if name.startswith("sums:")]
    return {name: TensorSums(arrays[f"sums:{name}"], arrays[f"counts:{name}"]) for name in names}


def _refuse_nonfinite(name: str, squares: torch.Tensor) -> None:
    if not bool(torch.isfinite(squares).all()):
        raise BadActivation(f"{name}: its input has NaN or infinity")
