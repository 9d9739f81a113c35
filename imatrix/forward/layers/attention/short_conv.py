"""Short convolution of LFM2: each column over the last few tokens, with a gate before and one behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.observe import Observer


@dataclass(frozen=True)
class ShortConv:
    """The convolution of one layer.

    norm     of the hidden states
    into     gate before, gate behind, and what is convolved, one below the other
    kernels  float32 (hidden_size, kernel)
    """

    norm: RMSNorm
    into: Projection
    output: Projection
    kernels: torch.Tensor

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token; they do not depend on the size of the chunk."""
        return self.into.weight.numel() + self.output.weight.numel() + self.kernels.numel()

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Apply it to one chunk; return what it adds, float32 (n_tokens, hidden_size)."""
        dtype = self.output.weight.dtype
        x = self.norm(hidden).to(dtype)
        observer.rows((self.into.name,), x)
        before, behind, rows = self.into(x, observer).float().chunk(3, -1)
        values = (behind * convolved(before * rows, self.kernels)).to(dtype)
        observer.rows((self.output.name,), values)
        return self.output(values, observer).float()


def convolved(rows: torch.Tensor, kernels: torch.Tensor, apart: int = 1) -> torch.Tensor:
    """Return each column of `rows`, (n_tokens, n_cols), convolved with its kernel over the last tokens.

    kernels  (n_cols, kernel), the token's own last
    apart    distance from one of these tokens to the next
    """
    n_tokens, size = len(rows), kernels.shape[1]
    padded = pad(rows, (0, 0, (size - 1) * apart, 0))
    total = padded[:n_tokens] * kernels[:, 0]
    for step in range(1, size):
        total = total + padded[step * apart : step * apart + n_tokens] * kernels[:, step]
    return total


def load_short_conv(load: Loader, layer: int, hidden: int, kernel: int, eps: float) -> ShortConv:
    """Read the short convolution of a layer; `kernel` is the number of tokens that it sees."""
    name = f"blk.{layer}"

    def projection(part: str, n_rows: int) -> Projection:
        matrix = f"{name}.shortconv.{part}.weight"
        return Projection(matrix, load.matrix(matrix, n_rows, hidden), None)

    return ShortConv(
        norm=RMSNorm(load.float32(f"{name}.attn_norm.weight", hidden), eps),
        into=projection("in_proj", 3 * hidden),
        output=projection("out_proj", hidden),
        kernels=load.float32(f"{name}.shortconv.conv.weight", hidden, kernel),
    )
