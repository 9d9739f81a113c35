"""The keys deepseek2.*, written and read back: what a file can say of a configuration survives."""

from __future__ import annotations

import re
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.architectures.base import metadata_of
from convert.architectures.decoder.rope import RopeConfig, Yarn
from convert.architectures.deepseek2.config import V3, DeepseekConfig
from convert.architectures.deepseek2.family import ARCHITECTURE, RULES
from convert.architectures.options import LatentOptions
from gguf_tools.errors import FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format.loaders import without_effect
from gguf_tools.format.values import Metadata, Value
from tests.support.checkpoints import STYLES

LAYOUTS = ("split", "both", "none")
SIZES = st.integers(1, 2**15)
NUMBERS = st.floats(2.0**-20, 2.0**20, width=32)
FACTORS = st.just(0.0) | st.floats(2.0**-20, 4, width=32)
"""Factors whose tenth is a float32, too: that of the smallest number is 0."""


def shapes_of(config: DeepseekConfig, options: LatentOptions) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the file by name; only the embedding's shape matters, and which there are."""
    names = {
        output.name.format(layer=layer)
        for rule in RULES
        for layer in rule.where(config, options)
        for output in rule.outputs
    }
    return dict.fromkeys(names, (config.vocab_size, config.hidden_size))


def written(config: DeepseekConfig, options: LatentOptions) -> Metadata:
    return metadata_of(ARCHITECTURE, config, options)


def read_back(config: DeepseekConfig, options: LatentOptions) -> DeepseekConfig:
    return ARCHITECTURE.read_file(written(config, options), shapes_of(config, options), "model.gguf")


def as_a_file_says(config: DeepseekConfig, options: LatentOptions) -> DeepseekConfig:
    """Return `config` without what no key and no tensor can express."""
    groups = config.expert_groups or (1, 1)
    return replace(
        config,
        topk_method="noaux_tc" if config.architecture == V3 else "group_limited_greedy",
        n_group=groups[0],
        topk_group=groups[1],
        norm_requested=config.norm_topk_prob,
        rope=rope_of(config.rope.theta, config.yarn and as_llama_cpp_takes(config.yarn)),
        num_nextn_predict_layers=config.num_nextn_predict_layers if options.mtp else 0,
    )


def rope_of(theta: float, yarn: Yarn | None) -> RopeConfig:
    return RopeConfig(theta) if yarn is None else RopeConfig(theta, "yarn", **asdict(yarn))


def as_llama_cpp_takes(yarn: Yarn) -> Yarn:
    """Return YaRN with what the loader reads: one mscale for all, and the usual ends of the ramp."""
    log = yarn.mscale_all_dim
    plain = Yarn(yarn.factor, yarn.original_context, mscale=log, mscale_all_dim=log)
    return replace(plain, attention_factor=plain.rotary_factor)


@st.composite
def yarns(draw: st.DrawFn) -> Yarn:
    some = st.none() | FACTORS
    return Yarn(draw(NUMBERS), draw(SIZES), draw(NUMBERS), draw(NUMBERS), draw(some), draw(some), draw(some))


@st.composite
def configs(draw: st.DrawFn) -> DeepseekConfig:
    """A configuration as `DeepseekConfig.from_dict` could return it, with a layer of experts."""
    base = DeepseekConfig.from_dict(STYLES[draw(st.sampled_from(sorted(STYLES)))])
    n_layers = draw(st.integers(1, 100))
    per_group, n_group = draw(st.integers(2, 32)), draw(st.integers(1, 16))
    topk_group = draw(st.integers(1, n_group))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
             "kv_lora_rank", "v_head_dim", "num_shared_experts", "max_position_embeddings")  # fmt: skip
    requested, rotated = draw(st.booleans()), 2 * draw(st.integers(1, 2**14))
    changes: dict[str, Any] = {
        **{name: draw(SIZES) for name in sizes},
        "num_hidden_layers": n_layers,
        "rotated_cols": rotated,
        "head_dim": rotated + draw(SIZES),
        "first_k_dense_replace": draw(st.integers(0, n_layers - 1)),
        "q_lora_rank": draw(st.none() | SIZES),
        "num_experts": per_group * n_group,
        "num_experts_per_tok": draw(st.integers(1, per_group * topk_group)),
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_requested": requested,
        "norm_topk_prob": base.architecture == V3 and requested,
        "routed_scaling_factor": draw(NUMBERS),
        "rms_norm_eps": draw(NUMBERS),
        "rope": rope_of(draw(st.floats(2.0, 2.0**20, width=32)), draw(st.none() | yarns())),
        "tie_word_embeddings": draw(st.booleans()),
        "num_nextn_predict_layers": draw(st.integers(1, 3)),
    }
    if base.architecture != V3:
        changes["topk_method"] = draw(st.sampled_from(("greedy", "group_limited_greedy")))
        if changes["topk_method"] == "greedy" and draw(st.booleans()):
            changes |= {"n_group": None, "topk_group": None}
    return replace(base, **changes, num_key_value_heads=changes["num_attention_heads"])


OPTIONS = st.builds(LatentOptions, st.sampled_from(LAYOUTS), st.booleans())


@settings(deadline=None)
@given(configs(), OPTIONS)
def test_reading_is_the_inverse_of_writing(config: DeepseekConfig, options: LatentOptions) -> None:
    expected, found = as_a_file_says(config, options), read_back(config, options)
    for field in fields(DeepseekConfig):
        if field.name != "rope":
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert found.rope.theta == expected.rope.theta
    # The file has a tenth of mscale_all_dim, as float32.
    assert numbers_of(found.yarn) == pytest.approx(numbers_of(expected.yarn))


def numbers_of(yarn: Yarn | None) -> dict[str, Any]:
    return {} if yarn is None else asdict(yarn)


@settings(deadline=None)
@given(configs(), OPTIONS)
def test_writing_what_was_read_gives_the_keys_that_count(
    config: DeepseekConfig, options: LatentOptions
) -> None:
    keys = counting(written(config, options))
    if config.expert_groups is None:
        keys |= {f"deepseek2.expert_group_{end}": Value.u32(1) for end in ("count", "used_count")}
    assert counting(written(read_back(config, options), options)) == keys


def counting(metadata: Metadata) -> dict[str, Value]:
    """Return the keys that llama.cpp reads."""
    unread = without_effect(metadata, "deepseek2")
    return {key: value for key, value in metadata.items() if key not in unread}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mla", LAYOUTS)
def test_the_small_models_read_back_whole(style: str, mla: Any) -> None:
    config = DeepseekConfig.from_dict(STYLES[style])
    found, expected = read_back(config, LatentOptions(mla)), as_a_file_says(config, LatentOptions(mla))
    exact = {"rms_norm_eps": float(np.float32(config.rms_norm_eps)), "rope": found.rope}
    assert found == replace(expected, **exact)


# ---- files of others


def small() -> tuple[dict[str, Value], dict[str, tuple[int, ...]]]:
    config, options = DeepseekConfig.from_dict(STYLES["v2"]), LatentOptions()
    return dict(written(config, options)), shapes_of(config, options)


def test_what_an_older_file_leaves_out_is_filled_in() -> None:
    metadata, shapes = small()
    for key in ("expert_gating_func", "expert_group_count", "expert_group_used_count", "rope.freq_base",
                "rope.scaling.type", "rope.scaling.factor"):  # fmt: skip
        del metadata[f"deepseek2.{key}"]
    config = ARCHITECTURE.read_file(metadata, shapes, "model.gguf")
    assert (config.scoring_func, config.norm_topk_prob, config.expert_groups) == ("softmax", False, (1, 1))
    assert (config.rope.theta, config.yarn) == (10000.0, None)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("block_count", "no key {}, which llama.cpp requires"),
        ("attention.head_count", "{} is null, expected a whole"),
        ("embedding_length", "no key {}, which llama.cpp requires"),
        ("attention.kv_lora_rank", "no key {}, which llama.cpp requires"),
        ("rope.dimension_count", "{} is null, expected a whole"),
    ],
)
def test_a_missing_size_names_file_and_key(key: str, words: str) -> None:
    metadata, shapes = small()
    del metadata[f"deepseek2.{key}"]
    with pytest.raises(FormatError, match=re.escape("model.gguf: " + words.format(f"deepseek2.{key}"))):
        ARCHITECTURE.read_file(metadata, shapes, "model.gguf")


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("block_count", Value.string("3"), FormatError, "block_count is '3', expected a whole number"),
        ("attention.head_count", Value.u32s([0, 0]), FormatError, "head_count is null"),
        ("rope.freq_base", Value.string("x"), FormatError, "rope.freq_base is 'x', expected a number"),
        ("rope.scaling.attn_factor", Value.bool_(True), FormatError, "is true, expected a number"),
        ("rope.scaling.type", Value.string("linear"), UnsupportedCheckpoint, "scaled by 'linear'"),
        ("expert_gating_func", Value.u32(3), UnsupportedCheckpoint, r"1 \(softmax\) or 2 \(sigmoid\)"),
        ("expert_group_count", Value.u32(3), FormatError, "8 experts of which . are used, in 3 groups"),
        ("rope.dimension_count", Value.u32(48), FormatError, "48 of 48 key columns rotated"),
    ],
)
def test_a_senseless_value_names_file_and_key(
    key: str, value: Value, error: type[Exception], words: str
) -> None:
    metadata, shapes = small()
    with pytest.raises(error, match=words) as caught:
        ARCHITECTURE.read_file(metadata | {f"deepseek2.{key}": value}, shapes, "model.gguf")
    assert str(caught.value).startswith("model.gguf: ")


def test_one_number_per_layer_is_the_same_for_all() -> None:
    metadata, shapes = small()
    per_layer = metadata | {"deepseek2.attention.head_count": Value.u32s([4, 4, 4])}
    assert ARCHITECTURE.read_file(per_layer, shapes, "model.gguf").num_attention_heads == 4
    per_layer["deepseek2.attention.head_count"] = Value.u32s([0, 4, 4])
    with pytest.raises(UnsupportedCheckpoint, match="head_count differs from layer to layer"):
        ARCHITECTURE.read_file(per_layer, shapes, "model.gguf")


def test_a_key_that_llama_cpp_does_not_read_means_nothing() -> None:
    metadata, shapes = small()
    plain = ARCHITECTURE.read_file(metadata, shapes, "model.gguf")
    other = {"deepseek2.rope.scaling.yarn_attn_factor": Value.bool_(True),
             "deepseek2.rope.scaling.yarn_beta_fast": Value.f32(7.0)}  # fmt: skip
    assert ARCHITECTURE.read_file(metadata | other, shapes, "model.gguf") == plain


def test_a_file_without_an_embedding_is_refused() -> None:
    metadata, shapes = small()
    del shapes["token_embd.weight"]
    with pytest.raises(MissingTensor, match=r"model\.gguf: no tensor token_embd\.weight"):
        ARCHITECTURE.read_file(metadata, shapes, "model.gguf")
