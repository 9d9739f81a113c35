"""Pruned layers: what the metadata say about layers by their number goes with the layers."""

from __future__ import annotations

from typing import Any

import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.format.values import Kind, Value
from quantize.plan.pruning import Pruning, prune_metadata


def value_of(data: Any) -> Value:
    if isinstance(data, list):
        makers = {bool: Value.bools, int: Value.i32s, float: Value.f32s}
        return makers[type(data[0])](data) if data else Value.array(Kind.INT32, [])
    return Value.string(data) if isinstance(data, str) else Value.u32(data)


def prune(
    architecture: str, n_layers: int, pruned: set[int], **keys: Any
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the architecture's keys of a pruned model as lists and numbers, and the notes."""
    prefix = "" if architecture == "apertus" else f"{architecture}."
    metadata = {
        "general.architecture": value_of(architecture),
        f"{architecture}.block_count": value_of(n_layers),
    }
    metadata |= {f"{prefix}{key.replace('__', '.')}": value_of(data) for key, data in keys.items()}
    new, notes = prune_metadata(metadata, n_layers, Pruning(frozenset(pruned)))
    plain = {
        key.removeprefix(f"{architecture}.").replace(".", "__"): v.data if v.item is None else list(v.data)
        for key, v in new.items()
    }
    return plain, tuple(note.text for note in notes)


def test_names_close_the_gap() -> None:
    names = [f"blk.{i}.attn_q.weight" for i in range(4)]
    pruning = Pruning.of(["output.weight", *names], (0, 2))
    assert [pruning.new_name(n) for n in names] == [None, "blk.0.attn_q.weight", None, "blk.1.attn_q.weight"]
    assert pruning.new_name("output.weight") == "output.weight"


def test_layers_without_tensors_keep_their_places() -> None:
    pruning = Pruning.of(["blk.0.attn_q.weight", "blk.2.attn_q.weight", "blk.3.attn_q.weight"], (2,))
    assert pruning.new_name("blk.3.attn_q.weight") == "blk.2.attn_q.weight"


@pytest.mark.parametrize(
    ("architecture", "key", "values"),
    [
        ("lfm2", "attention__head_count_kv", [0, 2, 0, 2]),
        ("deci", "attention__head_count", [8, 4, 8, 2]),
        ("openelm", "feed_forward_length", [64, 96, 128, 160]),
        ("granite-swa", "expert_used_count", [2, 4, 2, 4]),
        ("kimi-linear", "expert_feed_forward_length", [64, 0, 64, 0]),
        ("step35", "swiglu_clamp_exp", [0.0, 7.0, 0.0, 5.0]),
        ("step35", "swiglu_clamp_shexp", [0.0, 7.0, 0.0, 5.0]),
        ("deepseek4", "attention__compress_ratios", [0, 4, 128, 4]),
        ("gemma4", "attention__sliding_window_pattern", [True, False, True, True]),
        ("qwen35", "attention__recurrent_layers", [True, False, True, True]),
        ("glm-dsa", "attention__indexer__types", [True, False, True, False]),
        ("granite-swa", "attention__rope_pattern", [1, 0, 1, 1]),
        ("granite", "deepstack_mapping", [-1, 0, 1, -1]),
        ("apertus", "xielu__alpha_n", [0.5, 1.0, 1.5, 2.0]),
    ],
)
def test_values_go_with_their_layers(architecture: str, key: str, values: list[Any]) -> None:
    new, notes = prune(architecture, 4, {1}, **{key: values})
    assert new[key] == [values[0], *values[2:]]
    assert new["block_count"] == 3
    assert not notes


def test_arrays_of_other_things_stay_as_they_are() -> None:
    sections = [8, 8, 8, 0]
    new, notes = prune("qwen3vl", 4, {1}, rope__dimension_sections=sections, tokens_of_mine=[1, 2, 3, 4])
    assert new["rope__dimension_sections"] == sections
    assert new["tokens_of_mine"] == [1, 2, 3, 4]
    assert notes == (
        "qwen3vl.tokens_of_mine has as many values as the model had layers and keeps them: an unknown key",
    )


def test_an_array_for_the_layers_without_prediction_is_shorter() -> None:
    types = [True, False, True]
    new, _ = prune("glm-dsa", 4, {1, 3}, nextn_predict_layers=1, attention__indexer__types=types)
    assert new["attention__indexer__types"] == [True, True]
    assert (new["block_count"], new["nextn_predict_layers"]) == (2, 0)


@pytest.mark.parametrize(
    ("key", "count", "pruned", "left"),
    [
        ("leading_dense_block_count", 2, {1, 3}, 1),
        ("hash_layer_count", 3, {0, 1, 5}, 1),
        ("nextn_predict_layers", 2, {0, 5}, 1),
        ("nextn_predict_layers", 1, {0}, 1),
        ("attention__shared_kv_layers", 2, {0, 4}, 1),
    ],
)
def test_counts_of_first_and_last_layers(key: str, count: int, pruned: set[int], left: int) -> None:
    new, _ = prune("deepseek4", 6, pruned, **{key: count})
    assert new[key] == left


def test_kinds_of_layers_are_written_where_a_period_no_longer_says_them() -> None:
    new, _ = prune("qwen35", 9, {0}, full_attention_interval=4, nextn_predict_layers=1)
    assert new["attention__recurrent_layers"] == [True, True, False, True, True, True, False, False]
    assert new["full_attention_interval"] == 4
    new, _ = prune("qwen3next", 8, {5})  # the program's own period
    assert new["attention__recurrent_layers"] == [True, True, True, False, True, True, False]
    new, _ = prune("qwen35", 8, {0, 1, 2, 3}, full_attention_interval=4)
    assert "attention__recurrent_layers" not in new


@pytest.mark.parametrize(
    ("architecture", "said", "slides"),
    [
        ("gemma2", {}, [False, True, False]),
        ("gemma3", {}, [True, True, True]),
        ("cohere2", {"attention__sliding_window_pattern": 2}, [False, True, False]),
        ("modern-bert", {}, [True, True, False]),
    ],
)
def test_windows_stay_with_their_layers(architecture: str, said: dict[str, int], slides: list[bool]) -> None:
    new, _ = prune(architecture, 4, {0}, attention__sliding_window=16, **said)
    changes = slides != [True, True, True]
    assert new.get("attention__sliding_window_pattern", "as before") == (slides if changes else "as before")


def test_windows_are_not_written_where_there_are_none() -> None:
    assert "attention__sliding_window_pattern" not in prune("olmo2", 8, {3})[0]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"interleave_moe_layer_step": 2}, r"interleave_moe_layer_step is 2, so one layer in 2 has experts"),
        ({"moe_every_n_layers": 2}, r"moe_every_n_layers is 2"),
        ({"attention__shared_kv_layers": 2}, r"layers \[1\]: the last 2 layers use their keys and values"),
        ({"hrm__layers_per_stack": 2}, "how they form stacks"),
        ({"ple__layers": [1]}, r"layers \[1\]: x\.ple\.layers names them"),
    ],
)
def test_what_would_not_load_is_refused(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        prune("x", 4, {1}, **keys)


def test_more_layers_than_there_can_be() -> None:
    with pytest.raises(BadRequest, match="expected at most 512"):
        prune("llama", 2**31, {1})


def test_rows_of_all_layers_in_one_tensor_are_refused() -> None:
    with pytest.raises(BadRequest, match="per_layer_model_proj"):
        Pruning.of(["per_layer_model_proj.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"], (1,))


@pytest.mark.parametrize(
    ("architecture", "keys", "note"),
    [
        ("smollm3", {}, "smollm3 has one layer in 4 without rotation"),
        ("rwkv6", {"rescale_every_n_layers": 3}, "one layer in 3 halves hidden states"),
        ("qwen3vl", {"n_deepstack_layers": 2}, "n_deepstack_layers is 2"),
    ],
)
def test_what_is_computed_otherwise_is_noted(architecture: str, keys: dict[str, int], note: str) -> None:
    (found,) = prune(architecture, 6, {1}, **keys)[1]
    assert note in found


def test_a_listed_layer_is_renumbered() -> None:
    assert prune("qwen4exp", 4, {0}, full_attention_interval=1, ple__layers=[2])[0]["ple__layers"] == [1]
