"""DeepSeek V4: its names, FP4 experts and routing tables kept, FP8 as Q8_0; llama.cpp loads the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.errors import (
    BadConfig,
    CheckpointError,
    MissingTensor,
    UnexpectedTensors,
    UnsupportedCheckpoint,
)
from quantize.formats import get_decoder
from tests.support import oracle
from tests.support.checkpoints import (
    Tensors,
    edit_config,
    edit_tensors,
    formula,
    quantize_fp8,
    write_checkpoint,
)

TOKENIZER = Path(__file__).parents[2] / "golden" / "arch" / "models" / "deepseek-v3.2"
VOCAB, HIDDEN, EXPERTS, LAYERS = 576, 128, 4, 4
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32, "o_groups": 2, "sliding_window": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "compress_rope_theta": 160000, "compress_ratios": [0, 0, 4, 128, 0], "max_position_embeddings": 4096,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "bos_token_id": 556,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "beta_fast": 32,
                     "beta_slow": 1},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "shared_experts.w1", "shared_experts.w2", "shared_experts.w3")


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,), "head.weight": (VOCAB, HIDDEN),
        "hc_head_fn": (4, 4 * HIDDEN), "hc_head_base": (4,), "hc_head_scale": (1,),
        "mtp.0.norm.weight": (HIDDEN,),
    }  # fmt: skip
    for layer in range(LAYERS):
        attention: dict[str, tuple[int, ...]] = {
            "attn_sink": (4,), "wq_a.weight": (64, HIDDEN), "q_norm.weight": (64,), "wq_b.weight": (256, 64),
            "wkv.weight": (64, HIDDEN), "kv_norm.weight": (64,), "wo_a.weight": (64, 128),
            "wo_b.weight": (HIDDEN, 64),
        }  # fmt: skip
        ratio = CONFIG["compress_ratios"][layer]
        if ratio:
            cols = 128 if ratio == 4 else 64
            attention |= {
                "compressor.ape": (ratio, cols), "compressor.wkv.weight": (cols, HIDDEN),
                "compressor.wgate.weight": (cols, HIDDEN), "compressor.norm.weight": (64,),
            }  # fmt: skip
        if ratio == 4:
            attention |= {
                "indexer.wq_b.weight": (256, 64), "indexer.weights_proj.weight": (4, HIDDEN),
                "indexer.compressor.ape": (4, 128), "indexer.compressor.wkv.weight": (128, HIDDEN),
                "indexer.compressor.wgate.weight": (128, HIDDEN), "indexer.compressor.norm.weight": (64,),
            }  # fmt: skip
        found |= {f"layers.{layer}.attn.{name}": shape for name, shape in attention.items()}
        found |= {f"layers.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        for part in ("attn", "ffn"):
            sizes = {"fn": (24, 4 * HIDDEN), "base": (24,), "scale": (3,)}
            found |= {f"layers.{layer}.hc_{part}_{name}": shape for name, shape in sizes.items()}
        found[f"layers.{layer}.ffn.gate.weight"] = (EXPERTS, HIDDEN)
        found[f"layers.{layer}.ffn.gate.{'tid2eid' if layer < 2 else 'bias'}"] = (
            (VOCAB, 2) if layer < 2 else (EXPERTS,)
        )
        for block in ("shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))):
            for part, shape in (("w1", (64, HIDDEN)), ("w2", (HIDDEN, 64)), ("w3", (64, HIDDEN))):
                found[f"layers.{layer}.ffn.{block}.{part}.weight"] = shape
    return found


def tensors() -> Tensors:
    """Return the tensors as they are published: FP8 and FP4 with scales, tables, F32 and BF16."""
    stored: Tensors = {}
    rng = np.random.default_rng(4)
    for seed, (name, shape) in enumerate(shapes().items()):
        values, stem = formula(shape, seed), name.removesuffix(".weight")
        if name.endswith("tid2eid"):
            stored[name] = rng.integers(0, EXPERTS, shape)
        elif ".experts." in name:
            stored[name] = rng.integers(0, 256, (shape[0], shape[1] // 2), np.uint8).view(np.int8)
            scale = rng.integers(118, 122, (shape[0], shape[1] // 32), np.uint8)
            stored[f"{stem}.scale"] = scale.view(ml_dtypes.float8_e8m0fnu)
        elif stem.endswith(FP8):
            codes, scale = quantize_fp8(values, (128, 128))
            stored[name], stored[f"{stem}.scale"] = codes, scale.astype(ml_dtypes.float8_e8m0fnu)
        elif "hc_" in name or name.endswith(("ape", "bias", "sink", "wgate.weight")):
            stored[name] = values
        else:
            stored[name] = values.astype(ml_dtypes.bfloat16)
    return stored


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("v4"), CONFIG, tensors())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    return path


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Return the codes of FP4, low halves first."""
    data = codes.view(np.uint8)
    return np.stack((data & 15, data >> 4), -1).reshape(len(data), -1)


@pytest.mark.parametrize("outtype", ["bf16", "q8_0", "f32"])
def test_types_are_those_of_the_checkpoint(outtype: str, folder: Path, tmp_path: Path) -> None:
    convert.convert(folder, tmp_path / "v4.gguf", outtype=outtype)
    stored = tensors()
    with open_gguf(tmp_path / "v4.gguf") as file:
        types = {name: info.type.name for name, info in file.tensors.items()}
        assert file.get("general.file_type") == 38
        assert [types[f"blk.2.{name}.weight"] for name in (
            "attn_q_a", "attn_output_b", "ffn_gate_shexp", "attn_compressor_kv", "ffn_up_exps", "hc_attn_fn",
            "attn_compressor_gate", "indexer.proj", "ffn_gate_inp", "attn_norm", "attn_sinks",
        )] == ["Q8_0"] * 4 + ["MXFP4", "F32", "F32"] + ["BF16"] * 2 + ["F32"] * 2  # fmt: skip
        assert (types["token_embd.weight"], types["blk.0.ffn_gate_tid2eid.weight"]) == ("BF16", "I32")
        # Tables first, then the stacks of all layers.
        assert list(types)[:5] == [
            "blk.0.ffn_gate_tid2eid.weight", "blk.1.ffn_gate_tid2eid.weight", "blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_down_exps.weight", "blk.0.ffn_up_exps.weight",
        ]  # fmt: skip
        table = file.raw("blk.1.ffn_gate_tid2eid.weight").view(np.int32).reshape(VOCAB, 2)
        assert (table == stored["layers.1.ffn.gate.tid2eid"]).all()
        blocks = file.raw("blk.3.ffn_down_exps.weight").reshape(EXPERTS, HIDDEN, 2, 17)
        codes = nibbles(stored["layers.3.ffn.experts.2.w2.weight"]).reshape(HIDDEN, 2, 32)
        assert (blocks[2, :, :, 1:] == codes[..., :16] | codes[..., 16:] << 4).all()
        assert (blocks[2, :, :, 0] == stored["layers.3.ffn.experts.2.w2.scale"].view(np.uint8)).all()
        weight = stored["layers.0.attn.wq_b.weight"].astype(np.float32)
        scale = stored["layers.0.attn.wq_b.scale"].astype(np.float32)
        decoded = get_decoder(file.tensors["blk.0.attn_q_b.weight"].type)(
            file.raw("blk.0.attn_q_b.weight").reshape(256, -1), 64
        )
        expected = weight * np.repeat(np.repeat(scale, 128, 0), 64, 1)
        assert np.abs(decoded - expected).max() <= np.abs(expected).max() / 127


def test_keys(folder: Path, tmp_path: Path) -> None:
    result = convert.convert(folder, tmp_path / "v4.gguf")
    with open_gguf(tmp_path / "v4.gguf") as file:
        found = {key.removeprefix("deepseek4."): value for key, value in file.metadata.items()}
    # As llama.cpp's converter has it: the ratio of the MTP layer, too, which the file goes without.
    assert list(found["attention.compress_ratios"].plain) == [0, 0, 4, 128, 0]
    assert found["embedding_length_out"].data == 4 * HIDDEN
    assert found["swiglu_clamp_exp"].plain == (10.0,) * LAYERS
    assert (found["expert_gating_func"].data, found["hash_layer_count"].data) == (4, 2)
    assert found["hyper_connection.count"].data == 4
    assert "feed_forward_length" not in found
    assert any(note.startswith("left out 1 tensor (mtp.0") for note in result.preparation.plan.notes)


@pytest.mark.slow
def test_one_pass_keeps_the_tables(folder: Path, tmp_path: Path) -> None:
    convert.convert(folder, tmp_path / "v4.gguf", outtype="Q4_K_M")
    with open_gguf(tmp_path / "v4.gguf") as file:
        assert file.tensors["blk.0.ffn_gate_tid2eid.weight"].type.name == "I32"
        assert file.tensors["blk.0.ffn_down_exps.weight"].type.name in ("Q6_K", "Q8_0", "Q5_0", "Q4_K")


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("outtype", ["auto", "Q4_K_M"])
def test_llama_cpp_loads_it(outtype: str, folder: Path, tmp_path: Path) -> None:
    convert.convert(folder, tmp_path / "v4.gguf", outtype=outtype)
    with oracle.Model(tmp_path / "v4.gguf") as model:
        assert model.n_vocab == VOCAB


REFUSALS: dict[str, tuple[dict[str, Any], Any, type[CheckpointError], str]] = {
    "ratios": ({"compress_ratios": [0, 4]}, None, BadConfig, r"compress_ratios is \[0, 4\], expected a num"),
    "RoPE": ({"rope_scaling": {"type": "spiral"}}, None, UnsupportedCheckpoint, "RoPE of type 'spiral'"),
    "missing": ({}, lambda t: t.pop("layers.2.attn.compressor.ape"), MissingTensor,
                r"missing 1 tensor: layers\.2\.attn\.compressor\.ape"),
    "too many": ({}, lambda t: t.update({"layers.0.attn.other": t["norm.weight"]}), UnexpectedTensors,
                 r"unexpected 1 tensor: layers\.0\.attn\.other"),
    "shape": ({}, lambda t: t.update({"norm.weight": t["norm.weight"][:-1]}), CheckpointError,
              r"norm\.weight: shape \(127,\), expected \(128,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    changes, edit, error, words = REFUSALS[name]
    copy = Path(shutil.copytree(folder, tmp_path / "v4"))
    edit_config(copy, **changes)
    if edit is not None:
        edit_tensors(copy, edit)
    with pytest.raises(error, match=words) as caught:
        convert.convert(copy, tmp_path / "v4.gguf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "v4.gguf").exists()
    json.loads((copy / "config.json").read_text())
