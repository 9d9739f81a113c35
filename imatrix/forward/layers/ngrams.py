"""Embeddings of n-grams that a layer adds to every strand, as in Qwen4Exp.

A token has some rows of a table for the n-grams that it ends, from two tokens to `n_tokens` of them. A row's
number is a hash: the tokens times numbers of 64 bits, joined by exclusive or, modulo the rows of a head.
N-grams do not reach across the end of a text, nor to before the first token; the end's token stands there.

Rows make a value and, for every strand, a key. The strand's hidden states decide how much of the value it
takes, and a convolution over the last tokens adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.attention.short_conv import convolved
from imatrix.forward.layers.gated_strands import StrandNorm, load_strand_norm
from imatrix.forward.layers.load import Loader
from imatrix.forward.observe import Observer

_TABLE = "per_layer_token_embd.weight"
_LEAST = 1e-6
"""Least size of a product of key and hidden states before its root is taken."""


@dataclass(frozen=True)
class NgramSizes:
    """Sizes of a model's n-grams.

    n_tokens     of the longest n-gram
    multipliers  of its tokens, the last one's first
    offsets, rows  of each head in the table: its first row and how many there are; shorter n-grams first
    n_cols       of a row
    end          id of the token that ends a text
    kernel       tokens that the convolution sees, each `n_tokens` apart
    """

    n_tokens: int
    multipliers: Sequence[int]
    offsets: Sequence[int]
    rows: Sequence[int]
    n_cols: int
    end: int
    kernel: int

    def row_numbers(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the n-grams that each token ends, int64 (n_tokens, n_heads)."""
        per_size = len(self.rows) // (self.n_tokens - 1)
        mixed, ended = tokens * self.multipliers[0], torch.zeros_like(tokens, dtype=torch.bool)
        numbers = []
        for back in range(1, self.n_tokens):
            before = tokens.new_full((len(tokens),), self.end)
            before[back:] = tokens[: max(len(tokens) - back, 0)]
            ended = ended | (before == self.end)
            mixed = mixed ^ (before.masked_fill(ended, self.end) * self.multipliers[back])
            heads = slice((back - 1) * per_size, back * per_size)
            rows, offsets = (tokens.new_tensor(each[heads]) for each in (self.rows, self.offsets))
            numbers.append(mixed[:, None] % rows + offsets)
        return torch.cat(numbers, 1)


@dataclass(frozen=True)
class NgramEntry:
    """Embeddings that one layer adds to the strands before it; see `LayerEntry`.

    load        reads the table
    key, value  of the rows of a token, (n_strands * hidden_size, ...) and (hidden_size, ...)
    key_norm, query_norm, conv_norm  of keys, hidden states, and what is convolved
    kernels     float32 (n_strands * hidden_size, kernel)
    """

    load: Loader
    sizes: NgramSizes
    key: Projection
    value: Projection
    key_norm: StrandNorm
    query_norm: StrandNorm
    conv_norm: StrandNorm
    kernels: torch.Tensor

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return a chunk's strands with what their n-grams add, float32."""
        rows = self._rows(tokens)
        if hidden.requires_grad:
            # Only what lies on the way to the hidden states is differentiated, and so observed.
            rows = rows + 0 * hidden[:, :1]
        x = rows.to(self.key.weight.dtype)
        observer.rows((self.key.name, self.value.name), x)
        n_strands = self.key_norm.n_strands
        key = self.key_norm(self.key(x, observer).float()).unflatten(-1, (n_strands, -1))
        query = self.query_norm(hidden).unflatten(-1, (n_strands, -1))
        score = (key * query).sum(-1, keepdim=True) * key.shape[-1] ** -0.5
        gate = torch.sigmoid(score.abs().clamp_min(_LEAST).sqrt() * score.sign())
        added = (gate * self.value(x, observer).float()[:, None]).flatten(1)
        near = convolved(self.conv_norm(added), self.kernels, self.sizes.n_tokens)
        return hidden + added + silu(near)

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of each token side by side, float32 (n_tokens, n_heads * n_cols)."""
        unique, places = torch.unique(self.sizes.row_numbers(tokens), return_inverse=True)
        return self.load.picked_rows(_TABLE, unique.tolist())[places.to(self.load.device)].flatten(1)


def load_ngram_entry(
    load: Loader, layer: int, sizes: NgramSizes, n_strands: int, hidden: int, eps: float
) -> NgramEntry:
    """Read what a layer adds of n-grams."""
    name, wide, n_cols = f"blk.{layer}.ple", n_strands * hidden, len(sizes.rows) * sizes.n_cols

    def projection(part: str, n_rows: int) -> Projection:
        return Projection(f"{name}_{part}.weight", load.matrix(f"{name}_{part}.weight", n_rows, n_cols), None)

    def norm(part: str) -> StrandNorm:
        return load_strand_norm(load, f"{name}_norm_{part}.weight", n_strands, hidden, eps)

    load.tensor(_TABLE)
    return NgramEntry(
        load=load,
        sizes=sizes,
        key=projection("key", wide),
        value=projection("value", hidden),
        key_norm=norm("key"),
        query_norm=norm("query"),
        conv_norm=norm("conv"),
        kernels=load.float32(f"{name}_conv1d.weight", wide, sizes.kernel),
    )
