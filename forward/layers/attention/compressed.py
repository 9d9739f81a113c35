"""The attention of DeepSeek V4: the last positions one by one, and all before in windows.

All heads share one key for a position, which is its value, too. A token attends to the last `window`
positions, and to windows that a compressor has made keys of (see compressor.py). Layers without
a compressor have the last positions alone. Every head has a sink: one more logit in the softmax, which has no
value.

Because keys are values, these are rotated by their positions. So what a head attends to is rotated back by
the query's position, and depends on distances alone.

The output is low-rank, and by groups of heads: `attn_output_a` is a stack of matrices, one below the other,
each of which multiplies the values of one group. `attn_output_b` multiplies what all of them make.

Queries go in blocks, which only see the keys up to their own end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from forward.layers.attention.compressor import Compressor, WindowIndexer, not_counting, rotated_end
from forward.layers.llama_rounding import round_f16
from forward.layers.load import Loader
from forward.layers.residual import RMSNorm, unit_rows
from forward.layers.rope import Rotation
from forward.observe import Observer, watch

_QUERY_BLOCK = 256
"""Number of queries in a block."""

_SCORES_BYTES = 4 << 20
"""Size of a block's scores in float32; see forward.layers.attention.mla."""


@dataclass(frozen=True)
class CompressedSizes:
    """Sizes of a model's attention.

    head_dim  columns of a head, and of a key
    q_lora    columns of the compressed query
    o_groups  groups of heads
    o_lora    columns of a group's low-rank output
    window    positions that are seen one by one, the token's own with them
    eps       of all norms
    """

    hidden: int
    n_heads: int
    head_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    window: int
    eps: float


@dataclass(frozen=True)
class CompressedAttention:
    """The attention of one layer.

    name        "blk.3", the beginning of its tensors' names
    output_a    (o_groups, o_lora, n_heads / o_groups * head_dim)
    sinks       float32 (n_heads,)
    compress    None for a layer without windows
    indexer     chooses windows; None where all are seen
    half_cache  whether keys are rounded as in llama.cpp's cache
    """

    name: str
    sizes: CompressedSizes
    rotate: Rotation
    norm: RMSNorm
    q_a: torch.Tensor
    q_a_norm: RMSNorm
    q_b: torch.Tensor
    kv: torch.Tensor
    kv_norm: RMSNorm
    output_a: torch.Tensor
    output_b: torch.Tensor
    sinks: torch.Tensor
    compress: Compressor | None
    indexer: WindowIndexer | None
    half_cache: bool = False

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""
        sizes = self.sizes
        matrices = self.q_a, self.q_b, self.kv, self.output_a, self.output_b
        n_keys = min(n_tokens, sizes.window)
        compressors = [self.compress] if self.compress is not None else []
        if self.indexer is not None:
            compressors.append(self.indexer.compress)
        if self.compress is not None:
            n_keys += n_tokens // self.compress.sizes.ratio // 2
        in_matrices = sum(matrix.numel() for matrix in matrices) + sum(each.work() for each in compressors)
        return in_matrices + 2 * sizes.n_heads * sizes.head_dim * n_keys

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Attend within one chunk; return float32 (n_tokens, hidden)."""
        name, sizes, dtype = self.name, self.sizes, self.output_b.dtype
        x = self.norm(hidden).to(dtype)
        self._show(x, observer)
        compressed = linear(x, self.q_a)
        watch(observer, f"{name}.attn_q_a.weight", x, compressed)
        compressed = self.q_a_norm(compressed).to(dtype)
        query_names = [f"{name}.attn_q_b.weight"]
        if self.indexer is not None:
            query_names.append(f"{name}.indexer.attn_q_b.weight")
        observer.rows(query_names, compressed)
        query = linear(compressed, self.q_b).unflatten(-1, (sizes.n_heads, -1))
        watch(observer, f"{name}.attn_q_b.weight", compressed, query, 0, sizes.n_heads)
        query = rotated_end(unit_rows(query, sizes.eps), self.rotate).to(dtype)
        key = linear(x, self.kv)
        watch(observer, f"{name}.attn_kv.weight", x, key)
        key = rotated_end(self.kv_norm(key)[:, None], self.rotate)[:, 0].to(dtype)
        windows, unseen = None, None
        if self.compress is not None:
            windows = self.compress(x, observer).to(dtype)
            unseen = None if self.indexer is None else self.indexer.unseen(x, compressed)
        if self.half_cache:
            key = round_f16(key)
            windows = None if windows is None else round_f16(windows)
        values = self._attend(query, key, windows, unseen)
        return self._output(rotated_end(values, self.rotate.back()).to(dtype), observer)

    def _show(self, x: torch.Tensor, observer: Observer) -> None:
        """Show the normed hidden states to all matrices that multiply them."""
        name = self.name
        names = [f"{name}.attn_kv.weight", f"{name}.attn_q_a.weight"]
        if self.compress is not None:
            names += self.compress.names
        if self.indexer is not None:
            names += [*self.indexer.compress.names, f"{name}.indexer.proj.weight"]
        observer.rows(names, x)

    def _output(self, values: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the output for what heads attend to, (n_tokens, n_heads, head_dim)."""
        name, n_groups = self.name, self.sizes.o_groups
        groups = values.flatten(1).unflatten(-1, (n_groups, -1))
        observer.row_groups(f"{name}.attn_output_a.weight", groups)
        low = torch.bmm(groups.transpose(0, 1), self.output_a.transpose(1, 2)).transpose(0, 1)
        watch(observer, f"{name}.attn_output_a.weight", groups, low, 0, n_groups)
        low = low.flatten(1)
        observer.rows((f"{name}.attn_output_b.weight",), low)
        output = linear(low, self.output_b)
        watch(observer, f"{name}.attn_output_b.weight", low, output)
        return output.float()

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        windows: torch.Tensor | None,
        unseen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the values that queries attend to, (n_tokens, n_heads, head_dim).

        query    (n_tokens, n_heads, head_dim)
        key      (n_tokens, head_dim)
        windows  (n_windows, head_dim); None where there are none
        unseen   see WindowIndexer
        """
        n_tokens, n_heads = query.shape[:2]
        n_query = min(n_tokens, _QUERY_BLOCK)
        blocks = []
        for start in range(0, n_tokens, n_query):
            stop = min(n_tokens, start + n_query)
            first = max(0, start - self.sizes.window + 1)
            keys, hidden = key[first:stop], self._hidden(start, stop, first, key.device)
            if windows is not None and self.compress is not None:
                ratio = self.compress.sizes.ratio
                counting = windows[: stop // ratio]
                keys = torch.cat((keys, counting))
                early = not_counting(start, stop, len(counting), ratio, key.device)
                if unseen is not None:
                    early |= unseen[start:stop, : len(counting)]
                hidden = torch.cat((hidden, early), 1)
            step = max(1, _SCORES_BYTES // (4 * n_query * len(keys)))
            some = [
                self._block(query[start:stop, head : head + step], keys, hidden, head)
                for head in range(0, n_heads, step)
            ]
            blocks.append(torch.cat(some, 1))
        return torch.cat(blocks)

    def _hidden(self, start: int, stop: int, first: int, device: torch.device) -> torch.Tensor:
        """Mark the positions from `first` on that queries don't see, bool (stop - start, stop - first)."""
        queries, keys = (torch.arange(begin, stop, device=device) for begin in (start, first))
        distances = queries[:, None] - keys
        return (distances < 0) | (distances >= self.sizes.window)

    def _block(
        self, query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, head: int
    ) -> torch.Tensor:
        """Return the values of a block of queries, (n_queries, n_some, head_dim).

        query   (n_queries, n_some, head_dim)
        keys    (n_keys, head_dim)
        hidden  bool (n_queries, n_keys)
        head    number of the first head
        """
        n_queries, n_some, n_cols = query.shape
        scores = (query.flatten(0, 1) @ keys.T).unflatten(0, (n_queries, n_some)) * n_cols**-0.5
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        sinks = self.sinks[head : head + n_some].to(scores.dtype).expand(n_queries, -1)
        shares = torch.softmax(torch.cat((scores, sinks[..., None]), -1), -1)[..., :-1]
        return (shares.flatten(0, 1) @ keys).unflatten(0, (n_queries, n_some))


def load_compressed_attention(
    load: Loader,
    layer: int,
    sizes: CompressedSizes,
    rotate: Rotation,
    compress: Compressor | None,
    indexer: WindowIndexer | None,
) -> CompressedAttention:
    """Read the attention of a layer.

    compress, indexer  of the layer, see CompressedAttention
    """
    name, groups, o_rows = f"blk.{layer}", sizes.o_groups, sizes.o_groups * sizes.o_lora
    n_cols = sizes.n_heads * sizes.head_dim

    def norm(part: str, n_cols: int) -> RMSNorm:
        return RMSNorm(load.float32(f"{name}.{part}.weight", n_cols), sizes.eps)

    return CompressedAttention(
        name=name,
        sizes=sizes,
        rotate=rotate,
        norm=norm("attn_norm", sizes.hidden),
        q_a=load.matrix(f"{name}.attn_q_a.weight", sizes.q_lora, sizes.hidden),
        q_a_norm=norm("attn_q_a_norm", sizes.q_lora),
        q_b=load.matrix(f"{name}.attn_q_b.weight", n_cols, sizes.q_lora),
        kv=load.matrix(f"{name}.attn_kv.weight", sizes.head_dim, sizes.hidden),
        kv_norm=norm("attn_kv_a_norm", sizes.head_dim),
        output_a=load.matrix(f"{name}.attn_output_a.weight", groups, sizes.o_lora, n_cols // groups),
        output_b=load.matrix(f"{name}.attn_output_b.weight", sizes.hidden, o_rows),
        sinks=load.float32(f"{name}.attn_sinks.weight", sizes.n_heads),
        compress=compress,
        indexer=indexer,
        half_cache=load.half_cache,
    )
