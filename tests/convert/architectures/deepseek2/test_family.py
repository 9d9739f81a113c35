"""DeepSeek V2 and V3: tensors and keys against the recorded converters, layouts, total matching, notes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.architectures import find_architecture, supported
from convert.architectures.base import Conversion, build
from convert.architectures.config_reader import with_head
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.family import ARCHITECTURE, RULES
from convert.architectures.options import LatentOptions
from convert.architectures.rules import OutputTensor, Stacked
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from gguf_tools.errors import (
    BadConfig,
    BadRequest,
    CheckpointError,
    MissingTensor,
    UnexpectedTensors,
    UnsupportedCheckpoint,
)
from gguf_tools.format.ggml_types import BF16, F32
from gguf_tools.format.values import Kind
from tests.convert.cases import CASES
from tests.support.checkpoints import (
    STYLES,
    add_mtp_layer,
    dequantize_fp8,
    edit_config,
    edit_tensors,
    micro_checkpoint,
    read_tensors,
    shard,
    to_fp8,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "convert"
OUTTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def converted(folder: Path, **options: Any) -> Conversion:
    """Build from `folder`; the checkpoint stays open, the test is short."""
    checkpoint = Checkpoint(folder)
    return build(find_architecture(checkpoint.config), open_weights(checkpoint), options)


def n_rows(tensor: OutputTensor) -> int:
    return int(np.prod(tensor.shape[:-1]))


def read_all(tensor: OutputTensor, step: int | None = None) -> np.ndarray:
    """Return the whole tensor in its shape, read `step` rows at a time."""
    count = n_rows(tensor)
    step = step or count
    parts = [tensor.read_rows(row, min(row + step, count)) for row in range(0, count, step)]
    return np.concatenate(parts).reshape(tensor.shape)


def by_name(conversion: Conversion) -> dict[str, OutputTensor]:
    return {tensor.name: tensor for tensor in conversion.tensors}


def facts(tensor: OutputTensor, outtype: str) -> list[Any]:
    """Return [type, shape with columns first, sha256] as llama.cpp's converter encodes it."""
    kept = len(tensor.shape) == 1 or tensor.name.endswith(("_norm.weight", "ffn_gate_inp.weight", ".bias"))
    kind = "f32" if kept else outtype
    data = read_all(tensor, step=37).astype(OUTTYPES[kind]).tobytes()
    return [kind.upper(), list(reversed(tensor.shape)), hashlib.sha256(data).hexdigest()]


# ---- the recorded converters


@pytest.mark.parametrize("name", CASES)
def test_tensors_equal_the_recorded_converter(name: str, tmp_path: Path) -> None:
    case, golden = CASES[name], json.loads((GOLDEN / f"{name}.json").read_text())
    found = {t.name: facts(t, case.outtype) for t in converted(case.make(tmp_path), mla=case.mla).tensors}
    assert found == golden["tensors"]
    assert list(found) == list(golden["tensors"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mla == "split"])
def test_metadata_equals_llama_cpp_in_order(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())["metadata"]
    found = {key: value.data for key, value in converted(CASES[name].make(tmp_path)).metadata.items()}
    expected = {key: value for key, value in golden.items() if key.startswith("deepseek2.")}
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mla == "both"])
def test_metadata_of_both_holds_what_ik_llama_cpp_writes(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())["metadata"]
    found = {
        key: value.data for key, value in converted(CASES[name].make(tmp_path), mla="both").metadata.items()
    }
    expected = {key: value for key, value in golden.items() if key.startswith("deepseek2.")}
    assert {key: found[key] for key in expected} == expected
    # That converter leaves groups of experts and YaRN's bounds to the program's defaults.
    assert {key.removeprefix("deepseek2.") for key in found.keys() - expected.keys()} <= {
        "expert_group_count",
        "expert_group_used_count",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }


def test_kinds_of_values_are_what_the_loaders_ask_for(tmp_path: Path) -> None:
    metadata = converted(micro_checkpoint(tmp_path, "v2")).metadata
    floats = {"rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
              "rope.freq_base", "attention.layer_norm_rms_epsilon", "expert_weights_scale",
              "rope.scaling.yarn_log_multiplier"}  # fmt: skip
    for key, value in metadata.items():
        name = key.removeprefix("deepseek2.")
        expected = Kind.FLOAT32 if name in floats else Kind.UINT32
        assert value.kind == (Kind.STRING if name == "rope.scaling.type" else expected), key


# ---- values, against the weights themselves


def test_heads_are_split_and_transposed(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v3")
    config = STYLES["v3"]
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    stored = read_tensors(folder)["model.layers.1.self_attn.kv_b_proj.weight"]
    per_head = stored.reshape(heads, nope + value, -1)

    split = by_name(converted(folder))
    keys = read_all(split["blk.1.attn_k_b.weight"])
    values = read_all(split["blk.1.attn_v_b.weight"])
    assert np.array_equal(keys, per_head[:, :nope].transpose(0, 2, 1))
    assert np.array_equal(values, per_head[:, nope:])
    assert "blk.1.attn_kv_b.weight" not in split

    both = by_name(converted(folder, mla="both"))
    assert np.array_equal(read_all(both["blk.1.attn_k_b.weight"]), keys.reshape(-1, nope))
    assert np.array_equal(read_all(both["blk.1.attn_v_b.weight"]), values.reshape(heads * value, -1))
    assert np.array_equal(read_all(both["blk.1.attn_kv_b.weight"]), stored)

    none = by_name(converted(folder, mla="none"))
    assert np.array_equal(read_all(none["blk.1.attn_kv_b.weight"]), stored)
    assert not {"blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"} & none.keys()


@pytest.mark.parametrize("mla", ["split", "both"])
def test_any_row_range_gives_the_rows_of_the_whole(mla: str, tmp_path: Path) -> None:
    folder = to_fp8(micro_checkpoint(tmp_path, "v3", num_hidden_layers=2), (32, 48))
    random = np.random.RandomState(0)
    for tensor in converted(folder, mla=mla).tensors:
        count = n_rows(tensor)
        whole = tensor.read_rows(0, count)
        for _ in range(4):
            start, stop = sorted(random.randint(0, count + 1, 2))
            rows = tensor.read_rows(start, stop)
            assert rows.dtype == whole.dtype
            assert rows.flags.c_contiguous
            assert np.array_equal(rows, whole[start:stop])
            assert bytes(tensor.raw_rows(start, stop)) == whole[start:stop].tobytes()


def test_experts_are_stacked_in_their_order(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v3")
    stored = read_tensors(folder)
    stack = by_name(converted(folder))["blk.2.ffn_up_exps.weight"]
    whole = read_all(stack)
    for expert in range(8):
        assert np.array_equal(whole[expert], stored[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"])


def test_a_chunk_of_a_stack_reads_only_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = by_name(converted(micro_checkpoint(tmp_path, "v3")))["blk.1.ffn_up_exps.weight"]
    assert isinstance(stack, Stacked)
    read = []
    raw_type = type(stack.weights[0].raw)  # type: ignore[attr-defined]
    original = raw_type.read_rows
    monkeypatch.setattr(
        raw_type, "read_rows", lambda raw, a, b: read.append((raw.name, a, b)) or original(raw, a, b)
    )
    stack.read_rows(48 * 5 + 10, 48 * 5 + 13)
    assert read == [("model.layers.1.mlp.experts.5.up_proj.weight", 10, 13)]


def test_fp8_weights_are_decoded_before_they_are_split(tmp_path: Path) -> None:
    folder = to_fp8(micro_checkpoint(tmp_path, "v3", num_hidden_layers=2))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    stored = read_tensors(folder)
    weight = dequantize_fp8(stored[name], stored[name + "_scale_inv"], (128, 128)).reshape(4, 56, 64)
    tensors = by_name(converted(folder))
    assert tensors["blk.0.attn_k_b.weight"].type == F32
    assert np.array_equal(read_all(tensors["blk.0.attn_k_b.weight"]), weight[:, :32].transpose(0, 2, 1))
    assert tensors["token_embd.weight"].type == BF16
    assert tensors["blk.0.attn_k_b.weight"].stored_as == "F8_E4M3 in blocks of 128x128"


def test_experts_stored_in_two_ways_become_float32(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v3", num_hidden_layers=2)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    plain = read_tensors(folder)[name]
    to_fp8(folder)

    def restore(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = plain
        del tensors[name + "_scale_inv"]

    stack = by_name(converted(edit_tensors(folder, restore)))["blk.1.ffn_up_exps.weight"]
    assert stack.type == F32
    assert np.array_equal(read_all(stack)[3], plain.astype(np.float32))


# ---- sources of other shapes


def test_shards_change_the_order_only(tmp_path: Path) -> None:
    one = micro_checkpoint(tmp_path / "one", "v2")
    three = shard(micro_checkpoint(tmp_path / "three", "v2"))
    first, second = by_name(converted(one)), by_name(converted(three))
    assert first.keys() == second.keys()
    assert list(first) != list(second)
    for name, tensor in first.items():
        assert np.array_equal(read_all(tensor), read_all(second[name]))


def test_tied_embeddings_need_no_output(tmp_path: Path) -> None:
    conversion = converted(micro_checkpoint(tmp_path, "v2", tie_word_embeddings=True))
    assert "output.weight" not in by_name(conversion)
    assert conversion.notes == ()


def test_a_tied_output_that_is_stored_is_left_out_with_a_note(tmp_path: Path) -> None:
    conversion = converted(edit_config(micro_checkpoint(tmp_path, "v2"), tie_word_embeddings=True))
    assert "output.weight" not in by_name(conversion)
    assert conversion.notes == (
        "left out 1 tensor (lm_head.weight): tied: the token embedding is the output layer",
    )


def test_rotary_frequencies_are_dropped(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v2")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    conversion = converted(folder)
    assert conversion.dropped == {name: "computed from rope_theta"}


# ---- multi-token prediction


def test_the_mtp_layer_is_left_out_with_a_note(tmp_path: Path) -> None:
    conversion = converted(add_mtp_layer(micro_checkpoint(tmp_path, "v3")))
    assert not any(name.startswith("blk.3.") for name in by_name(conversion))
    assert conversion.metadata["deepseek2.block_count"].data == 3
    assert "deepseek2.nextn_predict_layers" not in conversion.metadata
    (note,) = conversion.notes
    assert note.startswith("left out 44 tensors (model.layers.3.eh_proj.weight ...): multi-token prediction")


def test_the_mtp_layer_is_kept_on_request(tmp_path: Path) -> None:
    folder = add_mtp_layer(to_fp8(micro_checkpoint(tmp_path, "v3")))
    stored = read_tensors(folder)
    conversion = converted(folder, mtp=True)
    tensors = by_name(conversion)
    assert conversion.metadata["deepseek2.block_count"].data == 4
    assert conversion.metadata["deepseek2.nextn_predict_layers"].data == 1
    for name, source in {
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.shared_head_norm": "shared_head.norm",
        "nextn.shared_head_head": "shared_head.head",
        "attn_norm": "input_layernorm",
        "ffn_gate_inp": "mlp.gate",
    }.items():
        expected = stored[f"model.layers.3.{source}.weight"]
        assert np.array_equal(read_all(tensors[f"blk.3.{name}.weight"]), expected)
    assert tensors["blk.3.ffn_down_exps.weight"].shape == (8, 96, 48)
    assert tensors["blk.3.attn_k_b.weight"].shape == (4, 64, 32)
    assert conversion.notes == ()


def test_mtp_without_such_a_layer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="num_nextn_predict_layers"):
        converted(micro_checkpoint(tmp_path, "v3"), mtp=True)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(MissingTensor, match=r"model\.layers\.3\.input_layernorm\.weight"):
        converted(tmp_path, mtp=True)


# ---- matching is total


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mla", ["split", "both", "none"])
@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("stack", ["none", "gate_up_proj", "gate_proj"])
def test_every_weight_is_claimed_by_exactly_one_rule(style: str, mla: Any, mtp: bool, stack: str) -> None:
    config = DeepseekConfig.from_dict(STYLES[style] | {"num_nextn_predict_layers": 1})
    seen: dict[str, int] = {}
    outputs: list[str] = []
    for number, rule in enumerate(RULES):
        if any(name.endswith(stack) for name in rule.unless):
            continue
        if rule.when and not any(name.endswith(stack) for name in rule.when):
            continue
        for layer in rule.where(config, LatentOptions(mla, mtp)):
            outputs += [output.name.format(layer=layer) for output in rule.outputs]
            for source in {output.source.format(layer=layer, expert="E") for output in rule.outputs}:
                assert seen.setdefault(source, number) == number, source
    assert len(outputs) == len(set(outputs))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v3")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.up_proj.weight"))
    with pytest.raises(MissingTensor, match=r"missing 1 tensor: model\.layers\.1\.mlp\.experts\.5\.up_proj"):
        converted(folder)


def test_the_selection_bias_is_not_optional(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v3")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias"))
    with pytest.raises(MissingTensor, match="e_score_correction_bias"):
        converted(folder)


def test_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v2")
    extra = {f"model.layers.0.extra_{n:02}": np.ones(4, np.float32) for n in range(10)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(UnexpectedTensors, match=r"unexpected 10 tensors: .*extra_00, .*extra_07 and 2 more"):
        converted(folder)


def test_a_renamed_tensor_is_reported_from_both_sides(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v2")

    def rename(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.kv_b.weight"] = tensors.pop(
            "model.layers.0.self_attn.kv_b_proj.weight"
        )

    with pytest.raises(MissingTensor, match=r"kv_b_proj\.weight.*no rule claims 1 tensor: .*kv_b\.weight"):
        converted(edit_tensors(folder, rename))


def test_a_wrong_shape_names_tensor_found_and_expected(tmp_path: Path) -> None:
    folder = edit_config(micro_checkpoint(tmp_path, "v2"), qk_rope_head_dim=18)
    with pytest.raises(
        CheckpointError,
        match=r"kv_a_proj_with_mqa\.weight: shape \(80, 96\), expected \(82, 96\) from config\.json"
        r" \(kv_a_rows, hidden_size\)$",
    ):
        converted(folder)


def test_errors_are_one_line(tmp_path: Path) -> None:
    folder = edit_config(micro_checkpoint(tmp_path, "v2"), num_hidden_layers=2, n_routed_experts=9)
    with pytest.raises(MissingTensor) as caught:
        converted(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


# ---- what to know before running the file


@pytest.mark.parametrize(
    ("style", "changes", "words"),
    [
        ("v2-lite", {"num_hidden_layers": 3}, "only when it has 26 or 27 layers; this one has 3"),
        ("v2", {"num_hidden_layers": 27}, "takes a model of 27 layers for one without q_lora_rank"),
        ("v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "4 groups of experts"),
        ("v2", {"norm_topk_prob": True}, "does not normalise expert weights"),
        ("v2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "takes mscale for equal"),
        ("v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ],
)
def test_what_llama_cpp_does_otherwise_is_noted(style: str, changes: dict[str, Any], words: str) -> None:
    config = DeepseekConfig.from_dict(STYLES[style] | changes)
    (note,) = ARCHITECTURE.notes(config, LatentOptions())
    assert words in note


@pytest.mark.parametrize("style", STYLES)
def test_the_published_habits_need_no_note(style: str) -> None:
    assert ARCHITECTURE.notes(DeepseekConfig.from_dict(STYLES[style]), LatentOptions()) == ()


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, (4, 2)),
        # The model picks freely, and llama.cpp would restrict by groups (or stop, when all may be used).
        ({"topk_method": "greedy", "n_group": 4, "topk_group": 2}, (1, 1)),
        ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 4}, (1, 1)),
        ({"n_group": None, "topk_group": None}, None),
    ],
)
def test_groups_are_written_where_they_restrict(changes: dict[str, Any], groups: Any, tmp_path: Path) -> None:
    metadata = converted(micro_checkpoint(tmp_path, "v2", **changes)).metadata
    found = [metadata.get(f"deepseek2.{key}") for key in ("expert_group_count", "expert_group_used_count")]
    assert tuple(value.data for value in found if value is not None) == (groups or ())


@pytest.mark.parametrize(("style", "gating"), [("v3", 2), ("v2", 1)])
def test_gating_follows_the_architecture_when_config_json_is_silent(
    style: str, gating: int, tmp_path: Path
) -> None:
    folder = micro_checkpoint(tmp_path, style)
    edit_config(folder, lambda config: [config.pop(key) for key in ("scoring_func", "topk_method")])
    conversion = converted(folder)
    assert conversion.metadata["deepseek2.expert_gating_func"].data == gating
    assert ("blk.1.exp_probs_b.bias" in by_name(conversion)) == (style == "v3")


# ---- the registry


def test_every_architecture_is_registered_under_its_own_names() -> None:
    for name in supported():
        assert with_head(name, find_architecture({"architectures": [name]}).hf_names)
    assert set(ARCHITECTURE.hf_names) <= set(supported())


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedCheckpoint, match="BloomForCausalLM, expected one of DeepseekV2ForCausalLM"
    ):
        find_architecture({"architectures": ["BloomForCausalLM"]}, "folder/config.json")
    for value in ({}, {"architectures": []}, {"architectures": "x"}, {"architectures": [3]}):
        with pytest.raises(BadConfig, match=r"folder/config\.json: .*architectures"):
            find_architecture(value, "folder/config.json")


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="MLA layout 'flat'"):
        converted(micro_checkpoint(tmp_path, "v2"), mla="flat")
