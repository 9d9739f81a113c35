"""Mistral Large 3 in its own format: params.json, its names of weights, FP8 per tensor, tekken.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.architectures.deepseek2.mistral_large3 import canonical_name as deepseek_name
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, BadTokenizer, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format.values import Kind
from tests.convert.tokenizer.small_tokenizers import tekken_json
from tests.support import oracle
from tests.support.checkpoints import formula, write_safetensors

VOCAB = 320
PARAMS: dict[str, Any] = {
    "dim": 96, "n_layers": 3, "n_heads": 4, "hidden_dim": 160, "norm_eps": 1e-6, "vocab_size": VOCAB,
    "q_lora_rank": 56, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "rope_theta": 10000.0, "max_position_embeddings": 2560, "tied_embeddings": False,
    "moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "expert_hidden_dim": 48, "routed_scale": 1.0,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1, "route_every_n": 1,
    },
    "yarn": {"original_max_position_embeddings": 64, "factor": 40, "beta": 32, "alpha": 1},
    "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings": (VOCAB, 96), "norm": (96,), "output": (VOCAB, 96), "vision_encoder.ln_pre": (8,),
        "patch_merger.merging_layer": (8, 8),
    }  # fmt: skip
    for layer in range(3):
        attention = {"wq_a": (56, 96), "q_a_norm": (56,), "wq_b": (192, 56), "wkv_a_with_mqa": (80, 96),
                     "kv_a_norm": (64,), "wkv_b": (224, 64), "wo": (96, 96)}  # fmt: skip
        shapes |= {f"layers.{layer}.attention.{name}": shape for name, shape in attention.items()}
        shapes |= {f"layers.{layer}.attention_norm": (96,), f"layers.{layer}.ffn_norm": (96,)}
        blocks = {"feed_forward": 160} if layer == 0 else {"shared_experts": 48}
        if layer:
            blocks |= {f"experts.{expert}": 48 for expert in range(8)}
            shapes[f"layers.{layer}.gate"] = (8, 96)
        for block, width in blocks.items():
            prefix = f"layers.{layer}.{block}"
            shapes |= {f"{prefix}.w1": (width, 96), f"{prefix}.w2": (96, width), f"{prefix}.w3": (width, 96)}
    return {
        f"{name}.weight": formula(shape, seed).astype(ml_dtypes.bfloat16)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def write(folder: Path, stored: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(PARAMS | changes))
    (folder / "tekken.json").write_text(json.dumps(tekken_json()))
    write_safetensors(
        folder / "consolidated-00001-of-00001.safetensors", tensors() if stored is None else stored
    )
    return folder


def test_names_are_deepseek_s() -> None:
    assert deepseek_name("layers.3.experts.12.w2.weight") == "model.layers.3.mlp.experts.12.down_proj.weight"
    assert deepseek_name("layers.0.feed_forward.w1.weight") == "model.layers.0.mlp.gate_proj.weight"
    assert (
        deepseek_name("layers.1.shared_experts.w3.weight")
        == "model.layers.1.mlp.shared_experts.up_proj.weight"
    )
    assert deepseek_name("layers.1.other.w3.weight") == "layers.1.other.w3.weight"
    assert deepseek_name("vision_encoder.ln_pre.weight") == "vision_encoder.ln_pre.weight"


def test_tensors_and_keys(tmp_path: Path) -> None:
    stored = tensors()
    result = convert.convert(write(tmp_path / "m"), tmp_path / "m.gguf", outtype="bf16")
    with open_gguf(tmp_path / "m.gguf") as file:
        for name, source in (
            ("token_embd", "tok_embeddings"),
            ("blk.0.ffn_gate", "layers.0.feed_forward.w1"),
            ("blk.1.ffn_down_shexp", "layers.1.shared_experts.w2"),
            ("blk.2.attn_q_b", "layers.2.attention.wq_b"),
        ):
            assert file.raw(f"{name}.weight").tobytes() == stored[f"{source}.weight"].tobytes()
        experts = b"".join(stored[f"layers.1.experts.{expert}.w3.weight"].tobytes() for expert in range(8))
        assert file.raw("blk.1.ffn_up_exps.weight").tobytes() == experts
        assert not [name for name in file.tensors if "exp_probs_b" in name]
        found = {key.removeprefix("deepseek2."): value.plain for key, value in file.metadata.items()}
    expected = {
        "expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0,
        "leading_dense_block_count": 1, "attention.temperature_length": 64, "rope.scaling.type": "yarn",
        "rope.scaling.yarn_beta_fast": 32.0, "context_length": 2560, "expert_count": 8,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert found["attention.temperature_scale"] == pytest.approx(0.1)
    assert found["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
    assert [
        note for note in result.preparation.plan.notes if note.startswith("left out 2 tensors (patch_merger")
    ]


def test_tekken_json(tmp_path: Path) -> None:
    convert.convert(write(tmp_path / "m"), tmp_path / "m.gguf", vocab_only=True)
    with open_gguf(tmp_path / "m.gguf") as file:
        keys = {key.removeprefix("tokenizer.ggml."): value.plain for key, value in file.metadata.items()}
        item_of_scores = file.metadata["tokenizer.ggml.scores"].item
    assert (keys["model"], keys["pre"]) == ("gpt2", "tekken")
    assert keys["tokens"][:7] == ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "<SPECIAL_6>")
    assert keys["token_type"][15:17] == (3, 1)
    assert set(keys["scores"]) == {0.0}
    assert [keys[f"{kind}_token_id"] for kind in ("bos", "eos", "unknown", "padding")] == [1, 2, 0, 5]
    assert (keys["add_bos_token"], keys["add_eos_token"]) == (True, False)
    # As llama.cpp's converter has it: tokens stand behind merges and ids, and their scores are integers.
    assert list(keys)[-10:] == [
        "merges", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id", "tokens", "scores",
        "token_type", "add_bos_token", "add_eos_token",
    ]  # fmt: skip
    assert item_of_scores is Kind.INT32
    # All ways of making a token, best first: "t he" before "th e", because t comes before th.
    assert keys["merges"][:6] == ("t h", "h e", "t he", "th e", "Ġ t", "Ġ the")


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_llama_cpp_loads_and_computes_it(tmp_path: Path) -> None:
    convert.convert(write(tmp_path / "m"), tmp_path / "m.gguf", outtype="Q4_K_M")
    with oracle.Model(tmp_path / "m.gguf") as model:
        ids = model.tokenize("the other theme", add_special=True)
        assert ids[0] == 1
        assert np.isfinite(model.logits(ids)).all()


def test_fp8_with_a_scale_per_tensor(tmp_path: Path) -> None:
    plain, stored = tensors(), {}
    for name, weight in tensors().items():
        if re.search(r"\.(w[123]|wo|wq_a|wq_b|wkv_b)\.weight$", name):
            scale = np.float32(np.abs(weight.astype(np.float32)).max() / 448)
            codes = (weight.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[name], plain[name] = codes, codes.astype(np.float32) * scale
            stored[name.replace(".weight", ".qscale_weight")] = np.array(scale)
            stored[name.replace(".weight", ".qscale_act")] = np.array(np.float32(1))
        else:
            stored[name] = weight
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    convert.convert(
        write(tmp_path / "fp8", stored, quantization=quantization), tmp_path / "1.gguf", outtype="f32"
    )
    convert.convert(write(tmp_path / "plain", plain), tmp_path / "2.gguf", outtype="f32")
    with open_gguf(tmp_path / "1.gguf") as one, open_gguf(tmp_path / "2.gguf") as two:
        assert set(one.tensors) == set(two.tensors)
        assert all((one.raw(name) == two.raw(name)).all() for name in one.tensors)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dim": None}, BadConfig, r"params\.json: dim is None, expected a whole number"),
        ({"moe": {"num_experts": 8}}, BadConfig, r"no moe\.num_experts_per_tok"),
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedCheckpoint, "RoPE of type 'spiral'"),
        ({"n_layers": 4}, MissingTensor, r"missing \d+ tensors: model\.layers\.3\."),
        (
            {"vocab_size": 321},
            BadTokenizer,
            r"tekken\.json: 320 tokens, but params\.json says vocab_size 321",
        ),
    ],
)
def test_what_is_wrong_is_named(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    stored = tensors()
    if changes.get("vocab_size"):
        rows = formula((321, 96), 1).astype(ml_dtypes.bfloat16)
        stored |= {"tok_embeddings.weight": rows, "output.weight": rows}
    with pytest.raises(error, match=words) as caught:
        convert.convert(write(tmp_path, stored, **changes), tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_another_cutting_is_refused(tmp_path: Path) -> None:
    folder, content = write(tmp_path), tekken_json()
    content["config"]["pattern"] = r"\w+"
    (folder / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(BadTokenizer, match=r"tekken\.json: pre-tokenizer not recognised"):
        convert.convert(folder, tmp_path / "m.gguf")


def test_a_model_of_mistral_without_experts_is_another_one(tmp_path: Path) -> None:
    params = {key: value for key, value in PARAMS.items() if key != "moe"}
    folder = write(tmp_path)
    (folder / "params.json").write_text(json.dumps(params))
    with pytest.raises(BadConfig, match=r"params\.json: no architectures"):
        convert.convert(folder, tmp_path / "m.gguf")
