"""Multi-head latent attention, observed in every layout of its matrices.

A token is compressed to a latent (kv_lora columns) and a rotated key that all heads share. The same attention
has two forms. In the expanded form, attn_kv_b makes keys and values of each latent. In the absorbed form,
attn_k_b takes the query to the latent's columns, and attn_v_b takes the attended latent to the values. Here
keys are expanded and values are absorbed, which is cheapest for whole chunks, and an observer is shown the
input of every matrix of both forms:

    attn_kv_b   the latents (one row for all heads)
    attn_k_b    the query's unrotated part, per head
    attn_v_b    the attended latent, per head

Where the layer has an indexer, tokens attend to the positions that it chooses alone. A layer may hand this
choice on to those after it: then it stands beside the hidden states (residual.WithSidecar), as numbers.

A differentiated pass expands the values, too: the gradients at all products of the expanded form come with
it, and those of the absorbed form follow from the gradients at scores and attended values. A pass that rounds
as llama.cpp does (imatrix.forward.layers.llama_rounding) takes the form that llama.cpp takes.

What all heads attend to may be multiplied by a gate: the sigmoid of a number for each head, or for each
column of its value.

Queries go in blocks, which only see the keys up to their own end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.attention import QUERY_BLOCK, SCORES_BYTES
from imatrix.forward.layers.attention.indexer import Indexer, all_but
from imatrix.forward.layers.attention.pool_indexer import PoolIndexer
from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.llama_rounding import AttentionRounding, round_f16, without_rounding
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.observe import Observer, ObservesGradients, watch, watch_gradient


@dataclass(frozen=True)
class LatentModel:
    """Settings of latent attention that all layers of a model have in common.

    nope, rope  columns of a head's key that are not rotated, and that are
    value       columns of a head's value
    q_lora      columns of the compressed query; None where queries are not compressed
    scale       what scores are multiplied by before the softmax
    eps         of the norm of hidden states
    latent_eps  of the norms of compressed queries and of latents
    n_handed    columns beside the hidden states: the positions that a layer has chosen for those after it.
                A layer with an indexer puts its choice there, one without takes it from there
    sharpness   s and n: the scores of the token at position p are multiplied by 1 + s ln(1 + floor(p / n)),
                too; None for nothing
    gated       whether there is a gate with a row for each head
    """

    hidden: int
    n_heads: int
    nope: int
    rope: int
    value: int
    kv_lora: int
    q_lora: int | None
    scale: float
    eps: float
    latent_eps: float
    n_handed: int = 0
    sharpness: tuple[float, int] | None = None
    gated: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """The attention of one layer.

    name           "blk.3", the beginning of its tensors' names
    norm           of the hidden states
    q_a, q_a_norm  None where queries are not compressed; then q_b is attn_q
    keys           (n_heads, nope, kv_lora): the key rows of attn_kv_b
    values         (n_heads, value, kv_lora): its value rows
    rotate         None where nothing is rotated
    indexer        chooses the positions that are attended to; None where all are
    rounding       None where activations stay as they are
    sharpness      float32 (n_positions,): what scores are multiplied by, too; None for nothing
    gate           a row for each head, or for each column of its value; None for no gate
    """

    name: str
    model: LatentModel
    rotate: Rotation | None
    norm: RMSNorm
    q_a: torch.Tensor | None
    q_a_norm: RMSNorm | None
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: RMSNorm
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor
    indexer: Indexer | PoolIndexer | None = None
    rounding: AttentionRounding | None = None
    sharpness: torch.Tensor | None = None
    gate: Projection | None = None

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""
        model = self.model
        attended = model.kv_lora * model.n_heads * (model.nope + model.value + n_tokens)
        query_cols = model.n_heads * (model.nope + model.rope)
        return attended + model.hidden * (model.n_heads * model.value + query_cols // 2)

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Attend within one chunk; return its change of the hidden states, float32 (n_tokens, hidden_size).

        Where a choice is handed on, hidden states have n_handed more columns for it, and what is returned has
        as many, with what changes there.
        """
        name, model, dtype = self.name, self.model, self.output.dtype
        hidden, handed = hidden.split((model.hidden, self.model.n_handed), -1)
        x = self.norm(hidden).to(dtype)
        query, choice = self._query(x, observer)
        change = torch.zeros_like(handed)
        if choice is not None and self.model.n_handed:
            change = choice.float() - handed
        elif self.indexer is None and len(x) > self.model.n_handed > 0:
            choice = handed.detach().long()
        unseen = None if choice is None else all_but(choice)
        compressed = linear(x, self.kv_a)
        watch(observer, f"{name}.attn_kv_a_mqa.weight", x, compressed)
        latent, shared_key = compressed.split((model.kv_lora, model.rope), -1)
        latent = self.kv_a_norm(latent).to(dtype)
        observer.rows((f"{name}.attn_kv_b.weight",), latent)
        observer.heads(f"{name}.attn_k_b.weight", 0, model.n_heads, query[..., : model.nope])
        shared_key = self._rotated(shared_key[:, None])[:, 0]
        if query.requires_grad or (self.rounding is not None and self.rounding.expands):
            query = torch.cat((query[..., : model.nope], self._rotated(query[..., model.nope :])), -1)
            values = self._attend_expanded(query, latent, shared_key, unseen, observer)
        else:
            query[..., model.nope :] = self._rotated(query[..., model.nope :])
            if self.rounding is not None:
                query, latent, shared_key = self.rounding.absorbed(query, latent, shared_key)
            values = self._attend(query, latent, shared_key, unseen, observer)
        if self.gate is not None:
            opening = torch.sigmoid(self.gate(x, observer).float()).unflatten(-1, (model.n_heads, -1))
            values = (values.unflatten(-1, (model.n_heads, -1)) * opening).flatten(1).to(dtype)
        observer.rows((f"{name}.attn_output.weight",), values)
        output = linear(values, self.output)
        watch(observer, f"{name}.attn_output.weight", values, output)
        return torch.cat((output.float(), change), -1) if self.model.n_handed else output.float()

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        return heads if self.rotate is None else self.rotate(heads).to(heads.dtype)

    def _query(self, x: torch.Tensor, observer: Observer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the queries of all heads before rotation, (n_tokens, n_heads, nope + rope).

        The second is which positions they attend to, see `Indexer.choice`; None without an indexer, too.
        """
        name, n_heads = self.name, self.model.n_heads
        names: tuple[str, ...] = (f"{name}.attn_kv_a_mqa.weight",)
        if self.gate is not None:
            names = (*names, self.gate.name)
        if self.q_a is None or self.q_a_norm is None:
            observer.rows((*names, f"{name}.attn_q.weight"), x)
            query = linear(x, self.q_b).unflatten(-1, (n_heads, -1))
            watch(observer, f"{name}.attn_q.weight", x, query, 0, n_heads)
            return query, None
        names = (*names, f"{name}.attn_q_a.weight")
        of_compressed: tuple[str, ...] = (f"{name}.attn_q_b.weight",)
        if self.indexer is not None:
            names = (*names, *self.indexer.names[0])
            of_compressed = (*of_compressed, *self.indexer.names[1])
        observer.rows(names, x)
        compressed = linear(x, self.q_a)
        watch(observer, f"{name}.attn_q_a.weight", x, compressed)
        compressed = self.q_a_norm(compressed).to(self.output.dtype)
        observer.rows(of_compressed, compressed)
        query = linear(compressed, self.q_b).unflatten(-1, (n_heads, -1))
        watch(observer, f"{name}.attn_q_b.weight", compressed, query, 0, n_heads)
        return query, None if self.indexer is None else self.indexer.choice(x, compressed)

    def _attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        shared_key: torch.Tensor,
        unseen: torch.Tensor | None,
        observer: Observer,
    ) -> torch.Tensor:
        """Return the values that the queries of all heads attend to, (n_tokens, n_heads * value)."""
        n_tokens, n_heads = query.shape[:2]
        values = latent.new_empty((n_tokens, n_heads, self.model.value))
        n_query = min(n_tokens, QUERY_BLOCK)
        step = max(1, SCORES_BYTES // (4 * n_query * n_tokens))
        for head in range(0, n_heads, step):
            heads = slice(head, min(n_heads, head + step))
            keys = linear(latent, self.keys[heads].flatten(0, 1)).unflatten(-1, (-1, self.model.nope))
            keys = torch.cat((keys.transpose(0, 1), shared_key.expand(keys.shape[1], -1, -1)), -1)
            for start in range(0, n_tokens, n_query):
                stop = min(n_tokens, start + n_query)
                later = _hidden_from(latent, start, stop, unseen)
                block = self._sharpened(query[start:stop, heads], start).transpose(0, 1)
                scores = torch.baddbmm(later, block, keys[:, :stop].transpose(1, 2), alpha=self.model.scale)
                attended = torch.matmul(torch.softmax(scores, -1), latent[:stop])
                observer.heads(f"{self.name}.attn_v_b.weight", head, n_heads, attended.transpose(0, 1))
                attended = torch.bmm(attended, self.values[heads].transpose(1, 2))
                values[start:stop, heads] = attended.transpose(0, 1)
        return values.flatten(1)

    def _attend_expanded(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        shared_key: torch.Tensor,
        unseen: torch.Tensor | None,
        observer: Observer,
    ) -> torch.Tensor:
        """Do what `_attend` does in the expanded form, which can be differentiated."""
        name, model, (n_tokens, n_heads) = self.name, self.model, query.shape[:2]
        rows = torch.cat((self.keys, self.values), 1).flatten(0, 1)
        expanded = linear(latent, rows).unflatten(-1, (n_heads, -1))
        watch(observer, f"{name}.attn_kv_b.weight", latent, expanded, 0, n_heads)
        keys, values = expanded.transpose(0, 1).split((model.nope, model.value), -1)
        keys = torch.cat((keys, shared_key.expand(n_heads, -1, -1)), -1)
        if self.rounding is not None:
            keys, values = round_f16(keys), round_f16(values)
        blocks = []
        for start in range(0, n_tokens, QUERY_BLOCK):
            stop = min(n_tokens, start + QUERY_BLOCK)
            later = _hidden_from(latent, start, stop, unseen)
            block = self._sharpened(query[start:stop], start).transpose(0, 1)
            scores = torch.baddbmm(later, block, keys[:, :stop].transpose(1, 2), alpha=self.model.scale)
            shares = torch.softmax(scores, -1)
            attended = torch.bmm(shares, values[:, :stop])
            unrotated = query[start:stop, :, : model.nope]
            self._watch_absorbed(observer, unrotated, scores, shares, attended, latent[:stop], start)
            blocks.append(attended.transpose(0, 1))
        return torch.cat(blocks).flatten(1)

    def _sharpened(self, queries: torch.Tensor, start: int) -> torch.Tensor:
        """Sharpen queries from position `start` on, (n_queries, n_heads, n_cols)."""
        if self.sharpness is None:
            return queries
        return queries * self.sharpness[start : start + len(queries), None, None].to(queries.dtype)

    def _watch_absorbed(
        self,
        observer: Observer,
        unrotated: torch.Tensor,
        scores: torch.Tensor,
        shares: torch.Tensor,
        attended: torch.Tensor,
        latent: torch.Tensor,
        start: int,
    ) -> None:
        """Show the gradients at what attn_k_b and attn_v_b would make.

        unrotated       (n_queries, n_heads, nope): what attn_k_b multiplies
        scores, shares  (n_heads, n_queries, n_tokens): before and after the softmax
        attended        (n_heads, n_queries, value): the product of attn_v_b
        latent          (n_tokens, kv_lora): the product of attn_k_b is multiplied by it to give scores
        start           position of the first query
        """
        n_heads = len(scores)
        unrotated, shares, latent = unrotated.detach(), shares.detach(), latent.detach()

        def show_keys(observer: ObservesGradients, gradient: torch.Tensor) -> None:
            of_queries = torch.matmul(gradient, latent).mul_(self.model.scale).transpose(0, 1)
            gradient = self._sharpened(of_queries, start)
            observer.gradient(f"{self.name}.attn_k_b.weight", 0, n_heads, unrotated, gradient)

        def show_values(observer: ObservesGradients, gradient: torch.Tensor) -> None:
            x = torch.matmul(shares, latent).transpose(0, 1)
            observer.gradient(f"{self.name}.attn_v_b.weight", 0, n_heads, x, gradient.transpose(0, 1))

        watch_gradient(observer, scores, show_keys)
        watch_gradient(observer, attended, show_values)


def _hidden_from(like: torch.Tensor, start: int, stop: int, unseen: torch.Tensor | None) -> torch.Tensor:
    """Make what is added to the scores of queries `start` to `stop`: -inf where they don't attend."""
    hidden = like.new_full((stop - start, stop), float("-inf")).triu_(start + 1)
    if unseen is not None:
        hidden.masked_fill_(unseen[start:stop, :stop], float("-inf"))
    return hidden


def load_latent_attention(
    load: Loader,
    layer: int,
    model: LatentModel,
    rotate: Rotation | None,
    indexer: Indexer | PoolIndexer | None = None,
) -> LatentAttention:
    """Read the attention of a layer; `indexer` is the layer's own, `rotate` None where nothing is rotated."""
    name, hidden, latent, q_lora = f"blk.{layer}", model.hidden, model.kv_lora, model.q_lora
    q_rows = model.n_heads * (model.nope + model.rope)
    keys, values = _load_heads(load, name, model)

    def norm(part: str, n_cols: int, eps: float) -> RMSNorm:
        return RMSNorm(load.float32(f"{name}.{part}.weight", n_cols), eps)

    return LatentAttention(
        name=name,
        model=model,
        rotate=rotate,
        norm=norm("attn_norm", hidden, model.eps),
        q_a=None if q_lora is None else load.matrix(f"{name}.attn_q_a.weight", q_lora, hidden),
        q_a_norm=None if q_lora is None else norm("attn_q_a_norm", q_lora, model.latent_eps),
        q_b=load.matrix(f"{name}.attn_q.weight", q_rows, hidden)
        if q_lora is None
        else load.matrix(f"{name}.attn_q_b.weight", q_rows, q_lora),
        kv_a=load.matrix(f"{name}.attn_kv_a_mqa.weight", latent + model.rope, hidden),
        kv_a_norm=norm("attn_kv_a_norm", latent, model.latent_eps),
        keys=keys,
        values=values,
        output=load.matrix(f"{name}.attn_output.weight", hidden, model.n_heads * model.value),
        indexer=indexer,
        rounding=_rounding(load, name, model.nope) if load.half_cache else None,
        sharpness=None if rotate is None else rotate.sharpness(model.sharpness),
        gate=Projection(f"{name}.attn_gate.weight",
                        load.matrix(f"{name}.attn_gate.weight", model.n_heads, hidden), None)
        if model.gated
        else None,
    )  # fmt: skip


def _rounding(load: Loader, name: str, nope: int) -> AttentionRounding:
    """Find how attention rounds where the loader's matrices do; attn_k_b multiplies `nope` columns."""
    whole = f"{name}.attn_kv_b.weight"
    if not load.has(whole):
        return AttentionRounding(False, load.rounding(load.tensor(f"{name}.attn_k_b.weight")))
    if load.splits_kv_b:
        return AttentionRounding(False, load.rounding(load.tensor(whole), nope))
    return AttentionRounding(expands=True)


def _load_heads(load: Loader, name: str, model: LatentModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the key and the value rows of all heads, from whichever layout the model has."""
    # What attn_k_b multiplies are queries; latents, which its transpose multiplies, are not rounded for it.
    heads, latent, nope, value = model.n_heads, model.kv_lora, model.nope, model.value
    if load.has(f"{name}.attn_kv_b.weight"):
        load.leave(f"{name}.attn_k_b.weight", f"{name}.attn_v_b.weight")
        both = load.matrix(f"{name}.attn_kv_b.weight", heads, nope + value, latent)
        keys, values = both[:, :nope].contiguous(), both[:, nope:].contiguous()
        return (without_rounding(keys) if load.splits_kv_b else keys), values
    keys = replace(load, llama_rounding=False).matrix(f"{name}.attn_k_b.weight", heads, latent, nope)
    values = load.matrix(f"{name}.attn_v_b.weight", heads, value, latent)
    return keys.transpose(1, 2).contiguous(), values
