"""Multi-head latent attention, and what its matrices see in every layout.

A token is compressed to a latent (kv_lora_rank columns) and a rotated key that all heads share. Two forms of
the same attention exist: expanded, where attn_kv_b makes keys and values of each latent, and absorbed, where
attn_k_b takes the query to the latent's columns and attn_v_b the attended latent to the values. Here keys are
expanded and values are absorbed, which is cheapest for whole chunks, and every matrix of both forms has
its input at hand:

    attn_kv_b   the latents (one row for all heads)
    attn_k_b    the query's unrotated part, per head
    attn_v_b    the attended latent, per head

Queries go in blocks that only see the keys up to their own end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from convert.architectures.deepseek2.config import DeepseekConfig
from imatrix.accumulate import Accumulator
from forward.kernels import sums_of_squares
from forward.load import Loader
from forward.norm import rms_norm
from forward.rope import Rotation, softmax_scale

# In the original the norms of compressed queries and latents have this epsilon, whatever rms_norm_eps is.
LATENT_NORM_EPS = 1e-6

_QUERY_BLOCK = 256
_SCORES_BYTES = 4 << 20
"""Of a block's scores, if they were float32. With 16 MB attention took twice as long: memory was given back
to the system, and asked for again, in every block."""


@dataclass(frozen=True)
class Attention:
    """The attention of one layer.

    q_a, q_a_norm  None where queries are not compressed; then q_b is attn_q
    keys           (n_heads, nope, kv_lora): the key rows of attn_kv_b
    values         (n_heads, v, kv_lora): its value rows
    """

    config: DeepseekConfig
    prefix: str
    norm: torch.Tensor
    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor

    def __call__(self, hidden: torch.Tensor, rotate: Rotation, seen: Accumulator) -> torch.Tensor:
        """Return what attention adds to one chunk's hidden states, float32 (n_tokens, hidden_size)."""
        config, name, dtype = self.config, self.prefix, self.output.dtype
        x = rms_norm(hidden, self.norm, config.rms_norm_eps).to(dtype)
        if self.q_a is None or self.q_a_norm is None:
            seen.add((f"{name}.attn_kv_a_mqa.weight", f"{name}.attn_q.weight"), x)
            query = linear(x, self.q_b)
        else:
            seen.add((f"{name}.attn_kv_a_mqa.weight", f"{name}.attn_q_a.weight"), x)
            compressed = rms_norm(linear(x, self.q_a), self.q_a_norm, LATENT_NORM_EPS).to(dtype)
            seen.add((f"{name}.attn_q_b.weight",), compressed)
            query = linear(compressed, self.q_b)
        latent, shared_key = linear(x, self.kv_a).split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        latent = rms_norm(latent, self.kv_a_norm, LATENT_NORM_EPS).to(dtype)
        seen.add((f"{name}.attn_kv_b.weight",), latent)
        per_head, unrotated = (config.num_attention_heads, config.qk_head_dim), config.qk_nope_head_dim
        sums = sums_of_squares(query[None]).view(per_head)
        seen.add_heads(f"{name}.attn_k_b.weight", sums[:, :unrotated], len(query))
        query = query.unflatten(-1, per_head)
        query[..., unrotated:] = rotate(query[..., unrotated:])
        values = self._attend(query, latent, rotate(shared_key[:, None])[:, 0].to(dtype), seen)
        seen.add((f"{name}.attn_output.weight",), values)
        return linear(values, self.output).float()

    def _attend(
        self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, seen: Accumulator
    ) -> torch.Tensor:
        """Return the values that the queries of all heads attend to, (n_tokens, n_heads * v)."""
        n_tokens, n_heads = query.shape[:2]
        values = latent.new_empty((n_tokens, n_heads, self.config.v_head_dim))
        sums = torch.zeros((n_heads, latent.shape[1]), dtype=torch.float64)
        n_query = min(n_tokens, _QUERY_BLOCK)
        step = max(1, _SCORES_BYTES // (4 * n_query * n_tokens))
        scale = softmax_scale(self.config)
        for head in range(0, n_heads, step):
            heads = slice(head, min(n_heads, head + step))
            keys = linear(latent, self.keys[heads].flatten(0, 1)).unflatten(-1, (-1, self.keys.shape[1]))
            keys = torch.cat((keys.transpose(0, 1), shared_key.expand(keys.shape[1], -1, -1)), -1)
            for start in range(0, n_tokens, n_query):
                stop = min(n_tokens, start + n_query)
                later = latent.new_full((stop - start, stop), float("-inf")).triu_(start + 1)
                block = query[start:stop, heads].transpose(0, 1)
                scores = torch.baddbmm(later, block, keys[:, :stop].transpose(1, 2), alpha=scale)
                attended = torch.matmul(torch.softmax(scores, -1), latent[:stop])
                sums[heads] += sums_of_squares(attended)
                attended = torch.bmm(attended, self.values[heads].transpose(1, 2))
                values[start:stop, heads] = attended.transpose(0, 1)
        seen.add_heads(f"{self.prefix}.attn_v_b.weight", sums, n_tokens)
        return values.flatten(1)


def load_attention(load: Loader, layer: int) -> Attention:
    """Return the attention of a layer with its weights."""
    config, name = load.model.config, f"blk.{layer}"
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    q_lora = config.q_lora_rank
    keys, values = _load_heads(load, name)
    return Attention(
        config=config,
        prefix=name,
        norm=load.float32(f"{name}.attn_norm.weight", hidden),
        q_a=None if q_lora is None else load.matrix(f"{name}.attn_q_a.weight", q_lora, hidden),
        q_a_norm=None if q_lora is None else load.float32(f"{name}.attn_q_a_norm.weight", q_lora),
        q_b=load.matrix(f"{name}.attn_q.weight", config.q_rows, hidden)
        if q_lora is None
        else load.matrix(f"{name}.attn_q_b.weight", config.q_rows, q_lora),
        kv_a=load.matrix(f"{name}.attn_kv_a_mqa.weight", config.kv_a_rows, hidden),
        kv_a_norm=load.float32(f"{name}.attn_kv_a_norm.weight", latent),
        keys=keys,
        values=values,
        output=load.matrix(f"{name}.attn_output.weight", hidden, heads * config.v_head_dim),
    )


def _load_heads(load: Loader, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and the value rows of all heads from whichever layout is there."""
    config = load.model.config
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    if load.has(f"{name}.attn_kv_b.weight"):
        both = load.matrix(f"{name}.attn_kv_b.weight", heads, nope + value, latent)
        return both[:, :nope].contiguous(), both[:, nope:].contiguous()
    keys = load.matrix(f"{name}.attn_k_b.weight", heads, latent, nope)
    values = load.matrix(f"{name}.attn_v_b.weight", heads, value, latent)
    return keys.transpose(1, 2).contiguous(), values
