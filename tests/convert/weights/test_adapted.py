"""A checkpoint read with an adapter is the checkpoint into which the adapter was merged beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.checkpoint.adapted_folder import AdaptedFolder
from convert.pipeline import open_conversion
from gguf_tools import open_gguf
from gguf_tools.errors import BadArgument, BadConfig, BadRequest, CheckpointError, OutputError
from tests.naive import adapters
from tests.support.adapters import numbers, pair_of, write_adapter
from tests.support.checkpoints import (
    edit_config,
    edit_tensors,
    micro_checkpoint,
    read_tensors,
    to_fp8,
)
from tests.support.tokenizer_files import VOCAB_SIZES, copy_tokenizer

LAYER = "model.layers.1"
Q, KV_B = f"{LAYER}.self_attn.q_b_proj", f"{LAYER}.self_attn.kv_b_proj"
EXPERTS = f"{LAYER}.mlp.experts"
SIZES = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZES["tiny"]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return micro_checkpoint(tmp_path / "base", "v2", **SIZES)


def everything(folder: Any) -> dict[str, np.ndarray]:
    """Return all tensors that a folder becomes, float32."""
    with open_conversion(folder) as conversion:
        return {
            each.name: each.read_rows(0, int(np.prod(each.shape[:-1]))).astype(np.float32)
            for each in conversion.tensors
        }


def compare(base: Path, adapter: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Compare the base with the adapter to the base as it is after `change`."""
    found = everything(AdaptedFolder(base, adapter))
    edit_tensors(base, change)
    expected = everything(base)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


def merge_into(name: str, tensors: Mapping[str, np.ndarray], **how: Any) -> Callable[[dict[str, Any]], None]:
    """Return the change that merges a module's two factors."""
    module = name.removesuffix(".weight")
    a, b = (tensors[f"{module}.lora_{side}.weight"] for side in "AB")

    def change(weights: dict[str, np.ndarray]) -> None:
        weights[name] = adapters.merged(weights[name], a, b, **({"alpha": 6} | how)).astype(np.float32)

    return change


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("module", [Q, KV_B, f"{EXPERTS}.1.down_proj", "lm_head"])
def test_factors_are_added(module: str, dtype: Any, base: Path, tmp_path: Path) -> None:
    tensors = pair_of(base, module, dtype=dtype)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    compare(base, adapter, merge_into(f"{module}.weight", tensors))


@pytest.mark.parametrize(
    ("config", "how", "rank"),
    [
        ({"use_rslora": True}, {"rslora": True}, 4),
        ({"alpha_pattern": {"layers.1.self_attn.q_b_proj": 9}}, {"alpha": 9}, 4),
        ({"alpha_pattern": {"layers.0.*": 9}}, {}, 4),
        ({"rank_pattern": {"q_b_proj": 2}, "alpha_pattern": {".*_proj": 3}}, {"alpha": 3}, 2),
    ],
)
def test_scales(config: dict[str, Any], how: dict[str, Any], rank: int, base: Path, tmp_path: Path) -> None:
    tensors = pair_of(base, Q, rank)
    compare(
        base,
        write_adapter(tmp_path / "adapter", tensors, **config),
        merge_into(f"{Q}.weight", tensors, **how),
    )


def test_dora_sets_the_length_of_outputs(base: Path, tmp_path: Path) -> None:
    tensors = pair_of(base, Q)
    magnitude = np.abs(numbers(len(tensors[f"{Q}.lora_B.weight"])))
    stored = {**tensors, f"{Q}.lora_magnitude_vector": magnitude}
    adapter = write_adapter(tmp_path / "adapter", stored, use_dora=True)
    compare(base, adapter, merge_into(f"{Q}.weight", tensors, magnitude=magnitude))


@pytest.mark.parametrize("is_dora", [False, True])
def test_embeddings_are_turned(is_dora: bool, base: Path, tmp_path: Path) -> None:
    n_tokens, size = read_tensors(base)["model.embed_tokens.weight"].shape
    a, b, magnitude = numbers(4, n_tokens), numbers(size, 4), np.abs(numbers(size)) if is_dora else None
    tensors = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    if magnitude is not None:
        tensors["model.embed_tokens.lora_magnitude_vector.weight"] = magnitude

    def change(weights: dict[str, np.ndarray]) -> None:
        turned = adapters.merged(weights["model.embed_tokens.weight"].T, a, b, alpha=6, magnitude=magnitude)
        weights["model.embed_tokens.weight"] = turned.T.astype(np.float32)

    compare(base, write_adapter(tmp_path / "adapter", tensors, use_dora=is_dora), change)


def test_stacks_are_taken_apart_into_experts(base: Path, tmp_path: Path) -> None:
    """Two stacks of one module differ by their sizes alone; their names say which was wrapped first."""
    weights = read_tensors(base)
    n_experts = sum(name.startswith(f"{EXPERTS}.") for name in weights) // 3
    width, hidden = weights[f"{EXPERTS}.0.gate_proj.weight"].shape
    rank = 2 * n_experts
    gate_up, down = (
        (numbers(rank, hidden), numbers(2 * width, rank)),
        (numbers(rank, width), numbers(hidden, rank)),
    )
    stored = {
        f"{EXPERTS}.{inner}lora_{side}.weight": factor
        for inner, factors in (("base_layer.", gate_up), ("", down))
        for side, factor in zip("AB", factors, strict=True)
    }
    config = {"r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapter = write_adapter(tmp_path / "adapter", stored, **config)

    def change(tensors: dict[str, np.ndarray]) -> None:
        def of(part: str) -> np.ndarray:
            names = [f"{EXPERTS}.{expert}.{part}.weight" for expert in range(n_experts)]
            return np.stack([tensors[name].astype(np.float32) for name in names])

        both = np.concatenate([of("gate_proj"), of("up_proj")], axis=1)
        both = adapters.merged(both, *gate_up, alpha=6, n_mats=n_experts)
        parts = {"gate_proj": both[:, :width], "up_proj": both[:, width:]}
        parts["down_proj"] = adapters.merged(of("down_proj"), *down, alpha=6, n_mats=n_experts)
        for part, stack in parts.items():
            for expert in range(n_experts):
                tensors[f"{EXPERTS}.{expert}.{part}.weight"] = stack[expert].astype(np.float32)

    compare(base, adapter, change)


def test_weights_that_are_stored_anew(base: Path, tmp_path: Path) -> None:
    anew = {"lm_head.weight": numbers(*read_tensors(base)["lm_head.weight"].shape)}
    anew[f"{LAYER}.input_layernorm.weight"] = numbers(
        *read_tensors(base)[f"{LAYER}.input_layernorm.weight"].shape
    )
    compare(base, write_adapter(tmp_path / "adapter", anew), lambda weights: weights.update(anew))


def test_rows_of_some_tokens(base: Path, tmp_path: Path) -> None:
    rows = numbers(2, read_tensors(base)["model.embed_tokens.weight"].shape[1])
    name = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    adapter = write_adapter(tmp_path / "adapter", {name: rows}, trainable_token_indices=[9, 2])

    def change(weights: dict[str, np.ndarray]) -> None:
        embeddings = weights["model.embed_tokens.weight"].astype(np.float32)
        embeddings[[9, 2]] = rows
        weights["model.embed_tokens.weight"] = embeddings

    compare(base, adapter, change)


def test_embeddings_with_more_tokens_bring_their_number_and_tokenizer(base: Path, tmp_path: Path) -> None:
    _, size = read_tensors(base)["lm_head.weight"].shape
    n_tokens = SIZES["vocab_size"] + 2
    anew = {name: numbers(n_tokens, size) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    adapter = write_adapter(tmp_path / "adapter", anew)
    copy_tokenizer("tiny", adapter)
    convert.convert(base, tmp_path / "grown.gguf", "f32", lora=adapter)
    with open_gguf(tmp_path / "grown.gguf") as file:
        assert file.tensors["token_embd.weight"].shape == (n_tokens, size)
        assert len(file.get("tokenizer.ggml.tokens")) == n_tokens


@pytest.mark.parametrize("is_copy", [False, True])
def test_an_output_matrix_of_its_own_ends_the_tie(is_copy: bool, base: Path, tmp_path: Path) -> None:
    edit_tensors(base, lambda weights: weights.pop("lm_head.weight"))
    edit_config(base, tie_word_embeddings=True)
    shape = read_tensors(base)["model.embed_tokens.weight"].shape
    anew = {"model.embed_tokens.weight": numbers(*shape)}
    anew["lm_head.weight"] = anew["model.embed_tokens.weight"] if is_copy else numbers(*shape)
    found = everything(AdaptedFolder(base, write_adapter(tmp_path / "adapter", anew)))
    assert ("output.weight" in found) is not is_copy
    if not is_copy:
        np.testing.assert_array_equal(found["output.weight"], anew["lm_head.weight"])


def test_factors_of_a_tied_output_matrix_leave_the_embeddings(base: Path, tmp_path: Path) -> None:
    tensors = pair_of(base, "lm_head")
    edit_tensors(base, lambda weights: weights.pop("lm_head.weight"))
    edit_config(base, tie_word_embeddings=True)
    embeddings = read_tensors(base)["model.embed_tokens.weight"].astype(np.float32)
    found = everything(AdaptedFolder(base, write_adapter(tmp_path / "adapter", tensors)))
    a, b = tensors.values()
    np.testing.assert_array_equal(found["token_embd.weight"], embeddings)
    np.testing.assert_allclose(found["output.weight"], adapters.merged(embeddings, a, b, alpha=6), atol=1e-6)


def test_a_quantized_base_is_decoded_first(base: Path, tmp_path: Path) -> None:
    to_fp8(base, (32, 32))
    tensors = pair_of(base, KV_B)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with convert.open_checkpoint(base) as weights:
        decoded = {name: weights.read(name) for name in weights.names()}
    found = everything(AdaptedFolder(base, adapter))
    merge_into(f"{KV_B}.weight", tensors)(decoded)
    edit_config(base, lambda config: config.pop("quantization_config"))
    edit_tensors(base, lambda stored: (stored.clear(), stored.update(decoded)))
    for name, tensor in everything(base).items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


def test_any_rows_are_those_of_the_whole(base: Path, tmp_path: Path) -> None:
    tensors = {**pair_of(base, Q), **pair_of(base, f"{EXPERTS}.0.up_proj")}
    folder = AdaptedFolder(base, write_adapter(tmp_path / "adapter", tensors))
    with open_conversion(folder) as conversion:
        for tensor in conversion.tensors:
            n_rows = int(np.prod(tensor.shape[:-1]))
            whole = tensor.read_rows(0, n_rows)
            some = [tensor.read_rows(row, row + 1) for row in range(0, n_rows, 7)]
            assert np.concatenate(some).tobytes() == np.ascontiguousarray(whole[::7]).tobytes(), tensor.name


def test_a_scale_of_zero_gives_the_base(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", pair_of(base, Q))
    found, expected = everything(AdaptedFolder(base, adapter, 0)), everything(base)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("provenance", [True, False])
def test_another_scale_is_another_file(provenance: bool, base: Path, tmp_path: Path) -> None:
    copy_tokenizer("tiny", base)
    adapter = write_adapter(tmp_path / "adapter", pair_of(base, Q), base_model_name_or_path="someone/else")
    out = tmp_path / "out.gguf"
    made = convert.convert(base, out, lora=adapter, provenance=provenance)
    notes = " ".join(made.preparation.plan.notes)
    assert "merged with the adapter adapter (" in notes
    assert "names someone/else as the adapter's base; this is base" in notes
    with open_gguf(out) as file:
        assert file.tensors["blk.1.attn_q_b.weight"].type.name == "BF16"  # auto: as the base
        assert ("gguf_tools.adapter" in file.metadata) is provenance
    with pytest.raises(OutputError, match="exists already"):
        convert.convert(base, out, lora=adapter, lora_scale=0.5, provenance=provenance)


REFUSALS: Mapping[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "other method": ({"peft_type": "IA3"}, {}, "adapter_config.json: peft_type is 'IA3', expected 'LORA'"),
    "field": ({"use_qalora": True}, {}, "use_qalora is true, which is not read; merge it into the base"),
    "unknown": ({"new_idea": 3}, {}, "new_idea is 3, which is not known, and may change the result"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, "training has changed the base, too; save the"),
    "alpha": ({"lora_alpha": "8"}, {}, "adapter_config.json: lora_alpha is '8', expected a number above 0"),
    "rank": ({"r": 8}, {}, "lora_A.weight: rank 4, expected 8 from adapter_config.json (r, rank_pattern)"),
    "pattern": ({"alpha_pattern": {"(": 3}}, {}, "alpha_pattern: '^(.*"),
    "tokens": (
        {"trainable_token_indices": [10**9]},
        {"model.embed_tokens.token_adapter.trainable_tokens_delta": (1, 64)},
        "trainable_token_indices is [1000000000], expected numbers below",
    ),
    "sizes": ({}, {f"{KV_B}.lora_A.weight": (4, 5), f"{KV_B}.lora_B.weight": (6, 4)}, "to another base"),
    "one factor": ({}, {f"{KV_B}.lora_A.weight": (4, 32)}, "lora_A.weight, expected lora_A.weight, lora_B"),
    "dora": ({"use_dora": True}, {}, "expected lora_A.weight, lora_B.weight, lora_magnitude_vector from"),
    "no such module": (
        {},
        {"model.layers.9.mlp.lora_A.weight": (4, 4), "model.layers.9.mlp.lora_B.weight": (4, 4)},
        "model.layers.9.mlp.lora_B.weight: no weight of",
    ),
    "no such part": ({}, {f"{Q}.lora_C.weight": (4, 4)}, f"{Q}.lora_C.weight: no weight of"),
    "norm": ({}, {f"{LAYER}.input_layernorm.weight": (3,)}, "shape (3,), expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_line(case: str, base: Path, tmp_path: Path) -> None:
    config, others, expected = REFUSALS[case]
    tensors = {**pair_of(base, Q), **{name: numbers(*shape) for name, shape in others.items()}}
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises((CheckpointError, BadConfig)) as caught:
        everything(AdaptedFolder(base, adapter))
    assert expected in str(caught.value)
    assert str(adapter) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_codes_of_an_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.astype(np.uint8) for name, tensor in pair_of(base, Q).items()}
    with pytest.raises(CheckpointError, match="stored as U8, expected F32, F16 or BF16"):
        everything(AdaptedFolder(base, write_adapter(tmp_path / "adapter", tensors)))


def test_folders_and_files_that_are_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"base: no adapter_config.json; lora expects"):
        everything(AdaptedFolder(base, base))
    adapter = write_adapter(tmp_path / "adapter", {})
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, and reading one can run any code"):
        everything(AdaptedFolder(base, adapter))


def test_options_that_do_not_go_together(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="lora_scale scales an adapter, and there is no lora"):
        convert.convert(base, tmp_path / "x.gguf", lora_scale=0.5)
    with pytest.raises(BadRequest, match="vocab_only writes none"):
        convert.convert(base, tmp_path / "x.gguf", vocab_only=True, lora=tmp_path)
