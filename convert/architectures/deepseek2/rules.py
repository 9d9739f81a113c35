"""The tensors of DeepSeek V2 and V3: which weights they are made of, and which weights are left out.

Everything is renamed but for two things:

    kv_b_proj  (heads * (nope + v), kv_lora): per head its key rows, then its value rows. Multi-head latent
               attention multiplies queries with the key half transposed (attn_k_b: per head
               kv_lora x nope) and the attended latent with the value half (attn_v_b: per head
               v x kv_lora).
    experts    one matrix per expert in the checkpoint, one stack per layer in the file

The layouts of attention, tensors as (mats, rows, cols):

    split  attn_k_b (heads, kv_lora, nope), attn_v_b (heads, v, kv_lora)
    both   attn_kv_b (heads*(nope+v), kv_lora), attn_k_b (heads*kv_lora, nope), attn_v_b (heads*v, kv_lora).
           ik_llama.cpp reads it, llama.cpp does not.
    none   attn_kv_b. Both programs read it, as plain attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from convert.architectures.decoder.rules import (
    INV_FREQ,
    dense_blocks,
    drop_mtp,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    mtp,
    norm_of_blocks,
    once,
    one,
    shared_experts,
    untied,
)
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.options import LatentOptions
from convert.architectures.rules import (
    Arrange,
    Drop,
    HeadRows,
    Output,
    OutputTensor,
    Rule,
    TransposedHeadRows,
    Where,
    renamed,
)
from convert.weights.base import Weight

# ---- what becomes of kv_b_proj


def _keys(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> TransposedHeadRows:
    """Return attn_k_b: every head's key rows, transposed; (n_heads, kv_lora_rank, qk_nope_head_dim)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim)
    return TransposedHeadRows(name, shape, weight, head_rows, 0, config.qk_nope_head_dim)


def _values(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> HeadRows:
    """Return attn_v_b: every head's value rows; (n_heads, v_head_dim, kv_lora_rank)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.v_head_dim, config.kv_lora_rank)
    return HeadRows(name, shape, weight, head_rows, config.qk_nope_head_dim, config.v_head_dim)


def _flat(arrange: Callable[..., HeadRows | TransposedHeadRows]) -> Arrange:
    """Arrange the same rows as one matrix: head h has rows h*n_rows to (h+1)*n_rows."""

    def flat(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
        tensor = arrange(name, weights, config)
        n_mats, n_rows, n_cols = tensor.shape
        return replace(tensor, shape=(n_mats * n_rows, n_cols))

    return flat


# ---- the rules


def _with_layout(mla: str) -> Where:
    return lambda config, options: layers(config, options) if options.mla == mla else ()


def _queries(*, compressed: bool) -> Where:
    return lambda c, o: layers(c, o) if (c.q_lora_rank is not None) == compressed else ()


_compressed, _uncompressed = _queries(compressed=True), _queries(compressed=False)


def _biased(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    """Return the layers where a bias takes part in the choice of experts."""
    return moe_layers(config, options) if config.topk_method == "noaux_tc" else ()


_ATTENTION = "model.layers.{layer}.self_attn."
_MLX_KEYS, _MLX_VALUES = f"{_ATTENTION}embed_q.weight", f"{_ATTENTION}unembed_out.weight"
"""Tensors that MLX makes of kv_b_proj: the two of the layout split, ready made."""


def _kv_b(mla: str, *parts: tuple[str, Any]) -> Rule:
    return Rule(_with_layout(mla), tuple(
        Output(f"blk.{{layer}}.{name}", f"{_ATTENTION}kv_b_proj.weight", "kv_b_rows kv_lora_rank", arrange)
        for name, arrange in parts
    ), unless=(_MLX_KEYS,) if mla == "split" else ())  # fmt: skip


RULES: tuple[Rule, ...] = (
    one(once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
    one(once, "output_norm.weight", "model.norm.weight", "hidden_size"),
    one(untied, "output.weight", "lm_head.weight", "vocab_size hidden_size"),

    in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size"),
    in_layer(_uncompressed, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size"),
    in_layer(_compressed, "attn_q_a.weight", "self_attn.q_a_proj.weight", "q_lora_rank hidden_size"),
    in_layer(_compressed, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "q_lora_rank"),
    in_layer(_compressed, "attn_q_b.weight", "self_attn.q_b_proj.weight", "q_rows q_lora_rank"),
    in_layer(layers, "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight",
              "kv_a_rows hidden_size"),
    in_layer(layers, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
    _kv_b("split", ("attn_k_b.weight", _keys), ("attn_v_b.weight", _values)),
    _kv_b("both", ("attn_kv_b.weight", renamed), ("attn_k_b.weight", _flat(_keys)),
          ("attn_v_b.weight", _flat(_values))),
    _kv_b("none", ("attn_kv_b.weight", renamed)),
    Rule(_with_layout("split"), (
        Output("blk.{layer}.attn_k_b.weight", _MLX_KEYS, "num_attention_heads kv_lora_rank qk_nope_head_dim"),
        Output("blk.{layer}.attn_v_b.weight", _MLX_VALUES, "num_attention_heads v_head_dim kv_lora_rank"),
    ), when=(_MLX_KEYS,)),
    in_layer(layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size attention_cols"),

    norm_of_blocks(),
    *dense_blocks(),

    in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "n_routed_experts hidden_size"),
    in_layer(_biased, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias",
              "n_routed_experts"),
    *expert_stacks(moe_layers),
    *shared_experts(moe_layers),
    *mtp(),
)  # fmt: skip


def drops(config: DeepseekConfig, options: LatentOptions) -> tuple[Drop, ...]:
    """Return the weights that this model's checkpoint may hold and the file does not need."""
    left_out = [INV_FREQ]
    if config.tie_word_embeddings:
        left_out.append(
            Drop(lambda name: name == "lm_head.weight", "tied: the token embedding is the output layer")
        )
    if not options.mtp:
        left_out.append(drop_mtp(config, "with --mtp"))
    return tuple(left_out)
