"""Llama, Qwen, gpt-oss and their like: what is particular to converting them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest, ToolkitError
from gguf_tools.format.shards import GGUFSet
from quantize.plan.decide import PlanOptions
from tests.end_to_end.arch_models import GOLDEN, model
from tests.support import oracle
from tests.support.checkpoints import (
    Tensors,
    edit_config,
    edit_tensors,
    load_transformers,
    read_config,
    read_tensors,
    to_fp8,
)
from tests.support.packers import Packed, gptq, pack_projections
from tests.support.scaled_packers import mxfp4

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


def copied(case: str, folder: Path) -> Path:
    return Path(shutil.copytree(model(case), folder / case))


def converted(folder: Path, out: Path, **options: Any) -> GGUFSet:
    convert.convert(folder, out, **{"outtype": "f32", **options})
    return open_gguf(out)


def float32(file: GGUFSet, name: str) -> np.ndarray:
    return file.raw(name).view(np.float32).reshape(file.tensors[name].shape)


# ---- rows that change places


def paired(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows i and i + half of each head side by side, by reshaping."""
    heads = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def as_gptq(module: str, weight: np.ndarray) -> Packed:
    return gptq(weight, 4, np.random.RandomState(5).permutation(weight.shape[1]) // 32)


def as_mxfp4(module: str, weight: np.ndarray) -> Packed:
    return mxfp4(weight)


FORMATS: dict[str, tuple[Callable[[str, np.ndarray], Packed], dict[str, Any]]] = {
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
    "mxfp4": (as_mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_packed_rows_move_as_plain_ones(name: str, tmp_path: Path) -> None:
    folder = copied("llama-r1-distill", tmp_path)
    pack, settings = FORMATS[name]
    pack_projections(folder, tmp_path / "decoded", pack, settings)
    weights = read_tensors(tmp_path / "decoded")
    with converted(folder, tmp_path / "out.gguf") as file:
        for part in ("q", "k"):
            weight = weights[f"model.layers.1.self_attn.{part}_proj.weight"]
            assert np.array_equal(float32(file, f"blk.1.attn_{part}.weight"), paired(weight, 16))
        value = weights["model.layers.1.self_attn.v_proj.weight"]
        assert np.array_equal(float32(file, "blk.1.attn_v.weight"), value)


def test_rows_of_fp8_in_blocks_move_with_their_scales(tmp_path: Path) -> None:
    folder = to_fp8(copied("llama-r1-distill", tmp_path), (24, 40))
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = read_tensors(folder)
    scales = np.kron(stored[name + "_scale_inv"], np.ones((24, 40), np.float32))[:64, :64]
    with converted(folder, tmp_path / "out.gguf") as file:
        weight = stored[name].astype(np.float32) * scales
        assert np.array_equal(float32(file, "blk.0.attn_q.weight"), paired(weight, 16))


def test_biases_of_queries_and_keys_move_with_their_rows(tmp_path: Path) -> None:
    folder = edit_config(copied("llama-r1-distill", tmp_path), attention_bias=True)
    biases = {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": np.arange(rows, dtype=np.float32) + layer
        for layer in range(2)
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))
    }
    edit_tensors(folder, lambda tensors: tensors.update(biases))
    with converted(folder, tmp_path / "out.gguf") as file:
        for part, name in (("q", "attn_q"), ("k", "attn_k")):
            bias = biases[f"model.layers.1.self_attn.{part}_proj.bias"]
            assert np.array_equal(float32(file, f"blk.1.{name}.bias"), paired(bias, 16))
        for part, name in (("v", "attn_v"), ("o", "attn_output")):
            bias = biases[f"model.layers.1.self_attn.{part}_proj.bias"]
            assert np.array_equal(float32(file, f"blk.1.{name}.bias"), bias)


# ---- one pass, experts, tied embeddings


@pytest.mark.parametrize("case", ["llama-r1-distill", "mixtral", "qwen2-r1-distill", "qwen3moe"])
def test_one_pass_equals_two(case: str, tmp_path: Path) -> None:
    folder = model(case)
    converted(folder, tmp_path / "f32.gguf").close()
    quantize.quantize(tmp_path / "f32.gguf", tmp_path / "two.gguf", "Q4_K_M", provenance=False)
    converted(folder, tmp_path / "one.gguf", outtype="Q4_K_M", provenance=False).close()
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def stack_experts(folder: Path) -> None:
    """Store a Qwen's experts as transformers 5 may: gate and up below each other, all experts as one."""

    def edit(tensors: Tensors) -> None:
        for layer in range(2):
            experts = {
                part: [
                    tensors.pop(f"model.layers.{layer}.mlp.experts.{i}.{part}_proj.weight") for i in range(6)
                ]
                for part in ("gate", "up", "down")
            }
            both = [np.concatenate(pair) for pair in zip(experts["gate"], experts["up"], strict=True)]
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(both)
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(experts["down"])

    edit_tensors(folder, edit)


def test_stacked_experts_are_the_same_model(tmp_path: Path) -> None:
    folder = copied("qwen3moe", tmp_path)
    with converted(folder, tmp_path / "one-by-one.gguf") as file:
        expected = {name: file.raw(name).copy() for name in file.tensors}
    stack_experts(folder)
    with converted(folder, tmp_path / "stacked.gguf") as file:
        assert set(file.tensors) == set(expected)
        assert all(np.array_equal(file.raw(name), expected[name]) for name in expected)


def test_a_stack_without_its_other_half_is_missing(tmp_path: Path) -> None:
    folder = copied("qwen3moe", tmp_path)
    stack_experts(folder)
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(ToolkitError, match=r"missing 1 tensor: model\.layers\.1\.mlp\.experts\.down"):
        convert.convert(folder, tmp_path / "out.gguf")


@needs_llama_cpp
def test_plain_experts_of_gpt_oss_are_the_packed_ones(tmp_path: Path) -> None:
    """A finetune stores them transposed, with gate and up in alternate columns; llama.cpp computes with them
    what transformers computes, without the rounding of activations that MXFP4 takes."""
    torch = pytest.importorskip("torch")
    folder = copied("gpt-oss", tmp_path)
    with convert.open_checkpoint(folder) as weights:
        names = [name for name in weights.names() if name.endswith(("gate_up_proj", "down_proj"))]
        plain = {name: weights.read(name).swapaxes(1, 2).copy() for name in names}
    with converted(folder, tmp_path / "packed.gguf", outtype="q8_0") as file:
        assert file.tensors["blk.1.ffn_up_exps.weight"].type.name == "MXFP4"

    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        tensors.update(plain)

    edit_tensors(folder, edit)
    edit_config(folder, lambda config: config.pop("quantization_config"))
    with converted(folder, tmp_path / "plain.gguf") as file:
        assert file.get("general.file_type") == 0
        for layer in range(2):
            both = plain[f"model.layers.{layer}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
            down = plain[f"model.layers.{layer}.mlp.experts.down_proj"].swapaxes(1, 2)
            assert np.array_equal(float32(file, f"blk.{layer}.ffn_gate_exps.weight"), both[:, 0::2])
            assert np.array_equal(float32(file, f"blk.{layer}.ffn_up_exps.weight"), both[:, 1::2])
            assert np.array_equal(float32(file, f"blk.{layer}.ffn_down_exps.weight"), down)
    # llama.cpp rounds the ends of YaRN's ramp whatever the model does.
    edit_config(folder, lambda config: config["rope_scaling"].update(truncate=True))
    ids = np.load(GOLDEN / "logits" / "gpt-oss.npz")["ids"].tolist()
    with torch.no_grad():
        expected = load_transformers(folder)(torch.tensor([ids])).logits[0].numpy()
    with oracle.Model(tmp_path / "plain.gguf") as llama_cpp:
        assert np.abs(llama_cpp.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_model_may_have_an_output_matrix(has_head: bool, tmp_path: Path) -> None:
    folder = edit_config(copied("qwen2-r1-distill", tmp_path), tie_word_embeddings=True)
    if not has_head:
        edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with converted(folder, tmp_path / "out.gguf") as file:
        assert ("output.weight" in file.tensors) == has_head


# ---- what config.json leaves open, and notes


def test_transformers_defaults_are_written(tmp_path: Path) -> None:
    folder = copied("llama-r1-distill", tmp_path)
    for key in ("rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings"):
        edit_config(folder, lambda config, key=key: config.pop(key))
    with converted(folder, tmp_path / "out.gguf") as file:
        assert file.get("llama.rope.freq_base") == 10000.0
        assert file.get("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
        assert file.get("llama.context_length") == 2048
        assert "rope_freqs.weight" not in file.tensors


def notes_of(folder: Path, tmp_path: Path) -> tuple[str, ...]:
    return convert.convert(folder, tmp_path / "out.gguf", outtype="bf16", force=True).preparation.plan.notes


def test_a_sliding_window_gets_a_note(tmp_path: Path) -> None:
    folder = edit_config(copied("mixtral", tmp_path), sliding_window=1024)
    assert [note for note in notes_of(folder, tmp_path) if "the last 1024 positions" in note]
    folder = edit_config(copied("qwen2-r1-distill", tmp_path), use_sliding_window=True, max_window_layers=1)
    assert [note for note in notes_of(folder, tmp_path) if "1 layers of the original see" in note]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_the_file_cannot_hold_gets_a_note(kind: str, tmp_path: Path) -> None:
    folder = edit_config(copied("mixtral", tmp_path), rope_scaling={"type": kind, "factor": 2.0})
    assert [note for note in notes_of(folder, tmp_path) if note.startswith(f"RoPE of type {kind}")]


def test_nfc_gets_a_note(tmp_path: Path) -> None:
    notes = notes_of(model("qwen3moe"), tmp_path)
    assert "normalizer NFC is not applied: llama.cpp's BPE takes text as it is" in notes


def test_notes_of_gpt_oss(tmp_path: Path) -> None:
    notes = notes_of(model("gpt-oss"), tmp_path)
    assert [note for note in notes if note.startswith("ignore_merges is true in tokenizer.json")]
    assert [note for note in notes if note.startswith("YaRN with truncate false: llama.cpp rounds")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1: llama.cpp's qwen3moe"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], expected \[\]"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
    ],
)
def test_what_the_architecture_does_not_compute(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = edit_config(copied("qwen3moe", tmp_path), **change)
    assert read_config(folder)["architectures"] == ["Qwen3MoeForCausalLM"]
    with pytest.raises(ToolkitError, match=words):
        convert.convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


# ---- MTP layers of GLM


def test_the_mtp_layer_of_glm4moe_is_an_option(tmp_path: Path) -> None:
    folder = model("glm4moe-air")
    with converted(folder, tmp_path / "kept.gguf", mtp=True) as file:
        assert file.get("glm4moe.nextn_predict_layers") == 1
        assert "blk.2.nextn.eh_proj.weight" in file.tensors
    with converted(folder, tmp_path / "left-out.gguf", mtp=False) as file:
        assert file.get("glm4moe.block_count") == 2
        assert "glm4moe.nextn_predict_layers" not in file.metadata
        assert not [name for name in file.tensors if name.startswith("blk.2.")]


def test_mtp_of_a_model_without_is_refused(tmp_path: Path) -> None:
    folder = edit_config(copied("glm4moe-air", tmp_path), num_nextn_predict_layers=0)
    edit_tensors(folder, drop_layer_2)
    with converted(folder, tmp_path / "out.gguf") as file:
        assert file.get("glm4moe.nextn_predict_layers") == 0
    with pytest.raises(ToolkitError, match=r"mtp=True: config\.json has no num_nextn_predict_layers"):
        convert.convert(folder, tmp_path / "out.gguf", mtp=True)


def test_a_glm_without_its_mtp_layer_goes_without(tmp_path: Path) -> None:
    folder = copied("glm4moe-air", tmp_path)
    edit_tensors(folder, drop_layer_2)
    with converted(folder, tmp_path / "out.gguf") as file:
        assert file.get("glm4moe.block_count") == 2


def drop_layer_2(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        del tensors[name]


@pytest.mark.parametrize("file_type", ["Q4_K_M", "MXFP4_MOE"])
def test_packed_experts_in_one_pass_are_those_of_two(file_type: str, tmp_path: Path) -> None:
    """llama-quantize encodes MXFP4 experts anew where asked to, and copies them where they stay MXFP4."""
    one, kept, two = (tmp_path / f"{name}.gguf" for name in ("one", "kept", "two"))
    convert.convert(model("gpt-oss"), one, outtype=file_type)
    convert.convert(model("gpt-oss"), kept, outtype="bf16")
    if file_type == "Q4_K_M":
        with pytest.raises(BadRequest, match=r"6 of 41 tensors are quantized already: .*allow_requantize"):
            quantize.quantize(kept, two, file_type)
    quantize.quantize(kept, two, file_type, PlanOptions(allow_requantize=True))
    with open_gguf(one) as a, open_gguf(two) as b, open_gguf(kept) as packed:
        assert list(a.tensors) == list(b.tensors)
        for name in a.tensors:
            assert a.tensors[name].type == b.tensors[name].type
            assert a.raw(name).tobytes() == b.raw(name).tobytes(), name
        experts = [name for name in a.tensors if name.endswith("_exps.weight")]
        same = [name for name in experts if a.raw(name).tobytes() == packed.raw(name).tobytes()]
        assert same == (experts if file_type == "MXFP4_MOE" else [])
