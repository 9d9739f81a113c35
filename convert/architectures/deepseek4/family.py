"""The DeepSeek V4 family: its tensors, all renamed and the experts of a layer stacked, and the rest of it.

Routing tables and stacks of experts stand first, layer by layer: llama.cpp's converter writes them before it
goes through the checkpoint.

There is no free choice of output type: codes of experts and routing tables stay as they are stored, matrices
that are FP8 become Q8_0, BF16 stays BF16 and F32 stays F32, as in llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from convert.architectures.arrange import OutputTensor
from convert.architectures.base import Architecture
from convert.architectures.deepseek4.config import NAME, OVERLAPPING, V4Config
from convert.architectures.deepseek4.metadata import METADATA
from convert.architectures.options import NoOptions
from convert.architectures.rules import Drop, Output, Rule, Where, stacked
from gguf_tools.format.ggml_types import BF16, F32, I32, MXFP4, Q8_0, GGMLType

_EXPERT = "layers.{layer}.ffn.experts.{expert}"


def _once(config: V4Config, options: Any) -> Iterable[int | None]:
    return (None,)


def _untied(config: V4Config, options: Any) -> Iterable[int | None]:
    return () if config.tie_word_embeddings else (None,)


def _layers(config: V4Config, options: Any) -> range:
    return range(config.num_hidden_layers)


def _hashed(config: V4Config, options: Any) -> range:
    """Return the layers whose experts follow from the token, by a table."""
    return range(config.num_hash_layers)


def _scored(config: V4Config, options: Any) -> range:
    return range(config.num_hash_layers, config.num_hidden_layers)


def _light(config: V4Config, options: Any) -> list[int]:
    """Return the layers that compress few positions, and choose among them with an indexer."""
    return [layer for layer, ratio in enumerate(config.compress_ratios) if ratio == OVERLAPPING]


def _heavy(config: V4Config, options: Any) -> list[int]:
    return [layer for layer, ratio in enumerate(config.compress_ratios) if ratio not in (0, OVERLAPPING)]


def _one(where: Where, name: str, source: str, sizes: str) -> Rule:
    return Rule(where, (Output(name, source, sizes),))


def _in_layer(where: Where, name: str, source: str, sizes: str) -> Rule:
    return _one(where, f"blk.{{layer}}.{name}", f"layers.{{layer}}.{source}", sizes)


def _hyper_connection(part: str) -> tuple[Rule, ...]:
    return (
        _in_layer(_layers, f"hc_{part}_fn.weight", f"hc_{part}_fn", "hc_rows hc_cols"),
        _in_layer(_layers, f"hc_{part}_base.weight", f"hc_{part}_base", "hc_rows"),
        _in_layer(_layers, f"hc_{part}_scale.weight", f"hc_{part}_scale", "hc_scales"),
    )


def _compressor(where: Where, name: str, source: str, ratio: str, cols: str, head: str) -> tuple[Rule, ...]:
    return (
        _in_layer(where, f"{name}_ape.weight", f"{source}.ape", f"{ratio} {cols}"),
        _in_layer(where, f"{name}_kv.weight", f"{source}.wkv.weight", f"{cols} hidden_size"),
        _in_layer(where, f"{name}_gate.weight", f"{source}.wgate.weight", f"{cols} hidden_size"),
        _in_layer(where, f"{name}_norm.weight", f"{source}.norm.weight", head),
    )


RULES: tuple[Rule, ...] = (
    Rule(_hashed, (
        Output("blk.{layer}.ffn_gate_tid2eid.weight", "layers.{layer}.ffn.gate.tid2eid",
               "vocab_size num_experts_per_tok"),
    ), first=True),
    Rule(_layers, (
        Output("blk.{layer}.ffn_gate_exps.weight", f"{_EXPERT}.w1.weight",
               "moe_intermediate_size hidden_size", stacked),
        Output("blk.{layer}.ffn_down_exps.weight", f"{_EXPERT}.w2.weight",
               "hidden_size moe_intermediate_size", stacked),
        Output("blk.{layer}.ffn_up_exps.weight", f"{_EXPERT}.w3.weight",
               "moe_intermediate_size hidden_size", stacked),
    ), first=True),

    _one(_once, "token_embd.weight", "embed.weight", "vocab_size hidden_size"),
    _one(_once, "output_norm.weight", "norm.weight", "hidden_size"),
    _one(_untied, "output.weight", "head.weight", "vocab_size hidden_size"),
    _one(_once, "output_hc_fn.weight", "hc_head_fn", "hc_mult hc_cols"),
    _one(_once, "output_hc_base.weight", "hc_head_base", "hc_mult"),
    _one(_once, "output_hc_scale.weight", "hc_head_scale", "hc_head_scales"),

    *_hyper_connection("attn"),
    *_hyper_connection("ffn"),
    _in_layer(_layers, "attn_norm.weight", "attn_norm.weight", "hidden_size"),
    _in_layer(_layers, "attn_sinks.weight", "attn.attn_sink", "num_attention_heads"),
    _in_layer(_layers, "attn_q_a.weight", "attn.wq_a.weight", "q_lora_rank hidden_size"),
    _in_layer(_layers, "attn_q_a_norm.weight", "attn.q_norm.weight", "q_lora_rank"),
    _in_layer(_layers, "attn_q_b.weight", "attn.wq_b.weight", "q_rows q_lora_rank"),
    _in_layer(_layers, "attn_kv.weight", "attn.wkv.weight", "head_dim hidden_size"),
    _in_layer(_layers, "attn_kv_a_norm.weight", "attn.kv_norm.weight", "head_dim"),
    _in_layer(_layers, "attn_output_a.weight", "attn.wo_a.weight", "o_rows o_cols"),
    _in_layer(_layers, "attn_output_b.weight", "attn.wo_b.weight", "hidden_size o_rows"),
    *_compressor(_light, "attn_compressor", "attn.compressor", "light_ratio", "two_heads", "head_dim"),
    *_compressor(_heavy, "attn_compressor", "attn.compressor", "heavy_ratio", "head_dim", "head_dim"),
    _in_layer(_light, "indexer.attn_q_b.weight", "attn.indexer.wq_b.weight", "index_q_rows q_lora_rank"),
    _in_layer(_light, "indexer.proj.weight", "attn.indexer.weights_proj.weight", "index_n_heads hidden_size"),
    *_compressor(_light, "indexer_compressor", "attn.indexer.compressor", "light_ratio", "two_index_heads",
                 "index_head_dim"),

    _in_layer(_layers, "ffn_norm.weight", "ffn_norm.weight", "hidden_size"),
    _in_layer(_layers, "ffn_gate_inp.weight", "ffn.gate.weight", "n_routed_experts hidden_size"),
    _in_layer(_scored, "exp_probs_b.bias", "ffn.gate.bias", "n_routed_experts"),
    _in_layer(_layers, "ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight",
              "shared_intermediate_size hidden_size"),
    _in_layer(_layers, "ffn_down_shexp.weight", "ffn.shared_experts.w2.weight",
              "hidden_size shared_intermediate_size"),
    _in_layer(_layers, "ffn_up_shexp.weight", "ffn.shared_experts.w3.weight",
              "shared_intermediate_size hidden_size"),
)  # fmt: skip


def drops(config: V4Config, options: Any) -> tuple[Drop, ...]:
    """Return the weights that this model's checkpoint may hold and the file does not need."""
    mtp = Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer, which llama.cpp has not")
    return (mtp,)


def _forced_type(tensor: OutputTensor) -> GGMLType | None:
    """Return the type that a matrix has under every --outtype, None for what the general rules decide."""
    if len(tensor.shape) < 2 or tensor.name.endswith("_norm.weight"):
        return None
    if tensor.stored_as.startswith("F8_"):
        return Q8_0
    return {"BF16": BF16, "F32": F32}.get(tensor.stored_as)


def _notes(config: V4Config, options: NoOptions) -> tuple[str, ...]:
    return ("--outtype counts for nothing: FP8 becomes Q8_0, all else keeps the type of the checkpoint",)


ARCHITECTURE = Architecture(
    hf_names=(NAME,),
    gguf_name="deepseek4",
    read_config=V4Config.from_dict,
    n_experts=lambda config: config.n_routed_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=_notes,
    canonical_name=lambda name: name.removeprefix("model."),
    kept=frozenset({MXFP4, I32}),
    forced_type=_forced_type,
)
