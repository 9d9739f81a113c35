"""Step 3.5: windows in most layers, with more heads, and a gate for every head; experts chosen with a bias.

Layers without a window rotate half of a head's columns, stretched as Llama 3's, and those with one all, by a
theta of their own. SiLU(gate) and up may have limits, layer by layer. Norms are stored less one. Layers for
multi-token prediction stand behind the others, and have dense blocks. Step 3.7 is the same beside a vision
part, and transformers has a class of it (modeling_step3p7.py). Other facts are those of llama.cpp's converter
(Step35Model) and of its src/models/step35.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, merged
from convert.architectures.decoder.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    counts_of_kinds,
    decoder_fields,
    layers_of_kind,
    leading_dense_layers,
    read_limits,
    refuse_one_kind,
    rotations_by_kind,
    stated_as,
    stated_rotations,
)
from convert.architectures.decoder.family import LLAMA3, WINDOWS, decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    EXPERTS,
    LIMITS,
    SHARED_WIDTH,
    SLIDING_PATTERN,
    SLIDING_THETA,
    SLIDING_WINDOW,
    USED_EXPERTS,
    changed,
    counts_by_layer,
    dense_by_routers,
    inserted,
    limits_of_file,
    read_decoder,
    read_theta,
    read_window,
    sliding_layers,
)
from convert.architectures.decoder.rope import LLAMA3_ROTATION
from convert.architectures.decoder.rules import (
    attention,
    by_window,
    check_mtp,
    dense_blocks,
    ends,
    in_layer,
    keep_last_mtp,
    layers,
    moe_layers,
    mtp,
    mtp_drops,
    n_mtp_layers,
    norm_of_blocks,
    respelled,
)
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Computed, Rule, plus_one
from convert.weights.base import Weight
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

_WHY = "llama.cpp's step35 has no other"
_ROTATES = "llama.cpp's step35 rotates such shares of columns"
_BESIDE_VISION = "Step3p7ForConditionalGeneration"
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_attention_groups": ("num_key_value_heads",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "moe_num_experts": ("n_routed_experts", "num_local_experts"),
    "moe_top_k": ("num_experts_per_tok",),
    "share_expert_dim": ("share_expert_dims",),
}
"""Field as published -> its names in transformers."""


@dataclass(frozen=True)
class Step35Config(DecoderConfig):
    """Configuration of a model."""

    @property
    def gate_rows(self) -> int:
        """Rows of g_proj: one for each head."""
        return self.num_attention_heads


def read_config(raw: Mapping[str, Any], path: str | Path) -> Step35Config:
    """Return the configuration of a Step 3.5; fields have the published names, or those of transformers."""
    named = {name: raw.get(stated_as(raw, path, name, *others)) for name, others in _OTHER_NAMES.items()}
    raw = merged(raw, {key: value for key, value in named.items() if value is not None})
    read = ConfigReader(raw, path)
    for key, value in (
        ("use_head_wise_attn_gate", True), ("use_moe_router_bias", True), ("zero_centered", True),
        ("use_moe", True), ("moe_router_activation", "sigmoid"), ("moe_every_n_layer", 1),
        ("moe_layer_offset", 0), ("att_impl_type", "GQA"), ("use_rope_layers", []),
        ("yarn_only_types", [FULL]), ("attention_bias", False), ("mlp_bias", False),
    ):  # fmt: skip
        read.fixed(key, value, _WHY)
    read.overruled("max_seq_len", "need_fp32_gate", "use_qk_norm")
    n_layers, n_mtp = (
        read.size("num_hidden_layers", most=MAX_LAYERS),
        read.size("num_nextn_predict_layers", 0, least=0),
    )
    sliding = _sliding(read, n_layers, n_layers + n_mtp)
    in_model = tuple(layer for layer in sliding if layer < n_layers)
    refuse_one_kind(read, "layer_types", {SLIDING: len(in_model), FULL: n_layers - len(in_model)})
    local_theta, rotated = _rotations(read, sliding, n_layers + n_mtp)
    usual = {"rms_norm_eps": read.number("rms_norm_eps", 1e-5),
             "num_key_value_heads": read.size("num_attention_groups")}  # fmt: skip
    fields = decoder_fields(ConfigReader(merged(rotated, usual), path))
    head_dim, rope = fields["head_dim"], fields["rope"]
    if rope.kind not in ("default", "llama3") or fields["stated_head_dim"] is None:
        raise read.bad("rope_scaling", f"'default' or 'llama3', and a head_dim: {_WHY}")
    read.fixed("query_pre_attn_scalar", head_dim, "llama.cpp divides scores by the root of head_dim alone")
    n_experts = read.size("moe_num_experts", most=MAX_EXPERTS)
    return Step35Config(
        **{**fields, "rotated_cols": head_dim // 2},
        **_sliding_heads(read, in_model, fields),
        qk_norm=True,
        sigmoid_gates=True,
        sliding_window=read.size("sliding_window"),
        sliding_layers=sliding,
        sliding_theta=local_theta,
        sliding_cols=head_dim,
        num_experts=n_experts,
        num_experts_per_tok=read.size("moe_top_k", most=n_experts),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        shared_expert_intermediate_size=read.size("share_expert_dim"),
        first_k_dense_replace=_leading_dense(read, n_layers, n_mtp),
        scoring_func="sigmoid",
        norm_topk_prob=read.flag("norm_expert_weight", raw["architectures"][0] == _BESIDE_VISION),
        routed_scaling_factor=read.number("moe_router_scaling_factor", 1.0),
        num_nextn_predict_layers=n_mtp,
        dense_mtp=True,
        expert_limits=read_limits(read, "swiglu_limits"),
        block_limits=read_limits(read, "swiglu_limits_shared"),
    )


def _sliding(read: ConfigReader, n_layers: int, n_all: int) -> tuple[int, ...]:
    """Return the layers with a window, MTP layers among them; columns that rotate go with it.

    n_all  layers with those for multi-token prediction, which config.json may leave out: they have no window
    """
    stated, shares = read.raw.get("layer_types"), read.raw.get("partial_rotary_factors")
    if not isinstance(stated, list) or len(stated) < n_layers:
        raise read.bad("layer_types", f"{SLIDING!r} or {FULL!r} for each of the {n_layers} layers")
    apart = read.raw.get("mtp_layer_types") or []
    if not isinstance(apart, list) or (apart and len(stated) > n_layers):
        raise read.bad("mtp_layer_types", "a list, or null where layer_types has the MTP layers, too")
    kinds = ([*stated, *apart] + [FULL] * n_all)[:n_all]
    sliding = layers_of_kind(ConfigReader({"layer_types": kinds}, read.path), n_all, lambda layer: False)
    usual = [1.0 if layer in sliding else 0.5 for layer in range(n_all)]
    elsewhere = shares is None and read.raw.get("rope_parameters")
    if not elsewhere and (
        not isinstance(shares, list) or not shares or shares[:n_all] != usual[: len(shares)]
    ):
        raise read.bad("partial_rotary_factors", f"1 for layers with a window and 0.5 for others: {_ROTATES}")
    return sliding


def _rotations(read: ConfigReader, sliding: Sequence[int], n_all: int) -> tuple[float, Mapping[str, Any]]:
    """Return theta of layers with a window, and config.json with the others' rotation in rope_parameters."""
    theta, local_theta = _thetas(read, sliding, n_all)
    rotations = stated_rotations(read.raw, read.path)
    for kind, stated, share in zip((FULL, SLIDING), rotations, (0.5, 1.0), strict=True):
        if stated and stated.get("partial_rotary_factor", 1.0) != share:
            inside = ConfigReader(stated, read.path, f"rope_parameters.{kind}.")
            raise inside.bad("partial_rotary_factor", f"{share}: {_ROTATES}")
    # Beside what transformers has written, rope_scaling means nothing to it.
    others = {"rope_theta": theta} | ({"rope_scaling": None} if any(rotations) else {})
    return rotations_by_kind(merged(read.raw, others), read.path, theta, local_theta)


def _thetas(read: ConfigReader, sliding: Sequence[int], n_all: int) -> tuple[float, float]:
    """Return theta of layers without a window, and of those with one; config.json has one for each layer."""
    stated = read.raw.get("rope_theta")
    if not isinstance(stated, list):
        theta = read.number("rope_theta", 10000.0)
        return theta, theta
    by_layer = stated[:n_all]
    full, local = (
        next((theta for n, theta in enumerate(by_layer) if (n in sliding) == kind), None)
        for kind in (False, True)
    )
    if by_layer != [local if n in sliding else full for n in range(len(by_layer))]:
        raise read.bad("rope_theta", f"one for layers with a window, and one for others: {_WHY}")
    named = ConfigReader({FULL: full, SLIDING: local}, read.path, "rope_theta of ")
    return named.number(FULL), named.number(SLIDING)


def _sliding_heads(read: ConfigReader, sliding: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads of layers with a window, which are `sliding`."""
    stated = read.raw.get("attention_other_setting") or {}
    if not isinstance(stated, dict):
        raise read.bad("attention_other_setting", "an object, or null")
    other = ConfigReader(stated, read.path, "attention_other_setting.")
    for key in ("head_dim", "true_head_dim"):
        other.fixed(key, fields["head_dim"], "llama.cpp's step35 has one for all layers")
    other.fixed("attention_type", SLIDING, "these are the layers with other heads")
    usual = read.size("num_sliding_attention_heads", fields["num_attention_heads"])
    heads = other.size("num_attention_heads", usual)
    read.fixed("num_sliding_attention_heads", heads, "attention_other_setting says so")
    by_layer = {str(layer): {"num_attention_heads": heads} for layer in sliding}
    if read.raw.get("per_layer_config", by_layer) != by_layer:
        raise read.bad(
            "per_layer_config", "what layer_types and num_sliding_attention_heads say, and nothing else"
        )
    kv_heads = other.size("num_attention_groups", fields["num_key_value_heads"])
    return {"sliding_heads": heads, "sliding_kv_heads": kv_heads}


def _leading_dense(read: ConfigReader, n_layers: int, n_mtp: int) -> int:
    """Return how many layers stand before those of moe_layers_enum: "3,4,5", or of mlp_layer_types."""
    stated = read.raw.get("moe_layers_enum")
    read.fixed("mtp_mlp_layer_types", ["dense"] * n_mtp, _WHY)
    if read.raw.get("mlp_layer_types") is not None:
        first = leading_dense_layers(read, n_layers, 0)
        read.fixed("moe_layers_enum", ",".join(map(str, range(first, n_layers))), "mlp_layer_types says so")
        return first
    names = stated.split(",") if isinstance(stated, str) else []
    first = n_layers - len(names)
    if not names or [name.strip() for name in names] != [str(layer) for layer in range(first, n_layers)]:
        raise read.bad(
            "moe_layers_enum",
            "the numbers of the last layers with commas between, in order, or mlp_layer_types",
        )
    return first


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> Step35Config:
    """Return the configuration in a file, see `read_decoder`, with what layers with a window have apart."""
    plain = read_decoder(family, metadata, shapes, path, by_layer=("head_count", "head_count_kv"))
    hparams = read_hparams(metadata, family.gguf_name, path)
    n_layers = plain.num_hidden_layers
    sliding = sliding_layers(hparams, n_layers, None)
    cols = hparams.size("rope_dimension_count_swa", plain.rotated_cols)
    if plain.rotated_cols % 4 or cols % 2 or not 0 < cols <= plain.head_dim:
        raise FormatError(f"{path}: {plain.rotated_cols} and {cols} rotated columns of {plain.head_dim}")
    heads, local_heads = _by_kind(hparams, "head_count", sliding, n_layers)
    kv_heads, local_kv_heads = _by_kind(hparams, "head_count_kv", sliding, n_layers)
    own = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rotated_cols": plain.rotated_cols // 2,  # llama.cpp's loader halves what the key says
        "sliding_window": read_window(hparams, 0),
        "sliding_layers": sliding,
        "sliding_theta": read_theta(hparams, "rope_freq_base_swa", 10000.0),
        "sliding_cols": cols,
        "sliding_heads": local_heads,
        "sliding_kv_heads": local_kv_heads,
        "sigmoid_gates": True,
        "dense_mtp": True,
        "first_k_dense_replace": dense_by_routers(shapes, n_layers),
        **limits_of_file(hparams, n_layers),
    }
    return Step35Config(**{**vars(plain), **own})


def _by_kind(hparams: HParams, name: str, sliding: tuple[int, ...], n_layers: int) -> tuple[int, int]:
    """Return a count of heads in layers without a window, and in those with one."""
    stated = getattr(hparams, name)
    counts = stated if isinstance(stated, tuple) else (hparams.size(name),) * n_layers
    return counts_of_kinds(counts[:n_layers], sliding, n_layers, hparams.path, quoted(hparams.key(name)))


def _divisors(name: str, weights: Sequence[Weight], config: Step35Config) -> Computed:
    """Return the divisors of frequencies, and 1 for pairs that stay, (head_dim / 2,).

    They are those of `llama3_divisors`, rounded once, as llama.cpp's converter has them for this model.
    """
    rope, n_cols = config.rope, config.rotated_cols
    assert rope.factor is not None
    assert rope.original_context is not None
    exponents = (np.arange(0, n_cols, 2, dtype=np.float32) / np.float32(n_cols)).astype(np.float64)
    frequencies = np.float32(1) / np.power(rope.theta, exponents).astype(np.float32)
    turns = rope.original_context * frequencies.astype(np.float64) / (2 * np.pi)
    share = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clip(0, 1)
    divisors = np.ones(config.head_dim // 2)
    divisors[: len(share)] = 1 / ((1 - share) / rope.factor + share)
    return Computed(name, divisors.astype(np.float32))


def _rules() -> Iterator[Rule]:
    rotation = LLAMA3_ROTATION.outputs[0]
    yield replace(LLAMA3_ROTATION, outputs=(replace(rotation, arrange=_divisors),))
    gate = in_layer(layers, "attn_gate.weight", "self_attn.g_proj.weight", "gate_rows hidden_size")
    wide, deep = "moe_intermediate_size hidden_size", "hidden_size moe_intermediate_size"
    shared, down = "shared_intermediate_size hidden_size", "hidden_size shared_intermediate_size"
    for rule in (
        *ends(needs_output=True),
        *by_window(*attention(), gate),
        norm_of_blocks(),
        *dense_blocks(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "moe.gate.weight", "num_experts hidden_size"),
        in_layer(moe_layers, "exp_probs_b.bias", "moe.router_bias", "num_experts"),
        in_layer(moe_layers, "ffn_gate_exps.weight", "moe.gate_proj.weight", f"num_experts {wide}"),
        in_layer(moe_layers, "ffn_up_exps.weight", "moe.up_proj.weight", f"num_experts {wide}"),
        in_layer(moe_layers, "ffn_down_exps.weight", "moe.down_proj.weight", f"num_experts {deep}"),
        in_layer(moe_layers, "ffn_gate_shexp.weight", "share_expert.gate_proj.weight", shared),
        in_layer(moe_layers, "ffn_up_shexp.weight", "share_expert.up_proj.weight", shared),
        in_layer(moe_layers, "ffn_down_shexp.weight", "share_expert.down_proj.weight", down),
        *mtp(),
    ):
        (output,) = rule.outputs
        is_norm = output.source.endswith("norm.weight")
        yield replace(rule, outputs=(replace(output, arrange=plus_one),)) if is_norm else rule


_canonical_name = respelled((".transformer.", "."), ("shared_head.output", "shared_head.head"))
"""Names of an MTP layer -> usual ones."""


_KV_HEADS = counts_by_layer(keys.HEAD_COUNT_KV, "num_key_value_heads")
_ELSEWHERE = {keys.HEAD_COUNT_KV, keys.EXPERT_COUNT, keys.EXPERT_USED_COUNT}
_COMMON = [key for key in COMMON if key.name not in _ELSEWHERE]

_FAMILY = decoder(
    "Step3p5ForCausalLM",
    _BESIDE_VISION,
    gguf_name="step35",
    options=MTPOptions,
    read_config=read_config,
    rules=tuple(_rules()),
    metadata=(
        *changed(
            inserted(_COMMON, SLIDING_THETA, after=keys.ROPE_FREQ_BASE),
            counts_by_layer(keys.HEAD_COUNT, "num_attention_heads"),
        ),
        _KV_HEADS, SLIDING_WINDOW, SLIDING_PATTERN, EXPERTS, USED_EXPERTS, EXPERT_WIDTH, SHARED_WIDTH,
        EXPERT_SCALE, EXPERT_NORM, DENSE_LAYERS,
        Key(keys.MOE_EVERY_N_LAYERS, Value.u32, lambda c, o: 1),
        *LIMITS,
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, lambda c, o: n_mtp_layers(c, o) or None),
    ),
    says=frozenset({LLAMA3, WINDOWS}),
    drops=lambda config, options: (*vision_drops(config, options), *mtp_drops(config, options)),
    check=check_mtp,
    resolve_options=keep_last_mtp,
    canonical_name=_canonical_name,
    unset_gating="sigmoid",
    says_norm=True,
    reader=_read_file,
    windows="own unstretched",
)  # fmt: skip

FAMILIES = (_FAMILY,)
