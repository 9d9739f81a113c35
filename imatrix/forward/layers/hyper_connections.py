"""Hyper-connections: several strands of hidden states, mixed around each part of a layer.

DeepSeek V4 and GLM-5 Next carry `hc_mult` residual streams (arXiv 2512.24880), here called strands. For each
token, weights are computed of all its strands: how much of each the part sees, how much of the output each
takes, and how the strands mix among themselves. The mixing matrix is made doubly stochastic: its rows and
columns are divided by their sums in turn, so that strands neither grow nor shrink on their way through many
layers.

Strands of a token stand side by side in one row, (n_tokens, n_strands * hidden_size), float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import ResidualStream, RMSNorm, unit_rows
from imatrix.forward.observe import Observer, watch


@dataclass(frozen=True)
class StrandSizes:
    """Settings that the hyper-connections of a model have in common.

    n_rounds  times that rows and columns of a mixing matrix are divided by their sums
    eps       what is added to weights and sums
    norm_eps  epsilon of the norm of all strands together
    """

    n_strands: int
    hidden: int
    n_rounds: int
    eps: float
    norm_eps: float


@dataclass(frozen=True)
class HyperConnection:
    """Residual around one part of a layer.

    name   of the matrix
    fn     float32 ((2 + n_strands) * n_strands, n_strands * hidden): rows for what the part sees, for what
           strands take of its output, and for the mixing matrix
    base   float32, what is added to each product
    scale  float32 (3,), what the products of each kind are multiplied by before
    """

    name: str
    sizes: StrandSizes
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Split one chunk's strands into the part's input and what goes past it; see `Residual`."""
        sizes, n = self.sizes, self.sizes.n_strands
        flat = unit_rows(hidden, sizes.norm_eps)
        observer.rows((self.name,), flat)
        products = linear(flat, self.fn)
        watch(observer, self.name, flat, products)
        widths = n, n, n * n
        kinds = zip(products.split(widths, -1), self.scale, self.base.split(widths), strict=True)
        seen, taken, mixed = (product * scale + base for product, scale, base in kinds)
        mixing = _balanced(torch.softmax(mixed.unflatten(-1, (n, n)), -1) + sizes.eps, sizes)
        strands = hidden.unflatten(-1, (n, -1))
        return ResidualStream(
            x=_weighted_sum(strands, torch.sigmoid(seen) + sizes.eps),
            rest=torch.matmul(mixing.transpose(1, 2), strands).flatten(1),
            shares=2 * torch.sigmoid(taken),
        )


def _balanced(mixing: torch.Tensor, sizes: StrandSizes) -> torch.Tensor:
    """Return mixing matrices, (n_tokens, n_strands, n_strands), with rows and columns that add up to one."""
    mixing = mixing / (mixing.sum(1, keepdim=True) + sizes.eps)
    for _ in range(sizes.n_rounds - 1):
        mixing = mixing / (mixing.sum(2, keepdim=True) + sizes.eps)
        mixing = mixing / (mixing.sum(1, keepdim=True) + sizes.eps)
    return mixing


def _weighted_sum(strands: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of a token's strands, (n_tokens, n_strands, hidden), each times its weight."""
    return torch.matmul(weights[:, None], strands)[:, 0]


@dataclass(frozen=True)
class StrandsEnd:
    """Input of the output matrix: the norm of a weighted sum of the last strands.

    fn     float32 (n_strands, n_strands * hidden)
    base   float32 (n_strands,)
    scale  float32 (1,)
    """

    sizes: StrandSizes
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm: RMSNorm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the output matrix's input, float32 (n_tokens, hidden)."""
        products = linear(unit_rows(hidden, self.sizes.norm_eps), self.fn)
        weights = torch.sigmoid(products * self.scale + self.base) + self.sizes.eps
        return self.norm(_weighted_sum(hidden.unflatten(-1, (self.sizes.n_strands, -1)), weights))


@dataclass(frozen=True)
class MeanEnd:
    """Input of the output matrix: the norm of the mean of the last strands."""

    n_strands: int
    norm: RMSNorm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the output matrix's input, float32 (n_tokens, hidden)."""
        strands = hidden[:, : self.n_strands * len(self.norm.weight)]
        return self.norm(strands.unflatten(-1, (self.n_strands, -1)).mean(1))


def load_hyper_connection(load: Loader, name: str, sizes: StrandSizes) -> HyperConnection:
    """Read the hyper-connection whose tensors' names begin with `name`, "blk.3.hc_attn"."""
    n = sizes.n_strands
    return HyperConnection(
        f"{name}_fn.weight",
        sizes,
        load.float32(f"{name}_fn.weight", (2 + n) * n, n * sizes.hidden),
        load.float32(f"{name}_base.weight", (2 + n) * n),
        load.float32(f"{name}_scale.weight", 3),
    )


def load_strands_end(load: Loader, sizes: StrandSizes, norm: RMSNorm) -> StrandsEnd:
    """Read the end of a model; `norm` is the one before its output matrix."""
    n = sizes.n_strands
    return StrandsEnd(
        sizes,
        load.float32("output_hc_fn.weight", n, n * sizes.hidden),
        load.float32("output_hc_base.weight", n),
        load.float32("output_hc_scale.weight", 1),
        norm,
    )
