"""Keys of DeepSeek V4 that stand for many positions, and what chooses among them.

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

from forward.layers.attention.indexer import hadamard
from forward.layers.llama_rounding import round_f16
from forward.layers.load import Loader
from forward.layers.residual import RMSNorm
from forward.layers.rope import Rotation
from forward.observe import Observer, Silent, watch

_QUERY_BLOCK = 256
"""Number of queries that are scored at a time."""


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
    """What makes one key of each window.

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
        return rotated_end(keys[:, None], self.rotate.of(n_windows))[:, 0]

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
    """What chooses windows in one layer.

    compress  makes the keys
    rotate    for queries
    queries   (n_heads * n_cols, q_lora)
    shares    float32 (n_heads, hidden): what makes the weights of heads
    turn      Hadamard matrix for some columns of a head; None: keys are neither turned nor rounded, see
              forward.layers.attention.indexer
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
        for start in range(0, n_tokens, _QUERY_BLOCK):
            stop = min(n_tokens, start + _QUERY_BLOCK)
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
