"""The attention of DeepSeek V4: the last positions one by one, and all before in windows.

All heads share one key for a position, which is its value, too. A token attends to the last `window`
positions, and to windows that a compressor has made keys of. Layers without
a compressor have the last positions alone. Every head has a sink: one more logit in the softmax, which has no
value.

Because keys are values, these are rotated by their positions. So what a head attends to is rotated back by
the query's position, and depends on distances alone.

The output is low-rank, and by groups of heads: `attn_output_a` is a stack of matrices, one below the other,
each of which multiplies the values of one group. `attn_output_b` multiplies what all of them make.

Queries go in blocks, which only see the keys up to their own end.

Every `ratio` positions are a window, which becomes one key: the sum of what a matrix makes of each position,
weighted column by column with a softmax over the window. The weights come from a second matrix, plus a row of
`ape` for the place in the window. The key is normed, and its last columns are rotated by the position of the
window's first token. A window counts for tokens from its last position on.

Where windows overlap, the matrices have twice the columns. The first half of a position's goes into the key
of the window after its own, the second half into that of its own. So a key is a sum over two windows.

An indexer has smaller keys of the same windows, and queries of its own. A window's score is what heads
w_h * relu(query_h . key) add up to. The best `n_chosen` of the windows that count are attended to. While
there are no more, all are, and nothing is computed. The choice has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.attention import QUERY_BLOCK, SCORES_BYTES
from imatrix.forward.layers.attention.indexer import hadamard
from imatrix.forward.layers.llama_rounding import round_f16
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm, unit_rows
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.observe import Observer, Silent, watch


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
        n_query = min(n_tokens, QUERY_BLOCK)
        blocks = []
        for start in range(0, n_tokens, n_query):
            stop = min(n_tokens, start + n_query)
            first = max(0, start - self.sizes.window + 1)
            queries, positions = (torch.arange(begin, stop, device=key.device) for begin in (start, first))
            distances = queries[:, None] - positions
            keys, hidden = key[first:stop], (distances < 0) | (distances >= self.sizes.window)
            if windows is not None and self.compress is not None:
                ratio = self.compress.sizes.ratio
                counting = windows[: stop // ratio]
                keys = torch.cat((keys, counting))
                early = not_counting(start, stop, len(counting), ratio, key.device)
                if unseen is not None:
                    early |= unseen[start:stop, : len(counting)]
                hidden = torch.cat((hidden, early), 1)
            step = max(1, SCORES_BYTES // (4 * n_query * len(keys)))
            some = [
                self._block(query[start:stop, head : head + step], keys, hidden, head)
                for head in range(0, n_heads, step)
            ]
            blocks.append(torch.cat(some, 1))
        return torch.cat(blocks)

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


@dataclass(frozen=True)
class CompressorSizes:
    """Sizes of a compressor.

    ratio    positions of a window
    n_cols   of a key; its last ones are rotated
    overlap  whether windows overlap
    hidden   columns of what it multiplies
    eps      of the norm of its keys
    """

    ratio: int
    n_cols: int
    overlap: bool
    hidden: int
    eps: float


@dataclass(frozen=True)
class Compressor:
    """Compressor of each window of tokens into one key.

    names   of the matrices, kv and gate
    rotate  for the first position of each window
    kv      (n_cols, hidden), where windows overlap (2 * n_cols, hidden); gate is of the same shape
    ape     float32 (ratio, n_cols or 2 * n_cols)
    """

    names: tuple[str, str]
    sizes: CompressorSizes
    rotate: Rotation
    kv: torch.Tensor
    gate: torch.Tensor
    ape: torch.Tensor
    norm: RMSNorm

    def work(self) -> int:
        """Count the multiplications per token."""
        return self.kv.numel() + self.gate.numel()

    def __call__(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the keys of all whole windows of a chunk, float32 (n_windows, n_cols).

        x  the normed hidden states, (n_tokens, hidden)
        """
        n_windows, ratio = len(x) // self.sizes.ratio, self.sizes.ratio
        products = []
        for name, matrix in zip(self.names, (self.kv, self.gate), strict=True):
            product = linear(x, matrix)
            watch(observer, name, x, product)
            products.append(product[: n_windows * ratio].float().unflatten(0, (n_windows, ratio)))
        values, scores = products[0], products[1] + self.ape
        if self.sizes.overlap:
            values = self._with_previous(values, 0.0)
            scores = self._with_previous(scores, float("-inf"))
        keys = self.norm((values * torch.softmax(scores, 1)).sum(1))
        return rotated_end(keys[:, None], self.rotate)[:, 0]

    def _with_previous(self, rows: torch.Tensor, before: float) -> torch.Tensor:
        """Return for each window the first halves of the window before, and the second ones of its own.

        rows     (n_windows, ratio, 2 * n_cols)
        before   what stands before the first window
        returns  (n_windows, 2 * ratio, n_cols)
        """
        first, second = rows.chunk(2, -1)
        none = first.new_full((min(1, len(first)), *first.shape[1:]), before)
        return torch.cat((torch.cat((none, first[:-1])), second), 1)


@dataclass(frozen=True)
class WindowIndexerSizes:
    """Sizes of an indexer of windows.

    keys      of the compressor that makes its keys
    n_chosen  windows that a token attends to
    q_lora    columns of the compressed query
    """

    keys: CompressorSizes
    n_heads: int
    n_chosen: int
    q_lora: int


@dataclass(frozen=True)
class WindowIndexer:
    """Indexer that chooses windows in one layer.

    compress  makes the keys
    rotate    for queries
    queries   (n_heads * n_cols, q_lora)
    shares    float32 (n_heads, hidden): what makes the weights of heads
    turn      Hadamard matrix for some columns of a head; None: keys are neither turned nor rounded, see
              imatrix.forward.layers.attention.indexer
    """

    sizes: WindowIndexerSizes
    compress: Compressor
    rotate: Rotation
    queries: torch.Tensor
    shares: torch.Tensor
    turn: torch.Tensor | None = None

    @torch.no_grad()
    def unseen(self, x: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor | None:
        """Mark the windows that each token of a chunk does not attend to, bool (n_tokens, n_windows).

        Windows that don't count yet may be either. None: every token attends to all that count.
        x           the normed hidden states, (n_tokens, hidden)
        compressed  the normed compressed queries, (n_tokens, q_lora)
        """
        n_tokens, ratio = len(x), self.compress.sizes.ratio
        n_windows = n_tokens // ratio
        if n_windows <= self.sizes.n_chosen:
            return None
        keys = self.compress(x, Silent())
        queries = linear(compressed, self.queries).float().unflatten(-1, (self.sizes.n_heads, -1))
        queries = rotated_end(queries, self.rotate)
        if self.turn is not None:
            keys, queries = round_f16(_turned(keys, self.turn)), _turned(queries, self.turn)
        shares = linear(x.float(), self.shares)
        unseen = torch.ones((n_tokens, n_windows), dtype=torch.bool, device=x.device)
        for start in range(0, n_tokens, QUERY_BLOCK):
            stop = min(n_tokens, start + QUERY_BLOCK)
            scores = torch.zeros((stop - start, n_windows), device=x.device)
            for head in range(self.sizes.n_heads):
                product = torch.relu(queries[start:stop, head] @ keys.T)
                scores += product * shares[start:stop, head, None]
            scores.masked_fill_(not_counting(start, stop, n_windows, ratio, x.device), float("-inf"))
            unseen[start:stop].scatter_(1, scores.topk(self.sizes.n_chosen, -1).indices, False)
        return unseen


def not_counting(start: int, stop: int, n_windows: int, ratio: int, device: torch.device) -> torch.Tensor:
    """Mark windows that don't count yet for tokens `start` to `stop`, bool (stop - start, n_windows)."""
    n_whole = torch.arange(start + 1, stop + 1, device=device) // ratio
    return torch.arange(n_windows, device=device) >= n_whole[:, None]


def rotated_end(x: torch.Tensor, rotate: Rotation) -> torch.Tensor:
    """Return `x`, (n_positions, n_heads, n_cols), with its last columns rotated; float32."""
    n_rotated = 2 * rotate.turns.shape[1]
    plain, end = x.float().split((x.shape[-1] - n_rotated, n_rotated), -1)
    return torch.cat((plain, rotate(end)), -1)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    return (x.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)


def load_compressor(load: Loader, name: str, sizes: CompressorSizes, rotate: Rotation) -> Compressor:
    """Read the compressor whose tensors' names begin with `name`, "blk.3.attn_compressor".

    rotate  for all positions of a chunk
    """
    n_rows = sizes.n_cols * (2 if sizes.overlap else 1)
    names = f"{name}_kv.weight", f"{name}_gate.weight"
    return Compressor(
        names=names,
        sizes=sizes,
        rotate=replace(rotate, turns=rotate.turns[:: sizes.ratio]),
        kv=load.matrix(names[0], n_rows, sizes.hidden),
        gate=load.matrix(names[1], n_rows, sizes.hidden),
        ape=replace(load, llama_rounding=False).float32(f"{name}_ape.weight", sizes.ratio, n_rows),
        norm=RMSNorm(load.float32(f"{name}_norm.weight", sizes.n_cols), sizes.eps),
    )


def load_window_indexer(
    load: Loader, layer: int, sizes: WindowIndexerSizes, rotate: Rotation
) -> WindowIndexer:
    """Read the indexer of a layer.

    rotate  for all positions of a chunk
    """
    name, keys = f"blk.{layer}", sizes.keys
    return WindowIndexer(
        sizes=sizes,
        compress=load_compressor(load, f"{name}.indexer_compressor", keys, rotate),
        rotate=rotate,
        queries=load.matrix(f"{name}.indexer.attn_q_b.weight", sizes.n_heads * keys.n_cols, sizes.q_lora),
        shares=load.float32(f"{name}.indexer.proj.weight", sizes.n_heads, keys.hidden),
        turn=hadamard(keys.n_cols).to(load.device) if load.half_cache else None,
    )
