"""EXAONE 4 with experts (K-EXAONE): norms before attention and block, and windows in most layers.

Layers without a window rotate nothing. The first layers are dense, the others have experts that are chosen
with a bias, and shared ones. A layer for multi-token prediction is dense; its weights begin with `mtp.`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    group_fields,
    leading_dense_layers,
    with_defaults,
)
from convert.architectures.decoder.family import LLAMA3, WINDOWS, decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    read_decoder,
)
from convert.architectures.decoder.rope import LLAMA3_ROTATION
from convert.architectures.decoder.rules import (
    INV_FREQ,
    attention,
    biased_router,
    check_mtp,
    dense_blocks,
    ends,
    expert_stacks,
    keep_mtp_of,
    moe_layers,
    mtp_layers,
    n_mtp_layers,
    norm_of_blocks,
    one,
    own_and_mtp,
    shared_experts,
)
from convert.architectures.dense import hybrid_layers, unrotated_others
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Drop, Rule
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

_CLASS = "ExaoneMoeForCausalLM"


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an EXAONE 4 with experts."""
    older = raw.get("first_last_k_dense_replace")
    read = with_defaults(
        merged({} if older is None else {"first_k_dense_replace": older}, raw), path, name=_CLASS
    )
    fields = decoder_fields(read)
    n_layers, rope = fields["num_hidden_layers"], fields["rope"]
    if fields["rotated_cols"] != fields["head_dim"] or rope.kind not in ("default", "llama3"):
        raise UnsupportedCheckpoint(
            f"{path}: RoPE of type {quoted(rope.kind)} for {fields['rotated_cols']} columns of"
            f" {fields['head_dim']}, expected 'default' or 'llama3' for all, as llama.cpp has no other"
        )
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        read.fixed(key, value, "the model computes with no other")
    read.fixed("attention_bias", False, "the model computes with none")
    n_dense = leading_dense_layers(read, n_layers, 1)
    read.fixed("is_moe_layer", [layer >= n_dense for layer in range(n_layers)], "another key says so")
    hybrid = hybrid_layers(read, n_layers)
    if not hybrid["sliding_layers"]:
        raise read.bad("layer_types", "a layer with a window, without which llama.cpp's exaone-moe stops")
    n_mtp = read.size("num_nextn_predict_layers", 0, least=0)
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        **group_fields(read),
        **hybrid,
        sliding_window=read.size("sliding_window"),
        qk_norm=True,
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("num_shared_experts"),
        first_k_dense_replace=n_dense,
        scoring_func="sigmoid",
        norm_topk_prob=read.flag("norm_topk_prob", True),
        routed_scaling_factor=read.number("routed_scaling_factor"),
        num_nextn_predict_layers=n_mtp,
        dense_mtp=True,
    )


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`; layers without a window rotate nothing."""
    config = read_decoder(family, metadata, shapes, path)
    shared = config.shared_expert_intermediate_size or config.moe_intermediate_size
    hybrid = unrotated_others(config.num_hidden_layers, config.sliding_layers)
    return replace(config, **hybrid, shared_expert_intermediate_size=shared, dense_mtp=True)


def _rules() -> Iterator[Rule]:
    yield LLAMA3_ROTATION
    yield from ends(needs_output=True)
    for rule in (*attention(), norm_of_blocks(), *dense_blocks()):
        yield from own_and_mtp(rule, "mtp.layers.{layer.index}.")
    yield from biased_router("e_score_correction_bias")
    yield from expert_stacks(moe_layers)
    yield from shared_experts(moe_layers)
    for name, source, sizes in (
        ("eh_proj", "fc", "hidden_size concat_size"),
        ("enorm", "pre_fc_norm_embedding", "hidden_size"),
        ("hnorm", "pre_fc_norm_hidden", "hidden_size"),
        ("shared_head_norm", "norm", "hidden_size"),
    ):
        yield one(mtp_layers, f"blk.{{layer}}.nextn.{name}.weight", f"mtp.{source}.weight", sizes)


def _drops(config: DecoderConfig, options: MTPOptions) -> Iterable[Drop]:
    mtp = Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer; kept without --no-mtp")
    return (INV_FREQ,) if n_mtp_layers(config, options) else (INV_FREQ, mtp)


_FAMILY = decoder(
    "ExaoneMoEForCausalLM",
    _CLASS,
    gguf_name="exaone-moe",
    options=MTPOptions,
    read_config=read_config,
    rules=tuple(_rules()),
    metadata=(
        *COMMON, VOCAB_SIZE, SLIDING_WINDOW,
        Key(keys.SLIDING_WINDOW_PATTERN, Value.bools,
            lambda c, o: [layer in c.sliding_layers for layer in range(c.num_hidden_layers)]),
        EXPERT_WIDTH, SHARED_EXPERTS, SHARED_WIDTH, EXPERT_SCALE, EXPERT_NORM, DENSE_LAYERS,
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, n_mtp_layers),
        Key(keys.ROPE_SCALING_TYPE, Value.string, lambda c, o: "none"),
    ),
    says=frozenset({LLAMA3, WINDOWS}),
    drops=_drops,
    check=check_mtp,
    resolve_options=partial(keep_mtp_of, "mtp.fc.weight"),
    canonical_name=lambda name: name.replace(".mlp.gate.e_score", ".mlp.e_score"),
    unset_gating="sigmoid",
    says_norm=True,
    windows="alike",
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_FAMILY,)
