"""Nemotron-H and Nemotron 3: each layer is one thing, a Mamba 2, attention, a dense block or experts.

Blocks and experts have no gate: they square what is positive of up's product. Attention rotates nothing; its
rows are paired all the same, as llama.cpp's converter does. The experts of Nemotron 3 Super and Ultra work in
fewer columns than hidden states have. An MTP layer is stored as two, attention and experts, and becomes one.

Facts of transformers' modeling_nemotron_h.py and llama.cpp's converter (NemotronHModel).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    refuse_one_kind,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    GATING,
    ROTATED_COLS,
    SHARED_EXPERTS,
    VOCAB_SIZE,
    read_decoder,
)
from convert.architectures.decoder.rope import paired
from convert.architectures.decoder.rules import (
    INV_FREQ,
    check_mtp,
    ends,
    keep_mtp_of,
    layers,
    layers_if,
    mtp_layers,
    n_mtp_layers,
    one,
)
from convert.architectures.delta_net.family import float32_kernels
from convert.architectures.options import MTPOptions
from convert.architectures.recurrent.mamba2 import (
    LONG_CONTEXT,
    MambaConfig,
    mamba_keys,
    mamba_rules,
    read_mamba_sizes,
    refuse_limits,
)
from convert.architectures.rules import Arrange, Drop, Output, Rule, Where, renamed, stacked
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value

MAMBA, ATTENTION, DENSE, EXPERTS = "M", "*", "-", "E"
"""Letters of hybrid_override_pattern."""

_LETTERS: Mapping[str, str] = {
    "mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION,
    "mlp": DENSE, "moe": EXPERTS,
}  # fmt: skip
"""The same by the names that transformers 5 has in layers_block_type."""


_OWN, _MTP_ATTENTION, _MTP_EXPERTS = "backbone.layers.{layer}.", "mtp.layers.0.", "mtp.layers.1."
"""Beginnings of the names of weights in a layer, and in the two that an MTP layer is stored as."""

_MTP_PROJECTION = f"{_MTP_ATTENTION}eh_proj.weight"


@dataclass(frozen=True)
class NemotronConfig(MambaConfig):
    """Configuration of a model; names as in config.json.

    kinds            a letter of hybrid_override_pattern for each layer
    moe_latent_size  columns that experts work in; None: those of the hidden states
    """

    kinds: str = ""
    moe_latent_size: int | None = None

    @property
    def expert_cols(self) -> int:
        """Columns that routed experts multiply."""
        return self.moe_latent_size or self.hidden_size


def read_config(raw: Mapping[str, Any], path: str | Path) -> NemotronConfig:
    """Return the configuration of a Nemotron-H or a Nemotron 3."""
    kinds = _read_kinds(ConfigReader(raw, path))
    eps = ConfigReader(raw, path).number("layer_norm_epsilon", 1e-5)
    read = with_defaults(merged(raw, {"num_hidden_layers": len(kinds)}), path, states_sizes=False)
    why = "llama.cpp's nemotron_h has no other"
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        read.fixed(key, False, why)
    for key, value in (
        ("use_conv_bias", True), ("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"),
        ("norm_eps", eps),
    ):  # fmt: skip
        read.fixed(key, value, why)
    refuse_limits(read)
    counts = {"Mamba 2": kinds.count(MAMBA), "attention": kinds.count(ATTENTION)}
    refuse_one_kind(read, _key_of_kinds(read), counts)
    n_heads, n_groups = read.size("mamba_num_heads", 128), read.size("n_groups", 8)
    if n_heads % n_groups:
        raise read.bad("n_groups", f"a divisor of mamba_num_heads ({n_heads})")
    plain = decoder_fields(read, eps="layer_norm_epsilon")
    plain["rotated_cols"] = plain["hidden_size"] // plain["num_attention_heads"]
    return NemotronConfig(
        **plain,
        **(_experts(read) if EXPERTS in kinds else {}),
        kinds=kinds,
        unrotated_layers=tuple(range(len(kinds))),
        mamba_layers=_layers_of(kinds, MAMBA),
        mamba_n_heads=n_heads,
        mamba_n_groups=n_groups,
        mamba_d_head=read.size("mamba_head_dim", 64),
        mamba_d_state=read.size("ssm_state_size", 128),
        mamba_d_conv=read.size("conv_kernel", 4),
    )


def _key_of_kinds(read: ConfigReader) -> str:
    """Return the key of config.json that has the kinds of layers."""
    pattern = read.raw.get("hybrid_override_pattern")
    return "layers_block_type" if pattern is None else "hybrid_override_pattern"


def _read_kinds(read: ConfigReader) -> str:
    """Return a letter for each layer."""
    key = _key_of_kinds(read)
    stated = read.raw.get(key)
    letters = [_LETTERS.get(str(kind)) for kind in stated] if isinstance(stated, list) else stated
    known = {*_LETTERS.values()}
    if not isinstance(letters, str | list) or not letters or not {*letters} <= known:
        raise read.bad(key, f"a letter of {''.join(sorted(known))} for each layer")
    kinds = "".join(str(letter) for letter in letters)
    if len(kinds) > MAX_LAYERS:
        raise read.bad(key, f"{MAX_LAYERS} layers at most")
    if {DENSE, EXPERTS} <= {*kinds}:
        raise UnsupportedCheckpoint(
            f"{read.path}: {key} has dense blocks and experts: llama.cpp's files have one or the other"
        )
    return kinds


def _experts(read: ConfigReader) -> dict[str, Any]:
    n_mtp = read.size("num_nextn_predict_layers", 0, least=0, most=1)
    if n_mtp:
        expected = f"{ATTENTION}{EXPERTS}"
        read.fixed("mtp_hybrid_override_pattern", expected, "llama.cpp's MTP layer is made of these two")
    return {
        **expert_fields(read),
        "moe_intermediate_size": read.size("moe_intermediate_size", 7688),
        "num_shared_experts": read.size("n_shared_experts", 1),
        "shared_expert_intermediate_size": read.size("moe_shared_expert_intermediate_size", 7688),
        "moe_latent_size": read.size_or_null("moe_latent_size", None),
        "n_group": read.size("n_group", 1),
        "scoring_func": "sigmoid",
        "topk_group": read.size("topk_group", 1),
        "norm_topk_prob": read.flag("norm_topk_prob", True),
        "routed_scaling_factor": read.number("routed_scaling_factor", 1.0),
        "num_nextn_predict_layers": n_mtp,
    }


def _layers_of(kinds: str, kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, letter in enumerate(kinds) if letter == kind)


def _of_kind(kind: str) -> Where:
    return lambda config, options: _layers_of(config.kinds, kind)


def _own(config: NemotronConfig, options: Any) -> Iterable[int | None]:
    return range(config.num_hidden_layers)


def _in(
    where: Where, prefix: str, *parts: tuple[str, str, str], arrange: Arrange = renamed
) -> tuple[Rule, ...]:
    """Return a rule for each part: its name in the layer, its name in the checkpoint, and its sizes."""
    return tuple(
        one(where, f"blk.{{layer}}.{name}.weight", f"{prefix}{source}.weight", sizes, arrange)
        for name, source, sizes in parts
    )


def _attention(where: Where, prefix: str) -> tuple[Rule, ...]:
    mixer = f"{prefix}mixer."
    queries, keys_ = ("attn_q", "q_proj", "q_rows hidden_size"), ("attn_k", "k_proj", "kv_rows hidden_size")
    values = ("attn_v", "v_proj", "kv_rows hidden_size")
    output = ("attn_output", "o_proj", "hidden_size q_rows")
    return *_in(where, mixer, queries, keys_, arrange=paired), *_in(where, mixer, values, output)


def _experts_of(where: Where, prefix: str) -> tuple[Rule, ...]:
    mixer = f"{prefix}mixer."
    of_expert, in_stacks = f"{mixer}experts.{{expert}}.", f"{mixer}experts.up_proj"
    stacks = (
        ("down", "expert_cols moe_intermediate_size"),
        ("up", "moe_intermediate_size expert_cols"),
    )
    return (
        *_in(
            where,
            mixer,
            ("ffn_gate_inp", "gate", "num_experts hidden_size"),
            ("ffn_down_shexp", "shared_experts.down_proj", "hidden_size shared_intermediate_size"),
            ("ffn_up_shexp", "shared_experts.up_proj", "shared_intermediate_size hidden_size"),
        ),
        one(where, "blk.{layer}.exp_probs_b.bias", f"{mixer}gate.e_score_correction_bias", "num_experts"),
        *_in(
            layers_if("moe_latent_size", where),
            mixer,
            ("ffn_latent_down", "fc1_latent_proj", "moe_latent_size hidden_size"),
            ("ffn_latent_up", "fc2_latent_proj", "hidden_size moe_latent_size"),
        ),
        Rule(where, tuple(
            Output(f"blk.{{layer}}.ffn_{part}_exps.weight", f"{of_expert}{part}_proj.weight", sizes, stacked)
            for part, sizes in stacks
        ), unless=(in_stacks,)),
        *(
            Rule(where, (
                Output(f"blk.{{layer}}.ffn_{part}_exps.weight", f"{mixer}experts.{part}_proj",
                       f"num_experts {sizes}"),
            ), when=(in_stacks,))
            for part, sizes in stacks
        ),
    )  # fmt: skip


def _mtp() -> tuple[Rule, ...]:
    norm = "hidden_size"
    return (
        *_in(
            mtp_layers,
            _MTP_ATTENTION,
            ("nextn.eh_proj", "eh_proj", "hidden_size concat_size"),
            ("nextn.enorm", "enorm", norm),
            ("nextn.hnorm", "hnorm", norm),
            ("attn_norm", "norm", norm),
        ),
        *_attention(mtp_layers, _MTP_ATTENTION),
        *_in(
            mtp_layers,
            _MTP_EXPERTS,
            ("nextn.shared_head_norm", "final_layernorm", norm),
            ("post_attention_norm", "norm", norm),
        ),
        *_experts_of(mtp_layers, _MTP_EXPERTS),
    )


_RENAMED_ENDS = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
}


def _renamed(rule: Rule) -> Rule:
    outputs = (replace(each, source=_RENAMED_ENDS.get(each.source, each.source)) for each in rule.outputs)
    return replace(rule, outputs=tuple(outputs))


def _published_name(name: str) -> str:
    """Return the name as published checkpoints have it, for one that transformers 5 has in memory."""
    return f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _drops(config: NemotronConfig, options: MTPOptions) -> tuple[Drop, ...]:
    mtp = Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer; kept without --no-mtp")
    return INV_FREQ, *(() if n_mtp_layers(config, options) else (mtp,))


def _by_layer(name: str, kinds: str, value: Any) -> Key:
    """Return a key with a number for each layer: 0 for those that are none of `kinds`, and have no MTP."""
    return Key(
        name,
        Value.i32s,
        lambda c, o: [
            value(c) if layer >= len(c.kinds) or c.kinds[layer] in kinds else 0 for layer in layers(c, o)
        ],
    )


_CHANGED: Mapping[str, Key] = {
    key.name: key
    for key in (
        Key(keys.CONTEXT_LENGTH, Value.u32, lambda c, o: LONG_CONTEXT),
        _by_layer(keys.FEED_FORWARD_LENGTH, DENSE + EXPERTS,
                  lambda c: c.moe_intermediate_size if c.num_experts else c.intermediate_size),
        _by_layer(keys.HEAD_COUNT_KV, ATTENTION, lambda c: c.num_key_value_heads),
    )
}  # fmt: skip
_HEAD_SIZES = (keys.KEY_LENGTH, keys.VALUE_LENGTH)
_AT_EPS = next(at for at, key in enumerate(COMMON) if key.name == keys.LAYERNORM_RMS_EPS) + 1


def _if_experts(key: Key) -> Key:
    return replace(key, value=lambda c, o: key.value(c, o) if c.num_experts else None)


_METADATA: tuple[Key, ...] = (
    *(_CHANGED.get(key.name, key) for key in COMMON[:_AT_EPS]),
    Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.rms_norm_eps),
    *(key for key in COMMON[_AT_EPS:] if key.name not in _HEAD_SIZES and key is not GATING),
    VOCAB_SIZE,
    ROTATED_COLS,
    *mamba_keys(lambda c: True),
    Key(keys.ROPE_SCALING_FINETUNED, Value.bool_, lambda c, o: False),
    *(key for key in COMMON if key.name in _HEAD_SIZES),
    EXPERT_WIDTH,
    Key(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, Value.u32,
        lambda c, o: c.shared_expert_intermediate_size or None),
    SHARED_EXPERTS,
    *map(_if_experts, (EXPERT_NORM, EXPERT_SCALE)),
    Key(keys.MOE_LATENT_SIZE, Value.u32, lambda c, o: c.moe_latent_size),
    Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, lambda c, o: n_mtp_layers(c, o) or None),
)  # fmt: skip


def _kinds_of_file(plain: DecoderConfig, hparams: HParams) -> str:
    n_all = plain.num_hidden_layers + (plain.num_nextn_predict_layers or 0)
    heads_of, width_of = (hparams.by_layer(name, n_all) for name in _BY_LAYER)
    block = EXPERTS if plain.num_experts else DENSE
    sizes_of_layers = zip(heads_of, width_of, strict=True)
    kinds = (block if width else ATTENTION if heads else MAMBA for heads, width in sizes_of_layers)
    return "".join(kinds)[: plain.num_hidden_layers]


_BY_LAYER = ("head_count_kv", "feed_forward_length")
"""Sizes that are 0 in layers of another kind."""


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> NemotronConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`.

    raises  FormatError for sizes by layer that don't fit the number of layers
    """
    plain = read_decoder(family, metadata, shapes, path, by_layer=_BY_LAYER)
    hparams = read_hparams(metadata, family.gguf_name, path)
    kinds = _kinds_of_file(plain, hparams)
    known = dict(vars(plain))
    return NemotronConfig(
        **{**known, "unrotated_layers": tuple(range(len(kinds))), "scoring_func": "sigmoid",
           "rms_norm_eps": eps if (eps := hparams.layer_norm_rms_epsilon) is not None
           else hparams.number("layer_norm_epsilon", 1e-5)},
        **read_mamba_sizes(hparams),
        kinds=kinds,
        mamba_layers=_layers_of(kinds, MAMBA),
        moe_latent_size=hparams.size("moe_latent_size", 0) or None,
    )  # fmt: skip


_WITH_EXPERTS = decoder(
    "NemotronHForCausalLM",
    gguf_name="nemotron_h_moe",
    read_config=read_config,
    rules=(
        *map(_renamed, ends()),
        *_in(_own, _OWN, ("attn_norm", "norm", "hidden_size")),
        *mamba_rules(f"{_OWN}mixer."),
        *_attention(_of_kind(ATTENTION), _OWN),
        *_in(
            _of_kind(DENSE),
            f"{_OWN}mixer.",
            ("ffn_down", "down_proj", "hidden_size intermediate_size"),
            ("ffn_up", "up_proj", "intermediate_size hidden_size"),
        ),
        *_experts_of(_of_kind(EXPERTS), _OWN),
        *_mtp(),
    ),
    metadata=_METADATA,
    options=MTPOptions,
    check=check_mtp,
    resolve_options=partial(keep_mtp_of, _MTP_PROJECTION),
    drops=_drops,
    canonical_name=_published_name,
    forced_type=float32_kernels,
    reader=_read_file,
    says_norm=True,
)
_DENSE = replace(_WITH_EXPERTS, gguf_name="nemotron_h")
FAMILIES = (_WITH_EXPERTS, _DENSE)


def choose(config: Mapping[str, Any]) -> Architecture:
    """Return the family under the name that llama.cpp has for a model with this config.json."""
    kinds = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    has_experts = isinstance(kinds, str | list) and (EXPERTS in kinds or "moe" in kinds)
    return _WITH_EXPERTS if has_experts else _DENSE
