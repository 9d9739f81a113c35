"""Attention with keys and values of its own, which several heads of queries may share.

Queries and keys may be normed before they are rotated or after, per head or all heads together. A layer may
see the last positions alone (`window`), or those of the token's chunk. A head may have a sink: one more logit
in the softmax, which has no value. It may have a gate, whose sigmoid its output is multiplied by; the gate's
rows stand behind those of its query. A gate that is a matrix of its own makes a number for each head, or one
for each column, and its softplus or sigmoid counts.

An indexer may choose, for each head of keys, the blocks of positions that are seen.

A layer may hand its keys and values on, beside the hidden states, and later ones attend to these.

Queries go in blocks. In a decoder they only see the keys up to their own end; an encoder's see all keys, or
those within half a window on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch.nn.functional import linear, softplus

from imatrix.forward.layers.attention import QUERY_BLOCK, SCORES_BYTES
from imatrix.forward.layers.attention.chosen_blocks import BlockChooser, ChosenBlocks
from imatrix.forward.layers.llama_rounding import round_f16
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import UNNORMED, Norm, RMSNorm, unit_rows
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.observe import Observer, watch


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a model's attention.

    n_heads, n_kv_heads  heads of queries, and heads of keys and values
    head_dim             columns of a head
    rotated              columns of a head that are rotated, the first ones
    eps                  of all norms
    gated                whether heads have gates
    scale                what scores are multiplied by; None: one over the root of head_dim
    softcap              the size that scores can't reach; None for no bound
    normed               whether the hidden states are normed before
    fused                whether one matrix has the rows of queries, keys and values
    unit_values          whether values are normed, without a weight
    norms_rotated        whether queries and keys are normed after they are rotated
    causal               whether tokens see no later ones
    sigmoid_gates        whether gates that are a matrix of their own have a sigmoid, not softplus
    value_cols           columns of a value; 0: as many as head_dim
    """

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotated: int
    eps: float
    gated: bool = False
    scale: float | None = None
    softcap: float | None = None
    normed: bool = True
    unit_values: bool = False
    fused: bool = False
    norms_rotated: bool = False
    causal: bool = True
    sigmoid_gates: bool = False
    value_cols: int = 0

    @property
    def n_rows(self) -> tuple[int, int, int]:
        """Rows of queries, of keys and of values."""
        values = self.n_kv_heads * (self.value_cols or self.head_dim)
        return self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim, values

    @property
    def n_attended(self) -> int:
        """Columns of what all heads attend to."""
        return self.n_heads * (self.value_cols or self.head_dim)


@dataclass(frozen=True)
class Projection:
    """A matrix with its bias, None for none."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Multiply `x` by the matrix; return (n_tokens, n_rows)."""
        product = linear(x, self.weight, self.bias)
        watch(observer, self.name, x, product)
        return product

    def heads(self, x: torch.Tensor, observer: Observer, n_heads: int) -> torch.Tensor:
        """Return the same head by head, (n_tokens, n_heads, n_cols), and observed so."""
        product = linear(x, self.weight, self.bias).unflatten(-1, (n_heads, -1))
        watch(observer, self.name, x, product, 0, n_heads)
        return product


def load_projection(load: Loader, name: str, n_rows: int, n_cols: int) -> Projection:
    """Read a matrix that has no bias."""
    return Projection(name, load.matrix(name, n_rows, n_cols), None)


@dataclass(frozen=True)
class SharedKeyAttention:
    """The attention of one layer.

    rotate          queries and keys by their positions; None: not at all
    norm            of the hidden states
    q_norm, k_norm  of queries and keys; None for none. Their weights have the columns of a head, or of all
                    heads together
    sinks           float32 (n_heads,), None for none
    window          positions that are seen, the token's own with them, or half as many on either side; None
                    for all
    chunked         whether positions are in chunks of so many, and those of the token's own chunk are seen
    post_norm       of what the layer adds; None for none
    sharpness       float32 (n_positions,): what scores are multiplied by, too; None for nothing
    k               makes the keys; None where they are another layer's
    v               makes the values; None where they are what k makes, before its norm
    gate            makes what the output is multiplied by; None for nothing
    indexer         chooses the blocks of positions that are seen; None: all are
    half_cache      whether keys and values are rounded as in llama.cpp's cache
    """

    sizes: HeadSizes
    rotate: Rotation | None
    norm: Norm
    q: Projection  # of queries, or of queries, keys and values
    k: Projection | None
    v: Projection | None
    output: Projection
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    sinks: torch.Tensor | None
    window: int | None
    half_cache: bool = False
    chunked: bool = False
    post_norm: RMSNorm | None = None
    sharpness: torch.Tensor | None = None
    gate: Projection | None = None
    indexer: BlockChooser | None = None

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""
        sizes = self.sizes
        seen = n_tokens if self.window is None else min(n_tokens, self.window)
        gates = sizes.n_rows[0] if sizes.gated else 0
        matrices = sizes.hidden * (sum(sizes.n_rows) + sizes.n_attended + gates)
        chooses = 0 if self.indexer is None else self.indexer.work(n_tokens)
        return matrices + sizes.n_heads * sizes.head_dim * seen + chooses

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Attend within one chunk; return what it adds, float32 (n_tokens, hidden_size)."""
        x = self.normed(hidden, observer)
        query, key, value = self.heads(x, observer)
        assert key is not None
        assert value is not None
        blocks = None if self.indexer is None else self.indexer.choice(x)
        key, value = self.keys_and_values(key, value)
        return self.attend(query, key, value, observer, self._opening(x, observer), blocks)

    def _opening(self, x: torch.Tensor, observer: Observer) -> torch.Tensor | None:
        """Compute the factors of a gate for the output, (n_tokens, n_attended); None for nothing."""
        if self.gate is None:
            return None
        opened = torch.sigmoid if self.sizes.sigmoid_gates else softplus
        opening = opened(self.gate(x, observer).float()).to(x.dtype)
        return opening.repeat_interleave(self.sizes.n_attended // opening.shape[1], 1)

    def normed(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the input of the matrices of queries, keys and values."""
        x = self.norm(hidden).to(self.output.weight.dtype)
        matrices = (self.q, self.k, self.v, self.gate)
        names = tuple(each.name for each in matrices if each is not None)
        observer.rows(names if self.indexer is None else (*names, *self.indexer.names), x)
        return x

    def heads(
        self, x: torch.Tensor, observer: Observer
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Make queries, keys and values of `x`, (n_tokens, n_heads, n_cols) each; None for keys of others."""
        n_heads, n_kv_heads = self.sizes.n_heads, self.sizes.n_kv_heads
        if self.sizes.fused:
            n_rows = self.sizes.n_rows
            # In blocks of which heads of keys have a whole number, and those of values, too.
            n_blocks = sum(n_rows) // gcd(self.sizes.head_dim, self.sizes.value_cols)
            every = self.q.heads(x, observer, n_blocks).flatten(1)
            query, key, value = every.split(n_rows, 1)
            return (
                query.unflatten(1, (n_heads, -1)),
                key.unflatten(1, (n_kv_heads, -1)),
                value.unflatten(1, (n_kv_heads, -1)),
            )
        query = self.q.heads(x, observer, n_heads)
        if self.k is None:
            return query, None, None
        key = self.k.heads(x, observer, n_kv_heads)
        return query, key, key if self.v is None else self.v.heads(x, observer, n_kv_heads)

    def keys_and_values(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, normed and rotated, and values, both (n_tokens, n_kv_heads, n_cols)."""
        dtype = value.dtype
        if self.sizes.unit_values:
            value = unit_rows(value, self.sizes.eps).to(dtype)
        key = self._placed(key, self.k_norm).to(dtype)
        return (round_f16(key), round_f16(value)) if self.half_cache else (key, value)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        observer: Observer,
        opening: torch.Tensor | None = None,
        blocks: ChosenBlocks | None = None,
    ) -> torch.Tensor:
        """Attend to keys and values; return what the layer adds, float32 (n_tokens, hidden_size).

        query    as `heads` has it, with its gate
        opening  what the output is multiplied by; None for nothing
        blocks   those of positions that are seen; None: all
        """
        sizes, dtype = self.sizes, value.dtype
        gate = query[..., sizes.head_dim :].flatten(1)
        query = self._placed(query[..., : sizes.head_dim], self.q_norm)
        if self.sharpness is not None:
            query = query * self.sharpness[: len(query), None, None]
        query = query.to(dtype)
        values = self._attend(query, key, value, blocks)
        if sizes.gated:
            values = values * torch.sigmoid(gate)
        if opening is not None:
            values = values * opening
        observer.rows((self.output.name,), values)
        output = self.output(values, observer).float()
        return output if self.post_norm is None else self.post_norm(output)

    def _placed(self, heads: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """Return queries or keys, (n_tokens, n_heads, head_dim), normed and rotated."""
        if self.sizes.norms_rotated:
            return _normed(self._rotated(heads), norm)
        return self._rotated(_normed(heads, norm))

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        rotated = self.sizes.rotated
        if self.rotate is None:
            return heads.float()
        if rotated == self.sizes.head_dim:
            return self.rotate(heads)
        return torch.cat((self.rotate(heads[..., :rotated]), heads[..., rotated:].float()), -1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: ChosenBlocks | None
    ) -> torch.Tensor:
        """Return the values that the queries attend to, (n_tokens, n_attended).

        query  (n_tokens, n_heads, head_dim); key, value  (n_tokens, n_kv_heads, n_cols)
        blocks see `attend`
        """
        n_tokens, sizes = len(query), self.sizes
        group = sizes.n_heads // sizes.n_kv_heads
        n_query = min(n_tokens, QUERY_BLOCK)
        step = max(1, SCORES_BYTES // (4 * n_query * n_tokens * group))
        query = query.unflatten(1, (sizes.n_kv_heads, group))
        attended = []
        for start in range(0, n_tokens, n_query):
            stop = min(n_tokens, start + n_query)
            first, last = self._seen(start, stop, n_tokens)
            unseen = self._unseen(start, stop, first, last, query)
            some = []
            for head in range(0, sizes.n_kv_heads, step):
                heads = slice(head, head + step)
                hidden = unseen
                if blocks is not None:
                    left_out = blocks.left_out(heads, start, stop)[..., first:]
                    hidden = unseen.masked_fill(left_out, float("-inf"))
                some.append(
                    self._block(
                        query[start:stop, heads],
                        key[first:last, heads],
                        value[first:last, heads],
                        hidden,
                        head * group,
                    )
                )
            attended.append(torch.cat(some, 1))
        return torch.cat(attended).flatten(1)

    def _seen(self, start: int, stop: int, n_tokens: int) -> tuple[int, int]:
        """Return the first position that any of some queries sees, and the one behind the last."""
        if self.chunked and self.window is not None:
            return start - start % self.window, stop
        before, after = self._reach(n_tokens)
        return max(0, start - before), min(n_tokens, stop + after)

    def _reach(self, n_tokens: int) -> tuple[int, int]:
        """Return how many positions a query sees before its own, and behind it."""
        if self.sizes.causal:
            return (n_tokens if self.window is None else self.window - 1), 0
        half = n_tokens if self.window is None else self.window // 2
        return half, half

    def _unseen(self, start: int, stop: int, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        """Return -inf for positions that a query does not see, and 0, (stop - start, last - first)."""
        unseen = like.new_full((stop - start, last - first), float("-inf"))
        if self.chunked and self.window is not None:
            chunks = torch.arange(first, last, device=like.device) // self.window
            in_others = chunks[start - first : stop - first, None] != chunks
            return unseen.triu(start - first + 1).masked_fill_(in_others, float("-inf"))
        before, after = self._reach(last)
        return unseen.triu(start - first + after + 1) + unseen.tril(start - first - before - 1)

    def _block(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor, head: int
    ) -> torch.Tensor:
        """Return the values of a block of queries, (n_queries, n_kv_heads * group, n_cols).

        query   (n_queries, n_kv_heads, group, head_dim); key, value  (n_keys, n_kv_heads, n_cols)
        unseen  (n_queries, n_keys), or for each head of keys (n_kv_heads, 1, n_queries, n_keys)
        head    number of the first head of queries
        """
        n_queries, n_kv_heads, group, n_cols = query.shape
        rows = query.permute(1, 2, 0, 3).reshape(n_kv_heads, group * n_queries, n_cols)
        scores = torch.bmm(rows, key.permute(1, 2, 0)) * (self.sizes.scale or n_cols**-0.5)
        if self.sizes.softcap is not None:
            scores = torch.tanh(scores / self.sizes.softcap) * self.sizes.softcap
        scores = scores.unflatten(1, (group, n_queries)) + unseen
        if self.sinks is None:
            shares = torch.softmax(scores, -1)
        else:
            sinks = self.sinks[head : head + n_kv_heads * group].to(scores.dtype)
            sinks = sinks.view(n_kv_heads, group, 1, 1).expand(-1, -1, n_queries, 1)
            shares = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
        attended = torch.bmm(shares.flatten(1, 2), value.transpose(0, 1))
        return attended.unflatten(1, (group, n_queries)).permute(2, 0, 1, 3).flatten(1, 2)


def _normed(heads: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    """Return queries or keys, (n_tokens, n_heads, n_cols), normed as the size of the norm's weight says."""
    if norm is None:
        return heads
    if norm.weight.numel() == heads.shape[-1]:
        return norm(heads)
    return norm(heads.flatten(1)).unflatten(-1, heads.shape[1:])


def load_shared_key_attention(
    load: Loader,
    layer: int,
    sizes: HeadSizes,
    rotate: Rotation | None,
    window: int | None,
    *,
    own_keys: bool = True,
) -> SharedKeyAttention:
    """Read the attention of a layer; biases, norms and sinks where the model has them.

    own_keys  whether it makes keys and values
    """
    name = f"blk.{layer}"
    if load.has(f"{name}.attn_qkv.weight"):
        sizes = replace(sizes, fused=True)
    q_rows, k_rows, v_rows = sizes.n_rows

    def projection(part: str, n_rows: int, n_cols: int) -> Projection:
        matrix = f"{name}.{part}.weight"
        return replace(load_projection(load, matrix, n_rows, n_cols), bias=load.bias(matrix, n_rows))

    def norm_of(part: str, n_rows: int) -> RMSNorm | None:
        weight = f"{name}.{part}.weight"
        if not load.has(weight):
            return None
        n_cols = n_rows if load.tensor(weight).shape[-1] == n_rows else sizes.head_dim
        return RMSNorm(load.float32(weight, n_cols), sizes.eps)

    has_keys = own_keys and not sizes.fused
    keys_are_values = sizes.unit_values and not load.has(f"{name}.attn_v.weight")
    sinks, gate = f"{name}.attn_sinks.weight", f"{name}.attn_gate.weight"
    return SharedKeyAttention(
        sizes=sizes,
        rotate=rotate,
        norm=RMSNorm(load.float32(f"{name}.attn_norm.weight", sizes.hidden), sizes.eps)
        if sizes.normed
        else UNNORMED,
        q=projection("attn_qkv", sum(sizes.n_rows), sizes.hidden)
        if sizes.fused
        else projection("attn_q", 2 * q_rows if sizes.gated else q_rows, sizes.hidden),
        k=projection("attn_k", k_rows, sizes.hidden) if has_keys else None,
        v=projection("attn_v", v_rows, sizes.hidden) if has_keys and not keys_are_values else None,
        output=projection("attn_output", sizes.hidden, sizes.n_attended),
        q_norm=norm_of("attn_q_norm", q_rows),
        k_norm=norm_of("attn_k_norm", k_rows),
        sinks=load.float32(sinks, sizes.n_heads) if load.has(sinks) else None,
        window=window,
        half_cache=load.half_cache,
        gate=projection("attn_gate", load.tensor(gate).shape[0], sizes.hidden) if load.has(gate) else None,
    )


@dataclass(frozen=True)
class HandedKeys:
    """Where keys and values of a kind of layers stand, which a layer makes and later ones attend to.

    first    the first of their columns: those of all heads' keys, then those of values
    n_heads  of keys
    n_cols   of a head
    """

    first: int
    n_heads: int
    n_cols: int

    @property
    def width(self) -> int:
        """Columns of keys and values together."""
        return 2 * self.n_heads * self.n_cols

    def read(self, hidden: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, both (n_tokens, n_heads, n_cols)."""
        both = hidden[:, self.first : self.first + self.width].to(dtype)
        key, value = both.unflatten(-1, (2, self.n_heads, self.n_cols)).unbind(1)
        return key, value


@dataclass(frozen=True)
class HandedKeyAttention:
    """The attention of a layer whose keys are handed on, or are another layer's.

    inner  the attention itself; without a matrix of keys, it attends to what it is handed
    """

    inner: SharedKeyAttention
    handed: HandedKeys

    def work(self, n_tokens: int) -> int:
        return self.inner.work(n_tokens)

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Attend within one chunk; return what is added to hidden states, and to what stands beside them.

        hidden  float32 (n_tokens, hidden_size and more)
        """
        inner, handed = self.inner, self.handed
        x = inner.normed(hidden[:, : inner.sizes.hidden], observer)
        query, own_key, own_value = inner.heads(x, observer)
        if own_key is None or own_value is None:
            return inner.attend(query, *handed.read(hidden, x.dtype), observer)
        key, value = inner.keys_and_values(own_key, own_value)
        output = inner.attend(query, key, value, observer)
        change = torch.cat((key.flatten(1), value.flatten(1)), -1).float()
        n_before = handed.first - output.shape[1]
        n_behind = hidden.shape[1] - handed.first - handed.width
        zeros = output.new_zeros(len(output), n_before), output.new_zeros(len(output), n_behind)
        return torch.cat((output, zeros[0], change, zeros[1]), -1)
