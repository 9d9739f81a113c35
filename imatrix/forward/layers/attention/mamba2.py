"""Mamba 2 (arXiv 2405.21060): a state per head that fades, which each token writes to and reads from.

For a token with step dt, and a head with state S (n_state, n_cols):

    S = exp(decay * dt) * S + B (dt * x)^T
    output = C S + D x

Heads' columns x, and B and C of each group of heads, go through a convolution over the last tokens, each
column by itself, and SiLU. The output is multiplied by SiLU of a gate and normed group by group. Tokens go in
blocks, and the state is handed on from block to block, in the order of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.attention.short_conv import convolved
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm, unit_rows
from imatrix.forward.observe import Observer

_BLOCK = 64
"""Number of tokens in a block."""


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a model's Mamba 2 layers.

    n_heads, n_cols   heads, and columns of each
    n_groups, n_state groups of heads that share B and C, and columns of these
    kernel            tokens that the convolution sees, the token's own with them
    eps               of all norms
    """

    hidden: int
    n_heads: int
    n_cols: int
    n_groups: int
    n_state: int
    kernel: int
    eps: float

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.n_heads * self.n_cols

    @property
    def convolved(self) -> int:
        """Columns that go through the convolution."""
        return self.inner + 2 * self.n_groups * self.n_state


@dataclass(frozen=True)
class Mamba2:
    """The Mamba 2 of one layer.

    norm       of the hidden states
    into       gate, what is convolved, and a step for each head, one below the other
    kernels    float32 (convolved, kernel), with their bias, (convolved,)
    step_bias  float32 (n_heads,), added to steps
    decay      float32 (n_heads,), below 0
    direct     float32 (n_heads, 1): D
    group_norm float32 (n_groups, inner / n_groups); None for no norm behind the gate
    """

    sizes: Mamba2Sizes
    norm: RMSNorm
    into: Projection
    output: Projection
    kernels: torch.Tensor
    kernel_bias: torch.Tensor
    step_bias: torch.Tensor
    decay: torch.Tensor
    direct: torch.Tensor
    group_norm: torch.Tensor | None

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token; they do not depend on the size of the chunk."""
        sizes = self.sizes
        matrices = sizes.hidden * (2 * sizes.inner + sizes.convolved + sizes.n_heads)
        return matrices + sizes.n_heads * (2 * sizes.n_state * sizes.n_cols + 2 * _BLOCK * sizes.n_state)

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Apply it to one chunk; return what it adds, float32 (n_tokens, hidden_size)."""
        sizes, dtype = self.sizes, self.output.weight.dtype
        x = self.norm(hidden).to(dtype)
        observer.rows((self.into.name,), x)
        parts = (sizes.inner, sizes.convolved, sizes.n_heads)
        gate, rows, steps = self.into(x, observer).float().split(parts, -1)
        steps = softplus(steps + self.step_bias)
        heads, into, out = self._convolved(rows)
        attended = scan(out, into, heads * steps.T[..., None], steps * self.decay)
        attended = attended + (heads * self.direct[:, None]).transpose(0, 1)
        gated = attended.flatten(1) * silu(gate)
        if self.group_norm is not None:
            groups = gated.unflatten(-1, (sizes.n_groups, -1))
            gated = (unit_rows(groups, sizes.eps) * self.group_norm).flatten(1)
        values = gated.to(dtype)
        observer.rows((self.output.name,), values)
        return self.output(values, observer).float()

    def _convolved(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return columns of heads, B and C after the convolution, (n_heads, n_tokens, n_cols or n_state)."""
        sizes = self.sizes
        total = convolved(rows, self.kernels)
        of_groups = sizes.n_groups * sizes.n_state
        heads, into, out = silu(total + self.kernel_bias).split((sizes.inner, of_groups, of_groups), -1)
        shared = (
            each.unflatten(-1, (sizes.n_groups, -1)).transpose(0, 1).repeat_interleave(
                sizes.n_heads // sizes.n_groups, 0
            )
            for each in (into, out)
        )  # fmt: skip
        return heads.unflatten(-1, (sizes.n_heads, -1)).transpose(0, 1), *shared


def scan(out: torch.Tensor, into: torch.Tensor, values: torch.Tensor, fading: torch.Tensor) -> torch.Tensor:
    """Return the values that every token reads from the states, float32 (n_tokens, n_heads, n_cols).

    out, into  C and B, (n_heads, n_tokens, n_state); values  what is written, (n_heads, n_tokens, n_cols)
    fading     (n_tokens, n_heads): the logarithm of how a state fades
    """
    state = out.new_zeros(len(out), out.shape[-1], values.shape[-1])
    outputs = []
    for start in range(0, out.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        here_out, here_into, written = out[:, block], into[:, block], values[:, block]
        since = fading.T[:, block].cumsum(-1)
        n_tokens = since.shape[-1]
        later = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=since.device).triu(1)
        between = (since[:, :, None] - since[:, None]).masked_fill(later, float("-inf")).exp()
        faded, rest = since.exp()[..., None], (since[:, -1:] - since).exp()[..., None]
        outputs.append(
            (here_out * faded) @ state + (here_out @ here_into.transpose(1, 2) * between) @ written
        )
        state = state * faded[:, -1:] + (here_into * rest).transpose(1, 2) @ written
    return torch.cat(outputs, 1).transpose(0, 1)


def load_mamba2(load: Loader, layer: int, sizes: Mamba2Sizes) -> Mamba2:
    """Read the Mamba 2 of a layer."""
    name = f"blk.{layer}"

    def projection(part: str, n_rows: int, n_cols: int) -> Projection:
        matrix = f"{name}.{part}.weight"
        return Projection(matrix, load.matrix(matrix, n_rows, n_cols), None)

    n_heads, norm = sizes.n_heads, f"{name}.ssm_norm.weight"
    return Mamba2(
        sizes=sizes,
        norm=RMSNorm(load.float32(f"{name}.attn_norm.weight", sizes.hidden), sizes.eps),
        into=projection("ssm_in", sizes.inner + sizes.convolved + n_heads, sizes.hidden),
        output=projection("ssm_out", sizes.hidden, sizes.inner),
        kernels=load.float32(f"{name}.ssm_conv1d.weight", sizes.convolved, sizes.kernel),
        kernel_bias=load.float32(f"{name}.ssm_conv1d.bias", sizes.convolved),
        step_bias=load.float32(f"{name}.ssm_dt.bias", n_heads),
        decay=load.float32(f"{name}.ssm_a", n_heads, 1)[:, 0],
        direct=load.float32(f"{name}.ssm_d", n_heads, 1),
        group_norm=load.float32(norm, sizes.n_groups, sizes.inner // sizes.n_groups)
        if load.has(norm)
        else None,
    )
