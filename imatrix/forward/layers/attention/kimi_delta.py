"""Kimi Delta Attention (KDA, arXiv 2510.26692): a gated delta net whose states fade row by row.

Queries, keys and values have a matrix and a convolution each, and there are as many heads of one as of the
others. Two matrices, one behind the other, or a single one say how fast each column of a head's keys fades,
and as many make the gate of the output, which is a sigmoid. In some families, the logarithm of a decay has a
bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from imatrix.forward.layers.attention.delta_net import delta_rule, unit_heads
from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.attention.short_conv import convolved
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.observe import Observer


@dataclass(frozen=True)
class KimiDeltaSizes:
    """Sizes of a model's KDA.

    n_cols  columns of a head's queries, keys and values
    kernel  tokens that a convolution sees, the token's own with them
    eps     of all norms
    bound   below which no logarithm of a decay falls; None: its rate is a softplus
    length_eps  of the lengths of queries and keys
    """

    hidden: int
    n_heads: int
    n_cols: int
    kernel: int
    eps: float
    bound: float | None = None
    length_eps: float = 1e-6

    @property
    def n_rows(self) -> int:
        return self.n_heads * self.n_cols


@dataclass(frozen=True)
class KimiDelta:
    """The KDA of one layer.

    norm       of the hidden states
    qkv        matrices of queries, keys and values
    rate       of the decay, and
    gate       of the output: matrices that are multiplied one after the other
    beta       gives a number for each head
    kernels    float32 (n_rows, kernel), of the convolutions of queries, keys and values
    rate_bias  float32 (n_rows,), added to the rate
    decay      float32 (n_heads, 1), what rates are multiplied by; with a bound, its sign means nothing
    head_norm  of the output, for every head
    """

    sizes: KimiDeltaSizes
    norm: RMSNorm
    qkv: tuple[Projection, ...]
    rate: tuple[Projection, ...]
    gate: tuple[Projection, ...]
    beta: Projection
    output: Projection
    kernels: tuple[torch.Tensor, ...]
    rate_bias: torch.Tensor
    decay: torch.Tensor
    head_norm: RMSNorm

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token; they do not depend on the size of the chunk."""
        matrices = (*self.qkv, *self.rate, *self.gate, self.beta, self.output)
        rows = self.sizes.n_rows
        return sum(each.weight.numel() for each in matrices) + 4 * rows * self.sizes.n_cols

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Apply it to one chunk; return what it adds, float32 (n_tokens, hidden_size)."""
        dtype = self.output.weight.dtype
        x = self.norm(hidden).to(dtype)
        seeing = (*self.qkv, self.rate[0], self.gate[0], self.beta)
        observer.rows(tuple(projection.name for projection in seeing), x)
        query, key, value = (
            self._heads(silu(convolved(projection(x, observer).float(), kernels))).transpose(0, 1)
            for projection, kernels in zip(self.qkv, self.kernels, strict=True)
        )
        query, key = (unit_heads(each, self.sizes.length_eps) for each in (query, key))
        query = query * self.sizes.n_cols**-0.5
        beta = torch.sigmoid(self.beta(x, observer).float())
        fading = self._fading(self._heads(_through(self.rate, x, observer) + self.rate_bias))
        attended = delta_rule(query, key, value, beta, fading)
        gate = torch.sigmoid(_through(self.gate, x, observer))
        values = (self.head_norm(attended).flatten(1) * gate).to(dtype)
        observer.rows((self.output.name,), values)
        return self.output(values, observer).float()

    def _fading(self, rate: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of how each row of a state fades; both (n_tokens, n_heads, n_cols)."""
        if self.sizes.bound is None:
            return self.decay * softplus(rate)
        return self.sizes.bound * torch.sigmoid(self.decay.abs() * rate)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (n_tokens, n_heads, n_cols) of (n_tokens, n_rows)."""
        return rows.unflatten(-1, (self.sizes.n_heads, -1))


def _through(matrices: tuple[Projection, ...], x: torch.Tensor, observer: Observer) -> torch.Tensor:
    """Return the product of matrices, float32; what the first one multiplies has been shown already."""
    for place, matrix in enumerate(matrices):
        if place:
            x = x.to(matrix.weight.dtype)
            observer.rows((matrix.name,), x)
        x = matrix(x, observer)
    return x.float()


def load_kimi_delta(load: Loader, layer: int, sizes: KimiDeltaSizes) -> KimiDelta:
    """Read the KDA of a layer."""
    name, hidden, rows, cols = f"blk.{layer}", sizes.hidden, sizes.n_rows, sizes.n_cols

    def projection(part: str, n_rows: int, n_cols: int = hidden) -> Projection:
        matrix = f"{name}.{part}.weight"
        return Projection(matrix, load.matrix(matrix, n_rows, n_cols), None)

    def one_or_two(part: str) -> tuple[Projection, ...]:
        if not load.has(f"{name}.{part}_b.weight"):
            return (projection(part if load.has(f"{name}.{part}.weight") else f"{part}_a", rows),)
        return projection(f"{part}_a", cols), projection(f"{part}_b", rows, cols)

    heads_in_row = load.tensor(f"{name}.ssm_a").shape[-1]  # all, or one
    kernels = (f"{name}.ssm_conv1d_{part}.weight" for part in "qkv")
    return KimiDelta(
        sizes=sizes,
        norm=RMSNorm(load.float32(f"{name}.attn_norm.weight", hidden), sizes.eps),
        qkv=tuple(projection(f"attn_{part}", rows) for part in "qkv"),
        rate=one_or_two("ssm_f"),
        gate=one_or_two("ssm_g"),
        beta=projection("ssm_beta", sizes.n_heads),
        output=Projection(f"{name}.attn_output.weight",
                          load.matrix(f"{name}.attn_output.weight", hidden, rows), None),
        kernels=tuple(load.float32(kernel, 1, rows, 1, sizes.kernel)[0, :, 0] for kernel in kernels),
        rate_bias=load.float32(f"{name}.ssm_dt.bias", rows),
        decay=load.float32(f"{name}.ssm_a", sizes.n_heads // heads_in_row, heads_in_row).reshape(-1, 1),
        head_norm=RMSNorm(load.float32(f"{name}.ssm_norm.weight", cols), sizes.eps),
    )  # fmt: skip
