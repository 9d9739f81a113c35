"""Gemma 4: layers with a window and full ones have heads of different sizes, and values are normed.

A full layer rotates the first columns of its heads alone. Its values may be its keys, before their norm. In
the small models, each layer adds an embedding of its own, and the last ones attend to keys of another layer.
In the 26B, routed experts stand beside the dense block.

Facts of transformers' modeling_gemma4.py and llama.cpp's converter (Gemma4Model).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_EXPERTS, ConfigReader, merged, shown
from convert.architectures.decoder.config import (
    FULL,
    SLIDING,
    decoder_fields,
    layers_of_kind,
    stated_rotations,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder
from convert.architectures.decoder.metadata import (
    CONTEXT,
    EMBEDDING,
    EXPERT_WIDTH,
    EXPERTS,
    HEADS,
    SLIDING_PATTERN,
    SLIDING_THETA,
    SLIDING_WINDOW,
    USED_EXPERTS,
    read_decoder,
    read_theta,
    sliding_layers,
)
from convert.architectures.decoder.rules import (
    dense_blocks,
    ends,
    in_layer,
    layers,
    layers_if,
    once,
    stack_of,
)
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.gemma.small import (
    EMBEDDING_PER_LAYER,
    SHARED_LAYERS,
    SmallGemmaConfig,
    layer_embeddings,
    no_keys,
    norms,
    own_keys,
    read_shared_layers,
)
from convert.architectures.rules import Computed, Output, Rule, Where
from convert.checkpoint.checkpoint import read_json_object_if_there
from convert.tokenizer.files import Quirks
from convert.weights.base import Weight
from gguf_tools.errors import BadConfig, FormatError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_UNIFIED = "Gemma4UnifiedForConditionalGeneration"
_UNROTATED = 1e30
"""Divisor of the frequencies of columns that llama.cpp shall not rotate."""


@dataclass(frozen=True)
class Gemma4Config(SmallGemmaConfig):
    """Configuration of a model; names as in config.json. Heads and keys of DecoderConfig are those of layers
    with a window.

    global_head_dim     columns of a head of full layers
    global_kv_heads     heads of keys of full layers
    states_global_kv    whether config.json says so
    rotated_share       share of their columns that are rotated
    attention_k_eq_v    whether the values of full layers are their keys
    use_double_wide_mlp whether these have blocks of twice the width
    suppress_tokens     that are never generated; None where nothing says so
    """

    global_head_dim: int = 512
    global_kv_heads: int = 4
    states_global_kv: bool = False
    rotated_share: float = 0.25
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    suppress_tokens: tuple[int, ...] | None = None

    @property
    def global_q_rows(self) -> int:
        """Rows of q_proj of full layers."""
        return self.num_attention_heads * self.global_head_dim

    @property
    def global_kv_rows(self) -> int:
        """Rows of k_proj and v_proj of full layers."""
        return self.global_kv_heads * self.global_head_dim

    @property
    def double_intermediate_size(self) -> int:
        """Width of the blocks of layers that have no keys of their own."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp else 1)


def read_config(raw: Mapping[str, Any], path: str | Path) -> Gemma4Config:
    """Return the configuration of a Gemma 4."""
    full, local = stated_rotations(raw, path)
    theta = full.get("rope_theta", 1e6)
    stated = ConfigReader(raw, path)
    stated.fixed("rope_theta", theta, f"as in rope_parameters.{FULL}")
    rotation = {"rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    read = with_defaults(merged(raw, rotation), path, states_sizes=False)
    read.fixed("attention_bias", False, "llama.cpp's gemma4 has none")
    read.fixed("use_bidirectional_attention", "vision", "llama.cpp's gemma4 reads text from left to right")
    read.fixed("hidden_activation", "gelu_pytorch_tanh", "llama.cpp has no other for this architecture")
    fields = decoder_fields(read)
    n_layers = fields["num_hidden_layers"]
    in_full = ConfigReader(full, path, f"rope_parameters.{FULL}.")
    in_full.fixed("rope_type", "proportional", "llama.cpp has no other for full layers")
    in_local = ConfigReader(local, path, f"rope_parameters.{SLIDING}.")
    in_local.fixed("rope_type", "default", "llama.cpp doesn't stretch the rotation of these layers")
    windows = layers_of_kind(read, n_layers, lambda layer: (layer + 1) % 6 > 0)
    windows = tuple(layer for layer in windows if layer + 1 < n_layers)  # the last layer is a full one
    full_layers = [layer for layer in range(n_layers) if layer not in windows]
    n_shared = read_shared_layers(read, windows, n_layers, "gemma4")
    global_dim, global_kv, states_kv = _global_sizes(stated, fields["num_key_value_heads"], full_layers)
    layer_cols = read.size("hidden_size_per_layer_input", 0, least=0)
    if layer_cols:
        read.fixed("vocab_size_per_layer_input", fields["vocab_size"], "llama.cpp has vocab_size rows")
    share = in_full.number("partial_rotary_factor", 0.25)
    if global_dim % 2 or not 0 < share <= 1 or fields["num_attention_heads"] % global_kv:
        raise read.bad("global_head_dim", "an even number, whose heads share keys, and a part is rotated")
    return Gemma4Config(
        **{**fields, "rotated_cols": global_dim, "stated_head_dim": global_dim},
        qk_norm=True,
        sliding_window=read.size("sliding_window"),
        sliding_layers=windows,
        sliding_theta=in_local.number("rope_theta", 10000.0),
        attention_scale=1.0,
        **_expert_fields(read),
        global_head_dim=global_dim,
        global_kv_heads=global_kv,
        states_global_kv=states_kv,
        rotated_share=share,
        attention_k_eq_v=read.flag("attention_k_eq_v", False),
        num_kv_shared_layers=n_shared,
        use_double_wide_mlp=read.flag("use_double_wide_mlp", False),
        hidden_size_per_layer_input=layer_cols,
        final_logit_softcapping=read.number_or_null("final_logit_softcapping"),
        suppress_tokens=_suppressed(read, path),
    )


def _suppressed(read: ConfigReader, path: str | Path) -> tuple[int, ...] | None:
    """Return the tokens that are never generated, of which llama.cpp's converter asks for the 12B alone."""
    if read.raw["architectures"][0] != _UNIFIED:
        return None
    stated = read_json_object_if_there(Path(path).with_name("generation_config.json")).get("suppress_tokens")
    if stated is None:
        return None
    if not isinstance(stated, list) or not all(type(token) is int and 0 <= token < 2**31 for token in stated):
        raise BadConfig(f"{path}: generation_config.json: suppress_tokens are {shown(stated)}, expected ids")
    return tuple(stated)


def _global_sizes(read: ConfigReader, kv_heads: int, full_layers: Collection[int]) -> tuple[int, int, bool]:
    """Return columns and number of the heads of full layers' keys, and whether config.json says the latter.

    transformers 5 has both in per_layer_config, by layer, and reads nothing else where that is there.
    """
    sizes = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    by_layer = read.raw.get("per_layer_config")
    if "per_layer_config" not in read.raw:
        heads = read.size_or_null(sizes["num_key_value_heads"], None)
        used = heads if heads is not None and read.flag("attention_k_eq_v", False) else kv_heads
        return read.size(sizes["head_dim"], 512), used, heads is not None
    each = next(iter(by_layer.values()), None) if isinstance(by_layer, dict) else None
    if not isinstance(each, dict) or by_layer != dict.fromkeys(map(str, full_layers), each):
        raise read.bad("per_layer_config", f"the same object for each full layer ({[*full_layers]!s:.60})")
    if "head_dim" not in each or not {*each} <= {*sizes}:
        raise read.bad("per_layer_config", "head_dim and perhaps num_key_value_heads of each full layer")
    inside = ConfigReader(each, read.path, prefix="per_layer_config.*.")
    for key, other in sizes.items():
        if key in each:
            read.fixed(other, each[key], "as in per_layer_config")
    has_heads = "num_key_value_heads" in each
    return inside.size("head_dim"), inside.size("num_key_value_heads", kv_heads), has_heads


def _expert_fields(read: ConfigReader) -> dict[str, Any]:
    if not read.flag("enable_moe_block", False):
        return {}
    n_experts = read.size("num_experts", most=MAX_EXPERTS)
    return {
        "num_experts": n_experts,
        "num_experts_per_tok": read.size("top_k_experts", most=n_experts),
        "moe_intermediate_size": read.size("moe_intermediate_size"),
    }


def _kind(sliding: bool, where: Where = layers) -> Where:
    """Return the layers of `where` that have a window, or that have none."""
    return lambda c, o: [layer for layer in where(c, o) if (layer in c.sliding_layers) == sliding]


def _own_values(config: Gemma4Config, options: Any) -> Iterable[object]:
    """Return the full layers whose values are not their keys."""
    return () if config.attention_k_eq_v else _kind(False, own_keys)(config, options)


def _attention() -> tuple[Rule, ...]:
    rules = [in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size")]
    for sliding, q, kv, dim in (
        (True, "q_rows", "kv_rows", "head_dim"),
        (False, "global_q_rows", "global_kv_rows", "global_head_dim"),
    ):  # fmt: skip
        every, own = _kind(sliding), _kind(sliding, own_keys)
        key = in_layer(own, "attn_k.weight", "self_attn.k_proj.weight", f"{kv} hidden_size")
        value = in_layer(own if sliding else _own_values, "attn_v.weight", "self_attn.v_proj.weight",
                         f"{kv} hidden_size")  # fmt: skip
        norm = in_layer(own, "attn_k_norm.weight", "self_attn.k_norm.weight", dim)
        rules += [
            in_layer(every, "attn_q.weight", "self_attn.q_proj.weight", f"{q} hidden_size"),
            key, value, norm,
            # Checkpoints may have what these layers do without.
            *(replace(rule, where=_kind(sliding, no_keys), optional=True) for rule in (key, value, norm)),
            in_layer(every, "attn_output.weight", "self_attn.o_proj.weight", f"hidden_size {q}"),
            in_layer(every, "attn_q_norm.weight", "self_attn.q_norm.weight", dim),
        ]  # fmt: skip
    return tuple(rules)


def _blocks() -> tuple[Rule, ...]:
    """Return the rules of the dense blocks, which all layers have."""
    narrow = (replace(rule, where=own_keys) for rule in dense_blocks())
    wide = (
        replace(rule, where=no_keys, outputs=tuple(
            replace(output, sizes=str(output.sizes).replace("intermediate_size", "double_intermediate_size"))
            for output in rule.outputs
        ))
        for rule in dense_blocks()
    )  # fmt: skip
    return *narrow, *wide


_STACK = "model.layers.{layer}.experts."


def _experts() -> tuple[Rule, ...]:
    with_experts = layers_if("num_experts")
    return (
        in_layer(with_experts, "ffn_gate_inp.weight", "router.proj.weight", "num_experts hidden_size"),
        in_layer(with_experts, "ffn_gate_inp.scale", "router.scale", "hidden_size"),
        in_layer(with_experts, "ffn_down_exps.scale", "router.per_expert_scale", "num_experts"),
        replace(
            in_layer(with_experts, "ffn_gate_up_exps.weight", "experts.gate_up_proj",
                     "num_experts gate_up_rows hidden_size"),
            unless=(f"{_STACK}gate_proj",),
        ),
        *(stack_of(part, with_experts, _STACK, f"{_STACK}gate_proj") for part in ("gate", "up")),
        in_layer(with_experts, "ffn_down_exps.weight", "experts.down_proj",
                 "num_experts hidden_size moe_intermediate_size"),
        *norms({
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        }, with_experts),
    )  # fmt: skip


def _rope_freqs(name: str, weights: Sequence[Weight], config: Gemma4Config) -> Computed:
    """Return the divisors of the frequencies of full layers, (global_head_dim / 2,)."""
    n_pairs = config.global_head_dim // 2
    n_rotated = int(config.global_head_dim * config.rotated_share / 2)
    return Computed(name, np.where(np.arange(n_pairs) < n_rotated, 1, _UNROTATED).astype(np.float32))


_u32, _f32 = Value.u32, Value.f32

_METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, _u32, lambda c, o: c.num_hidden_layers),
    CONTEXT,
    EMBEDDING,
    Key(keys.FEED_FORWARD_LENGTH, lambda value: _per_layer(value), lambda c, o: [
        c.intermediate_size if layer < c.n_own_keys else c.double_intermediate_size
        for layer in range(c.num_hidden_layers)
    ] if c.use_double_wide_mlp else c.intermediate_size),
    HEADS,
    Key(keys.HEAD_COUNT_KV, lambda value: _per_layer(value), lambda c, o: [
        c.num_key_value_heads if layer in c.sliding_layers else c.global_kv_heads
        for layer in range(c.num_hidden_layers)
    ] if c.states_global_kv else c.num_key_value_heads),
    Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
    SLIDING_THETA,
    Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
    EXPERTS,
    USED_EXPERTS,
    Key(keys.KEY_LENGTH, _u32, lambda c, o: c.global_head_dim),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: c.global_head_dim),
    Key(keys.FINAL_LOGIT_SOFTCAPPING, _f32, lambda c, o: c.final_logit_softcapping or 0.0),
    SLIDING_WINDOW,
    SHARED_LAYERS,
    EMBEDDING_PER_LAYER,
    SLIDING_PATTERN,
    Key(keys.KEY_LENGTH_SWA, _u32, lambda c, o: c.head_dim),
    Key(keys.VALUE_LENGTH_SWA, _u32, lambda c, o: c.head_dim),
    EXPERT_WIDTH,
    Key(keys.ROPE_DIMENSION_COUNT, _u32, lambda c, o: c.global_head_dim),
    Key(keys.ROPE_DIMENSION_COUNT_SWA, _u32, lambda c, o: c.head_dim),
    Key(keys.TOKENIZER_SUPPRESS, Value.i32s, lambda c, o: c.suppress_tokens),
)  # fmt: skip


def _per_layer(value: int | list[int]) -> Value:
    return Value.i32s(value) if isinstance(value, list) else Value.u32(value)


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> Gemma4Config:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    plain = read_decoder(family, metadata, shapes, path, by_layer=("head_count_kv", "feed_forward_length"))
    hparams = read_hparams(metadata, family.gguf_name, path)
    n_layers, kv_heads = plain.num_hidden_layers, hparams.head_count_kv
    by_layer = (plain.num_key_value_heads,) * n_layers
    if kv_heads:
        by_layer = hparams.by_layer("head_count_kv", n_layers)
    if not isinstance(hparams.sliding_window_pattern, tuple):
        raise FormatError(f"{path}: {hparams.key('sliding_window_pattern')}: expected a flag for each layer")
    sliding = sliding_layers(hparams, n_layers, n_layers)
    full = next((layer for layer in range(n_layers) if layer not in sliding), 0)
    head_dim, n_shared = hparams.size("key_length_swa"), hparams.size("shared_kv_layers", 0)
    width = hparams.size("feed_forward_length")
    rotated = plain.rotated_cols, hparams.size("rope_dimension_count_swa", plain.rotated_cols)
    if rotated != (plain.head_dim, head_dim):
        raise UnsupportedCheckpoint(
            f"{path}: {rotated[0]} columns of heads and {rotated[1]} of those with a window are rotated,"
            f" expected all {plain.head_dim} and {head_dim}: the forward pass has no other for"
            f" {family.gguf_name}"
        )
    fields = vars(plain) | {
        "head_dim": head_dim, "num_key_value_heads": by_layer[sliding[0] if sliding else full],
        "qk_norm": True, "norms_all_heads": False, "sliding_window": hparams.size("sliding_window"),
        "sliding_layers": sliding, "sliding_theta": read_theta(hparams, "rope_freq_base_swa", 10000.0),
        "attention_scale": 1.0, "intermediate_size": width,
    }  # fmt: skip
    return Gemma4Config(
        **fields,
        global_head_dim=plain.head_dim,
        global_kv_heads=by_layer[full],
        states_global_kv=isinstance(kv_heads, tuple),
        attention_k_eq_v=f"blk.{full}.attn_v.weight" not in shapes,
        num_kv_shared_layers=n_shared,
        use_double_wide_mlp=isinstance(hparams.feed_forward_length, tuple),
        hidden_size_per_layer_input=hparams.size("embedding_length_per_layer_input", 0),
    )


_VISIBLE = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
    '<|"|>',
)  # fmt: skip
"""Tokens that llama.cpp's programs print, so that answers can be taken apart."""

_GEMMA4 = decoder(
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    _UNIFIED,
    gguf_name="gemma4",
    read_config=read_config,
    rules=(
        Rule(once, (Output("rope_freqs.weight", "", "", _rope_freqs),)),
        *ends(),
        *_attention(),
        *norms({
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }),
        in_layer(layers, "layer_output_scale.weight", "layer_scalar", "one"),
        *_blocks(),
        *_experts(),
        *layer_embeddings(),
    ),
    metadata=_METADATA,
    drops=vision_drops,
    says=frozenset({WINDOWS}),
    quirks=Quirks(merged_pieces=_VISIBLE),
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_GEMMA4,)
