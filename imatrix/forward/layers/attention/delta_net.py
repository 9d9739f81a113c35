"""Gated delta nets (arXiv 2412.06464): a state per head, from which each token reads and which it corrects.

For a token, and a head with state S (n_key_cols, n_value_cols):

    S = exp(decay) * S                     what is old fades
    S = S + k (beta * (v - k S))^T         what S holds under the key k moves towards the value v
    output = q S

Queries and keys have unit length, and queries are divided by the root of their columns. Before that, queries,
keys and values go through a convolution over the last tokens, each column by itself, and SiLU. The output is
normed head by head and multiplied by SiLU, or the sigmoid, of a gate.

Tokens go in blocks. Within a block, what every token writes is the solution of a triangular system of
equations, for all heads at once; from block to block the state is handed on, in the order of the text. So the
numbers do not depend on threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.attention.short_conv import convolved
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import UNNORMED, Norm, RMSNorm
from imatrix.forward.observe import Observer

_BLOCK = 64
"""Number of tokens in a block."""

_SMALL_BLOCK = 16
"""The same where the rows of a state fade at rates of their own: each pair of tokens has as many factors."""

_TINY = 1e-6
"""Number that is added to the square of a query's or a key's length."""


@dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a model's delta nets.

    n_key_heads, n_value_heads  heads of queries and keys, and heads of values, states and gates
    n_key_cols, n_value_cols    columns of a head
    kernel    tokens that the convolution sees, the token's own with them
    tiled     whether head i of values has head i modulo n_key_heads of keys; else neighbours share a head
    eps       of all norms
    normed    whether the hidden states are normed before
    sigmoid   whether the output is multiplied by the sigmoid of the gate, not its SiLU
    """

    hidden: int
    n_key_heads: int
    n_value_heads: int
    n_key_cols: int
    n_value_cols: int
    kernel: int
    tiled: bool
    eps: float
    normed: bool = True
    sigmoid: bool = False

    @property
    def n_keys(self) -> int:
        return self.n_key_heads * self.n_key_cols

    @property
    def n_values(self) -> int:
        return self.n_value_heads * self.n_value_cols


@dataclass(frozen=True)
class DeltaNet:
    """The delta net of one layer.

    norm       of the hidden states
    qkv        queries, keys and values, one below the other
    gate       of the output
    scalars    one or two matrices that give two numbers for each head of values: beta and the decay's rate
    kernels    float32 (n_rows of qkv, kernel), of the convolution
    rate_bias  float32 (n_value_heads,), added to the rate
    decay      float32 (n_value_heads,), below 0
    head_norm  of the output, for every head
    """

    sizes: DeltaNetSizes
    norm: Norm
    qkv: Projection
    gate: Projection
    scalars: tuple[Projection, ...]
    output: Projection
    kernels: torch.Tensor
    rate_bias: torch.Tensor
    decay: torch.Tensor
    head_norm: RMSNorm

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token; they do not depend on the size of the chunk."""
        sizes = self.sizes
        matrices = sizes.hidden * (2 * sizes.n_keys + 3 * sizes.n_values)
        return matrices + sizes.n_value_heads * sizes.n_key_cols * (3 * sizes.n_value_cols + 2 * _BLOCK)

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Apply it to one chunk; return what it adds, float32 (n_tokens, hidden_size)."""
        dtype = self.output.weight.dtype
        x = self.norm(hidden).to(dtype)
        projections = (self.qkv, self.gate, *self.scalars)
        observer.rows(tuple(projection.name for projection in projections), x)
        query, key, value = self._convolved(self.qkv(x, observer).float())
        gate = self.gate(x, observer).float()
        beta, rate = self._scalars(x, observer)
        fading = self.decay * softplus(rate + self.rate_bias)
        attended = delta_rule(query, key, value, torch.sigmoid(beta), fading[..., None])
        opening = torch.sigmoid(gate) if self.sizes.sigmoid else silu(gate)
        normed = self.head_norm(attended).flatten(1) * opening
        values = normed.to(dtype)
        observer.rows((self.output.name,), values)
        return self.output(values, observer).float()

    def _convolved(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values after the convolution, (n_value_heads, n_tokens, n_cols).

        rows  float32 (n_tokens, n_rows of qkv)
        """
        sizes = self.sizes
        total = convolved(rows, self.kernels)
        query, key, value = silu(total).split((sizes.n_keys, sizes.n_keys, sizes.n_values), -1)
        query, key = (
            self._shared(unit_heads(heads.unflatten(-1, (sizes.n_key_heads, -1)))) for heads in (query, key)
        )
        query = query * sizes.n_key_cols**-0.5
        return query, key, value.unflatten(-1, (sizes.n_value_heads, -1)).transpose(0, 1)

    def _shared(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the head of keys of every head of values; `heads` are (n_tokens, n_key_heads, n_cols)."""
        group = self.sizes.n_value_heads // self.sizes.n_key_heads
        heads = heads.transpose(0, 1)
        return heads.repeat(group, 1, 1) if self.sizes.tiled else heads.repeat_interleave(group, 0)

    def _scalars(self, x: torch.Tensor, observer: Observer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return beta before its sigmoid, and the decay's rate, float32 (n_tokens, n_value_heads)."""
        products = [projection(x, observer).float() for projection in self.scalars]
        if len(products) == 2:
            return products[0], products[1]
        beta, rate = products[0].unflatten(-1, (self.sizes.n_key_heads, 2, -1)).unbind(-2)
        return beta.flatten(1), rate.flatten(1)


def unit_heads(heads: torch.Tensor, eps: float = _TINY) -> torch.Tensor:
    """Scale the rows of queries or keys to a length of one."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + eps)


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, fading: torch.Tensor
) -> torch.Tensor:
    """Return the values that every token reads from the states, float32 (n_tokens, n_heads, n_value_cols).

    query, key  (n_heads, n_tokens, n_key_cols), of unit length; value  (n_heads, n_tokens, n_value_cols)
    beta        (n_tokens, n_heads): how far a state is corrected
    fading      (n_tokens, n_heads, 1 or n_key_cols): the logarithm of how a state fades, or each of its rows
    """
    beta, fading = beta.T[..., None], fading.transpose(0, 1)
    size = _BLOCK if fading.shape[-1] == 1 else _SMALL_BLOCK
    state = query.new_zeros(len(query), query.shape[-1], value.shape[-1])
    outputs = []
    for start in range(0, query.shape[1], size):
        block = slice(start, start + size)
        output, state = _block(
            query[:, block], key[:, block], value[:, block], beta[:, block], fading[:, block], state
        )
        outputs.append(output)
    return torch.cat(outputs, 1).transpose(0, 1)


def _block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, fading: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the values that a block's tokens read, and the state after it; arguments as in `delta_rule`.

    A token writes beta * (v - k S), and S has faded since the tokens before it wrote, so what they all write
    solves (I + A) written = beta * (value - key S), with A strictly lower triangular.
    """
    since = fading.cumsum(1)
    n_tokens = since.shape[1]
    later = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=since.device).triu(1)[..., None]
    between = (since[:, :, None] - since[:, None]).masked_fill(later, float("-inf")).exp()
    faded = since.exp()
    read = value - (key * faded) @ state
    system = _products(beta * key, key, between)
    written = torch.linalg.solve_triangular(system, beta * read, upper=False, unitriangular=True)
    output = (query * faded) @ state + _products(query, key, between) @ written
    rest = (since[:, -1:] - since).exp()
    return output, state * faded[:, -1, :, None] + (key * rest).transpose(1, 2) @ written


def _products(left: torch.Tensor, key: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Return the product of each row of `left` and each key, (n_heads, n_tokens, n_tokens).

    between  (n_heads, n_tokens, n_tokens, 1 or n_key_cols): what is left of a key, or of each of its columns
    """
    if between.shape[-1] == 1:
        return left @ key.transpose(1, 2) * between[..., 0]
    return ((left[:, :, None] * between) * key[:, None]).sum(-1)


def load_delta_net(load: Loader, layer: int, sizes: DeltaNetSizes) -> DeltaNet:
    """Read the delta net of a layer."""
    name = f"blk.{layer}"

    def projection(part: str, n_rows: int, n_cols: int) -> Projection:
        matrix = f"{name}.{part}.weight"
        return Projection(matrix, load.matrix(matrix, n_rows, n_cols), None)

    heads = sizes.n_value_heads
    parts = {"ssm_beta": heads, "ssm_alpha": heads}
    if load.has(f"{name}.ssm_ba.weight"):
        parts = {"ssm_ba": 2 * heads}
    return DeltaNet(
        sizes=sizes,
        norm=RMSNorm(load.float32(f"{name}.attn_norm.weight", sizes.hidden), sizes.eps)
        if sizes.normed
        else UNNORMED,
        qkv=projection("attn_qkv", 2 * sizes.n_keys + sizes.n_values, sizes.hidden),
        gate=projection("attn_gate", sizes.n_values, sizes.hidden),
        scalars=tuple(projection(part, n_rows, sizes.hidden) for part, n_rows in parts.items()),
        output=projection("ssm_out", sizes.hidden, sizes.n_values),
        kernels=load.float32(f"{name}.ssm_conv1d.weight", 2 * sizes.n_keys + sizes.n_values, sizes.kernel),
        rate_bias=load.float32(f"{name}.ssm_dt.bias", heads),
        decay=load.float32(f"{name}.ssm_a", heads),
        head_norm=RMSNorm(load.float32(f"{name}.ssm_norm.weight", sizes.n_value_cols), sizes.eps),
    )
