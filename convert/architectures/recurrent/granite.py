"""Granite 3 and 4: a Llama with factors of embeddings, scores, outputs and logits; experts, and Mamba 2.

Granite 4's class (granitemoehybrid) has layers of a Mamba 2 in place of attention, or has none, and is then a
`granite` or `granitemoe` to llama.cpp. In a model with Mamba 2, nothing is rotated.

Facts of transformers' modeling_granitemoehybrid.py and llama.cpp's converter (GraniteModel and its heirs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import (
    decoder_fields,
    expert_fields,
    fix_head_dim,
    refuse_one_kind,
    with_defaults,
)
from convert.architectures.decoder.family import LLAMA3, decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERTS,
    ROTATED_COLS,
    USED_EXPERTS,
    VOCAB_SIZE,
    changed,
    read_decoder,
)
from convert.architectures.decoder.rope import LLAMA3_ROTATION, paired
from convert.architectures.decoder.rules import (
    attention,
    dense_blocks,
    ends,
    gate_rows,
    in_layer,
    layers,
    layers_if,
    moe_layers,
    norm_of_blocks,
    stack_of,
    up_rows,
)
from convert.architectures.delta_net.family import float32_kernels
from convert.architectures.recurrent.mamba2 import (
    LONG_CONTEXT,
    MambaConfig,
    mamba_keys,
    mamba_rules,
    read_mamba_sizes,
    refuse_limits,
)
from convert.architectures.rules import Output, Rule, Where
from convert.tokenizer.files import LLAMA as LLAMA_QUIRKS
from convert.tokenizer.files import NO_QUIRKS
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

HYBRID = "GraniteMoeHybridForCausalLM"


@dataclass(frozen=True)
class GraniteConfig(MambaConfig):
    """Configuration of a model; names as in config.json.

    is_hybrid  whether it is of Granite 4's class, with Mamba 2 or without
    """

    is_hybrid: bool = False

    @property
    def shared_rows(self) -> int:
        """Rows of the shared block's gate and up, stored as one."""
        return 2 * self.shared_expert_intermediate_size


def read_config(raw: Mapping[str, Any], path: str | Path) -> GraniteConfig:
    """Return the configuration of a Granite."""
    read = with_defaults(raw, path)
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        read.fixed(key, False, "llama.cpp's converter has no place for such biases")
    config = decoder_fields(read)
    fix_head_dim(read, config, "granite")
    config |= {"rotated_cols": config["head_dim"], "stated_head_dim": None}
    factors: dict[str, Any] = {
        name: read.number(key, 1.0)
        for name, key in (
            ("embedding_scale", "embedding_multiplier"), ("residual_scale", "residual_multiplier"),
            ("attention_scale", "attention_multiplier"), ("logit_scale", "logits_scaling"),
        )
    }  # fmt: skip
    if not read.raw.get("num_local_experts"):
        read.overruled("num_experts_per_tok")
    else:
        width = config["intermediate_size"]
        config |= {**expert_fields(read), "moe_intermediate_size": width, "scoring_func": None}
    shared = read.size("shared_intermediate_size", 0, least=0)
    made = GraniteConfig(**config, **factors, shared_expert_intermediate_size=shared)
    return _with_mamba(made, read) if raw["architectures"][0] == HYBRID else made


def _with_mamba(config: GraniteConfig, read: ConfigReader) -> GraniteConfig:
    width = read.size("shared_intermediate_size")
    config = replace(config, is_hybrid=True)
    if not config.num_experts:  # the shared block is the only one
        config = replace(config, intermediate_size=width)
    n_layers = config.num_hidden_layers
    names = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
    kinds = _stated_kinds(read.raw) or ["mamba"] * n_layers
    if not isinstance(kinds, list) or len(kinds) != n_layers or not {*map(str, kinds)} <= {*names}:
        raise read.bad("layer_types", f"'mamba' or 'attention' for each of the {n_layers} layers")
    expand, n_heads = read.size("mamba_expand", 2), read.size("mamba_n_heads", 128)
    inner = expand * config.hidden_size
    stated = read.raw.get("mamba_d_head", "auto")
    if inner % n_heads or stated not in ("auto", inner // n_heads):
        raise read.bad("mamba_d_head", f"'auto' or {inner // n_heads}")
    mamba = tuple(layer for layer, kind in enumerate(kinds) if names[kind])
    if mamba:
        read.fixed("mamba_expand", 2, "llama.cpp's granitehybrid has no other")
        read.fixed("mamba_conv_bias", True, "llama.cpp's granitehybrid has it")
        refuse_limits(read)
        refuse_one_kind(read, "layer_types", {"Mamba 2": len(mamba), "attention": n_layers - len(mamba)})
    if (read.raw.get("position_embedding_type") == "rope") != (not mamba):
        expected = "no 'rope' beside Mamba 2" if mamba else "'rope' without Mamba 2"
        raise read.bad("position_embedding_type", f"{expected} in layer_types: llama.cpp has no other")
    return replace(
        config,
        mamba_layers=mamba,
        unrotated_layers=tuple(range(n_layers)) if mamba else (),
        mamba_n_heads=n_heads,
        mamba_n_groups=read.size("mamba_n_groups", 1),
        mamba_d_head=inner // n_heads,
        mamba_d_state=read.size("mamba_d_state", 256),
        mamba_d_conv=read.size("mamba_d_conv", 4),
    )


def _stated_kinds(raw: Mapping[str, Any]) -> Any:
    """Return the kinds of layers, which config.json may have under two names."""
    return raw.get("layer_types") or raw.get("layers_block_type")


def _attending(config: GraniteConfig, options: Any) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if layer not in config.mamba_layers]


def _plain(config: GraniteConfig, options: Any) -> Iterable[int | None]:
    """Return the layers with a dense block under its usual names."""
    return () if config.num_experts or config.is_hybrid else layers(config, options)


def _dense_shared(config: GraniteConfig, options: Any) -> Iterable[int | None]:
    """Return the layers whose only block is called shared."""
    return layers(config, options) if config.is_hybrid and not config.num_experts else ()


_shared = layers_if("shared_expert_intermediate_size", moe_layers)


def _two(where: Where, kind: str, source: str, rows: str) -> Rule:
    """Return the rule of one matrix, or stack, that has the rows of gate and of up."""
    name = f"model.layers.{{layer}}.{source}.weight"
    return Rule(where, (
        Output(f"blk.{{layer}}.ffn_gate{kind}.weight", name, rows, gate_rows),
        Output(f"blk.{{layer}}.ffn_up{kind}.weight", name, rows, up_rows),
    ))  # fmt: skip


_STACK = "model.layers.{layer}.block_sparse_moe.experts."
_APART = "model.layers.{layer}.mlp.gate_proj.weight"
"""A weight of MLX, which stores the gate and up of a block called shared apart where there is no other."""

_IN_TRANSFORMERS_5 = {
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}


def _published_name(name: str) -> str:
    """Return the name as published checkpoints have it, for one that transformers 5 has in memory."""
    for ending, published in _IN_TRANSFORMERS_5.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + published
    return name


def _blocks() -> tuple[Rule, ...]:
    down = "hidden_size shared_expert_intermediate_size"
    return (
        norm_of_blocks(),
        *(replace(rule, where=_plain) for rule in dense_blocks()),
        in_layer(moe_layers, "ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight",
                 "num_experts hidden_size"),
        replace(_two(moe_layers, "_exps", "block_sparse_moe.input_linear",
                     "num_experts gate_up_rows hidden_size"), unless=(f"{_STACK}gate_proj",)),
        *(stack_of(part, moe_layers, _STACK, f"{_STACK}gate_proj") for part in ("gate", "up")),
        in_layer(moe_layers, "ffn_down_exps.weight", "block_sparse_moe.output_linear.weight",
                 "num_experts hidden_size moe_intermediate_size"),
        _two(_shared, "_shexp", "shared_mlp.input_linear", "shared_rows hidden_size"),
        in_layer(_shared, "ffn_down_shexp.weight", "shared_mlp.output_linear.weight", down),
        *(
            replace(rule, unless=(_APART,))
            for rule in (
                _two(_dense_shared, "", "shared_mlp.input_linear", "shared_rows hidden_size"),
                in_layer(_dense_shared, "ffn_down.weight", "shared_mlp.output_linear.weight", down),
            )
        ),
        *(replace(rule, where=_dense_shared, when=(_APART,)) for rule in dense_blocks()),
    )  # fmt: skip


_u32, _f32 = Value.u32, Value.f32


def _counts(key: Key) -> Key:
    """Return a key about experts that Granite 4's class writes though there are none."""
    return replace(key, value=lambda c, o: (key.value(c, o) or 0) if c.is_hybrid else key.value(c, o))


_METADATA: tuple[Key, ...] = (
    *changed(
        COMMON,
        Key(keys.CONTEXT_LENGTH, _u32,
            lambda c, o: LONG_CONTEXT if c.mamba_layers else c.max_position_embeddings),
        Key(
            keys.HEAD_COUNT_KV,
            lambda value: Value.i32s(value) if isinstance(value, list) else _u32(value),
            lambda c, o: [
                0 if layer in c.mamba_layers else c.num_key_value_heads
                for layer in range(c.num_hidden_layers)
            ] if c.is_hybrid else c.num_key_value_heads,
        ),
        _counts(EXPERTS),
        _counts(USED_EXPERTS),
    ),
    VOCAB_SIZE,
    ROTATED_COLS,
    Key(keys.ATTENTION_SCALE, _f32, lambda c, o: c.attention_scale),
    Key(keys.EMBEDDING_SCALE, _f32, lambda c, o: c.embedding_scale),
    Key(keys.RESIDUAL_SCALE, _f32, lambda c, o: c.residual_scale),
    Key(keys.LOGIT_SCALE, _f32, lambda c, o: c.logit_scale),
    Key(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.shared_expert_intermediate_size or None),
    *mamba_keys(lambda c: c.is_hybrid),
    Key(keys.ROPE_SCALING_FINETUNED, Value.bool_, lambda c, o: not c.mamba_layers if c.is_hybrid else None),
)  # fmt: skip


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> GraniteConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    is_hybrid = family.gguf_name == "granitehybrid"
    plain = read_decoder(family, metadata, shapes, path, by_layer=("head_count_kv",) if is_hybrid else ())
    hparams = read_hparams(metadata, family.gguf_name, path)
    known = dict(vars(plain))
    if family.gguf_name != "granitemoe" and hparams.rope_scaling_finetuned is False:
        known["unrotated_layers"] = tuple(range(plain.num_hidden_layers))
    if not is_hybrid:
        if not hparams.logit_scale:
            raise FormatError(f"{path}: {hparams.key('logit_scale')} is 0: logits are divided by it")
        return GraniteConfig(**known)
    kv_heads = hparams.by_layer("head_count_kv", plain.num_hidden_layers)
    return GraniteConfig(
        **known,
        is_hybrid=True,
        mamba_layers=tuple(layer for layer, count in enumerate(kv_heads) if not count),
        **read_mamba_sizes(hparams),
    )


_GRANITE = decoder(
    "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", HYBRID,
    gguf_name="granite",
    read_config=read_config,
    rules=(
        LLAMA3_ROTATION,
        *ends(),
        *attention(paired, where=_attending),
        *mamba_rules("model.layers.{layer}.mamba."),
        *_blocks(),
    ),
    metadata=_METADATA,
    canonical_name=_published_name,
    says=frozenset({LLAMA3}),
    forced_type=float32_kernels,
    quirks=LLAMA_QUIRKS,
    reader=_read_file,
)  # fmt: skip


_MIXTURE = replace(_GRANITE, gguf_name="granitemoe")
_HYBRID = replace(_GRANITE, gguf_name="granitehybrid")
FAMILIES = (_GRANITE, _MIXTURE, _HYBRID)


def choose(config: Mapping[str, Any]) -> Architecture:
    """Return the family under the name that llama.cpp has for a model with this config.json."""
    name = config["architectures"][0]
    if name != HYBRID:
        return _GRANITE if name == "GraniteForCausalLM" else _MIXTURE
    has_mamba = {*map(str, _stated_kinds(config) or ["mamba"])} & {"mamba", "linear_attention"}
    of_attention = _MIXTURE if config.get("num_experts_per_tok", 2) else _GRANITE
    return replace(_HYBRID if has_mamba else of_attention, quirks=NO_QUIRKS)
