"""Covariances of gradients: for every product of a matrix the sum of g g^T over the tokens.

g is the gradient of -log p(label) at the product, its label drawn from the model's own predictions. With the
second moments H of what the matrix multiplies, an error E costs about tr(G E H E^T) / 2 per token.

A matrix with many rows has its covariance in blocks along the rows: heads are blocks of their own, and no
block is larger than BLOCK_ROWS. Matrices of experts that write hidden states (ffn_down_exps) share one, the
sum over all experts. Those that write an expert's inner columns have nothing to share, because columns of one
expert mean nothing to another. They have one each where these are small, else none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from forward.device import to_numpy
from forward.observe import Arrays, Silent
from gguf_tools.errors import BadActivation
from quantize.roles import Role, tensor_role

BLOCK_ROWS = 2048
"""Largest number of rows in a block: its covariance takes 16 MB in float32."""

_STEP = 16
"""Number that a block's rows are a multiple of where a matrix is cut: rows are encoded as many at a time."""

Floats64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowBlock:
    """The covariance of some rows of a matrix.

    start, stop  the rows, counted from the matrix' first
    covariance   float64 (stop - start, stop - start): the sum of g g^T
    """

    start: int
    stop: int
    covariance: Floats64


@dataclass
class _Tensor:
    """The layout of a tensor's covariances.

    n_blocks  blocks that the pass shows; 1 where they share a covariance
    n_rows    rows of each
    """

    n_blocks: int
    n_rows: int


_Key = tuple[str, int]
"""A tensor, and the first row of a piece of its blocks."""


class Covariances(Silent):
    """An observer of a differentiated layer that keeps the covariances of its gradients.

    expert_bytes  how large the covariances of a stack's experts may be all together, in float32
    """

    def __init__(self, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._tensors: dict[str, _Tensor] = {}
        self._parts: dict[tuple[str, int, int], torch.Tensor] = {}
        self._counts: dict[tuple[str, int, int], int] = {}
        self._sums: dict[_Key, torch.Tensor] = {}
        self._rows: dict[str, npt.NDArray[np.int64]] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        """Ignore which tokens they are: all are added up."""

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        n_tokens, _, n_rows = gradient.shape
        role = tensor_role(name, (n_blocks, n_rows, x.shape[-1])).role
        if n_blocks > 1 and role in (Role.FFN_GATE, Role.FFN_UP):
            if n_blocks * covariance_bytes(n_rows) > self._expert_bytes:
                return
        elif n_blocks > 1 and role == Role.FFN_DOWN:
            first, n_blocks = 0, 1
        self._tensors.setdefault(name, _Tensor(n_blocks, n_rows))
        for start, stop in row_pieces(n_rows):
            part = gradient[:, :, start:stop].transpose(0, 1).float()
            product = torch.bmm(part.transpose(1, 2), part)
            self._put((name, first, start), product, n_tokens)

    def fresh(self) -> Self:
        return type(self)(self._expert_bytes)

    def merge(self, other: Self) -> None:
        self._tensors = {**other._tensors, **self._tensors}
        for (name, first, start), product in other._parts.items():
            tensor = self._tensors[name]
            n_some, size, _ = product.shape
            sums = self._sums.get((name, start))
            if sums is None:
                shape = tensor.n_blocks, size, size
                sums = torch.zeros(shape, device=product.device)
                self._sums[name, start] = sums
            sums[first : first + n_some] += product
            if start == 0:
                rows = self._rows.setdefault(name, np.zeros(tensor.n_blocks, np.int64))
                rows[first : first + n_some] += other._counts[name, first, start]

    def refuse_nonfinite(self) -> None:
        for (name, _), sums in self._sums.items():
            if not bool(torch.isfinite(sums.sum())):
                raise BadActivation(f"{name}: the gradients at its product have NaN or infinity")

    def arrays(self) -> Arrays:
        """Return the sums for `LayerGradients`."""
        arrays: dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]] = {
            f"covariance:{name}:{start}": to_numpy(sums) for (name, start), sums in self._sums.items()
        }
        return arrays | {f"rows:{name}": rows for name, rows in self._rows.items()}

    def _put(self, key: tuple[str, int, int], product: torch.Tensor, n_tokens: int) -> None:
        before = self._parts.get(key)
        self._parts[key] = product if before is None else before + product
        self._counts[key] = self._counts.get(key, 0) + n_tokens


@dataclass(frozen=True)
class LayerGradients:
    """The covariances of a layer, as `Covariances.arrays` returned them.

    Rows are those of the tensor as it is stored, matrices of a stack counted from 0. The gradients of
    attn_kv_b, and those of attn_k_b and attn_v_b, are all there, whatever layout the model has that was
    differentiated.
    """

    arrays: Arrays

    def names(self) -> list[str]:
        """Return the tensors that have covariances."""
        return [key.removeprefix("rows:") for key in self.arrays if key.startswith("rows:")]

    def blocks(self, name: str, index: int | None = None) -> list[RowBlock]:
        """Return the covariance of a matrix, in blocks of rows; an empty list where there is none.

        index  the matrix in a stack, an expert or a head; None: the whole tensor, its matrices end to end,
               which is also how to ask for a tensor that is not stacked
        """
        starts = self._starts(name)
        if not starts:
            return []
        stacks = [self.arrays[f"covariance:{name}:{start}"] for start in starts]
        n_blocks, n_rows = len(stacks[0]), sum(stack.shape[1] for stack in stacks)
        wanted: range = range(n_blocks)
        if index is not None:
            wanted = range(index, index + 1) if n_blocks > 1 else range(1)
        return [
            RowBlock(at, at + stack.shape[1], stack[block].astype(np.float64))
            for place, block in enumerate(wanted)
            for start, stack in zip(starts, stacks, strict=True)
            for at in (place * n_rows + start,)
        ]

    def covariance(self, name: str, index: int | None = None) -> Floats64 | None:
        """Return the covariance of `blocks` as one matrix, zero between the blocks; None where there is none.

        Of a matrix with many rows it is large: float64 (n_rows, n_rows).
        """
        blocks = self.blocks(name, index)
        if not blocks:
            return None
        whole = np.zeros((blocks[-1].stop, blocks[-1].stop))
        for block in blocks:
            whole[block.start : block.stop, block.start : block.stop] = block.covariance
        return whole

    def is_shared(self, name: str) -> bool:
        """Whether all matrices of a stack share one covariance."""
        starts = self._starts(name)
        return bool(starts) and len(self.arrays[f"covariance:{name}:{starts[0]}"]) == 1

    def n_tokens(self, name: str, index: int | None = None) -> int:
        """Return the number of gradients that were added up, those of all experts for what they share."""
        rows = self.arrays.get(f"rows:{name}")
        if rows is None:
            return 0
        return int(rows[0 if index is None or len(rows) == 1 else index])

    def _starts(self, name: str) -> list[int]:
        prefix = f"covariance:{name}:"
        return sorted(int(key.removeprefix(prefix)) for key in self.arrays if key.startswith(prefix))


def covariance_bytes(n_rows: int) -> int:
    """Return the size of the covariance of a matrix of `n_rows` rows, in float32."""
    return sum(4 * (stop - start) ** 2 for start, stop in row_pieces(n_rows))


def stored_bytes(n_mats: int, n_rows: int) -> int:
    """Return the size of the covariances of a stack in the work folder, at most."""
    return 4 * n_mats * n_rows * min(n_rows, BLOCK_ROWS)


def row_pieces(n_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces that a block of `n_rows` rows is cut into: a few of about the same size.

    >>> list(row_pieces(7168))
    [(0, 1792), (1792, 3584), (3584, 5376), (5376, 7168)]
    """
    n_pieces = -(-n_rows // BLOCK_ROWS)
    size = -(-n_rows // (n_pieces * _STEP)) * _STEP
    for start in range(0, n_rows, size):
        yield start, min(start + size, n_rows)
