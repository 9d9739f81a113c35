"""Ordinary decoders against transformers: logits, gradients, and what llama.cpp's file says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import convert.architectures.llama4 as llama4
from gguf_tools.errors import FormatError, ShapeError, UnexpectedTensors
from imatrix.forward.open import network_of_tensors, open_model
from tests.end_to_end.arch_models import GOLDEN
from tests.imatrix.forward.small_models import CHUNKS, run_all_layers
from tests.support import oracle
from tests.support.decoder_models import (
    MODELS,
    OUR_MODELS,
    SHALLOW_GEMMA3N,
    decoder_model,
    sample_deviation,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import imatrix.forward.layers.attention.delta_net as delta_net  # noqa: E402
import imatrix.forward.layers.attention.mamba2 as mamba2  # noqa: E402
import imatrix.forward.layers.attention.shared_keys as gqa  # noqa: E402
from tests.imatrix.forward.test_differentiate import WeightGradients, differentiate, directions  # noqa: E402

CASES = ("glm4moe-air", "llama-r1-distill", "mixtral", "qwen2-r1-distill", "qwen3-r1-0528", "qwen3moe")
"""Recorded models that llama.cpp computes as transformers does: not gpt-oss, whose YaRN it rounds."""


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    found, expected = found.astype(np.float64).reshape(-1), expected.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("case", CASES)
def test_recorded_logits(case: str, source: str, tmp_path: Path) -> None:
    path = GOLDEN / "models" / case
    if source == "gguf":
        convert.convert(path, tmp_path / "out.gguf", outtype="f32")
        path = tmp_path / "out.gguf"
    golden = np.load(GOLDEN / "logits" / f"{case}.npz")
    with open_model(path) as model:
        logits, _ = run_all_layers(model, golden["ids"][None])
    expected = golden["transformers"]
    assert np.abs(logits[0, -len(expected) :] - expected).max() < 1e-5 * np.abs(expected).max()


ANOTHER_WAY = ("mistral-window", "qwen2-window", "qwen3moe-unnormalised", "gpt-oss-untruncated", "phimoe")
"""Models whose files, as llama.cpp takes them, are not what transformers computes."""


@pytest.mark.parametrize("name", ANOTHER_WAY)
def test_a_folder_is_computed_as_its_file(name: str, tmp_path: Path) -> None:
    original = decoder_model(name, tmp_path / name)
    convert.convert(tmp_path / name, tmp_path / "out.gguf", outtype="f32")
    found = []
    for path in (tmp_path / name, tmp_path / "out.gguf"):
        with open_model(path) as model:
            found.append(run_all_layers(model, CHUNKS)[0])
    with torch.no_grad():
        expected = original(torch.from_numpy(CHUNKS)).logits.numpy()
    assert relative_error(found[0], found[1]) < 1e-6
    assert relative_error(found[0], expected) > 1e-3
    if oracle.available():
        with oracle.Model(tmp_path / "out.gguf") as file:
            assert relative_error(found[1][0], file.logits(CHUNKS[0].tolist())) < 1e-5


EQUAL = [
    pytest.param(name, marks=pytest.mark.slow) if name == "exaone4-windows" else name
    for name in (*MODELS, *OUR_MODELS)
    if name not in ANOTHER_WAY
]
"""Models that every run computes, but for one of 64 layers."""


LIMITS = {"gemma3n": 3e-4}
"""Largest difference of a model of 22 layers, which magnify what is rounded: float64 is as far away."""


@pytest.mark.parametrize("name", EQUAL)
def test_logits_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "std", sample_deviation)
    original = decoder_model(name, tmp_path / name)
    with torch.no_grad():
        expected = original(torch.from_numpy(CHUNKS)).logits.numpy()
    with open_model(tmp_path / name) as model:
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < LIMITS.get(name, 1e-5)


@pytest.mark.parametrize("name", ["mistral-window", "gpt-oss", "qwen3", "minimax-m3-chosen", "llama4"])
def test_queries_in_blocks_see_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder_model(name, tmp_path / name)
    with open_model(tmp_path / name) as model:
        expected, _ = run_all_layers(model, CHUNKS)
        monkeypatch.setattr(gqa, "QUERY_BLOCK", 7)
        monkeypatch.setattr(gqa, "SCORES_BYTES", 1)
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-6


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Have Llama 4 cut texts in chunks of 16 positions; return what transformers' class takes for that."""
    monkeypatch.setattr(llama4, "_CHUNK", 16)
    return {"attention_chunk_size": 16, "floor_scale": 16}


def test_chunks_of_positions_are_those_of_transformers(
    tmp_path: Path, small_chunks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = decoder_model("llama4", tmp_path / "m", **small_chunks)
    with torch.no_grad():
        expected = original(torch.from_numpy(CHUNKS)).logits.numpy()
    for block in (gqa.QUERY_BLOCK, 7):
        monkeypatch.setattr(gqa, "QUERY_BLOCK", block)
        with open_model(tmp_path / "m") as model:
            logits, _ = run_all_layers(model, CHUNKS)
        assert relative_error(logits, expected) < 1e-5


def differentiated(name: str, tmp_path: Path, **others: Any) -> tuple[Any, WeightGradients]:
    """Compare gradients at the embeddings; return the model of transformers, and ours of weights."""
    original: Any = decoder_model(name, tmp_path / name, **others).requires_grad_()
    kept: list[Any] = []
    ends = {"nemotron": "norm_f", "qwen4exp": "hyper_connection_mixer"}
    text = getattr(original.model, "language_model", original.model)
    norm = getattr(text, ends.get(name.partition("-")[0], "norm"))
    norm.register_forward_hook(lambda _m, _i, out: kept.append(out))
    embed = original.get_input_embeddings()
    ids = torch.from_numpy(CHUNKS)
    embeddings = embed(ids).detach().requires_grad_()
    beside = {"per_layer_inputs": text.get_per_layer_inputs(ids)} if name == "gemma3n" else {}
    text(inputs_embeds=embeddings, **beside)
    (last,) = kept
    last.backward(directions(CHUNKS.size, last.shape[-1]).view_as(last))
    observer = WeightGradients()
    with open_model(tmp_path / name) as model:
        found = differentiate(model, observer, behind_end=True)
    scale = getattr(embed, "scalar_embed_scale", 1.0)
    assert relative_error(found, scale * embeddings.grad.numpy()) < 1e-4
    return original, observer


def assert_gradients(observer: WeightGradients, linears: dict[str, Any]) -> None:
    """Compare gradients of matrices, by our names without ".weight", with those of transformers' layers."""
    for ours, linear in linears.items():
        assert relative_error(observer.of(f"{ours}.weight"), linear.weight.grad.numpy()) < 1e-4, ours


@pytest.mark.parametrize(
    "name",
    [
        "qwen2-tied",
        "qwen3moe",
        "glm4moe-normed",
        "gpt-oss",
        "minimax-m2",
        "minimax-m3-chosen",
        "mistral",
        "olmo3",
    ],
)
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    original, observer = differentiated(name, tmp_path)
    attention = original.model.layers[1].self_attn
    for part, ours in (("q_proj", "attn_q"), ("v_proj", "attn_v"), ("o_proj", "attn_output")):
        if name == "mistral" and ours == "attn_q":
            continue  # its rows stand elsewhere in the file
        expected = getattr(attention, part).weight.grad.numpy()
        assert relative_error(observer.of(f"blk.1.{ours}.weight"), expected) < 1e-4, ours


def test_gradients_of_experts_whose_inputs_are_weighed(tmp_path: Path, small_chunks: dict[str, int]) -> None:
    original, observer = differentiated("llama4", tmp_path, **small_chunks)
    layer, last = original.model.layers[1], original.model.layers[3]
    pairs = {"blk.1.attn_q": layer.self_attn.q_proj, "blk.3.attn_k": last.self_attn.k_proj,
             "blk.1.ffn_up_shexp": layer.feed_forward.shared_expert.up_proj}  # fmt: skip
    assert_gradients(observer, pairs)
    down = layer.feed_forward.experts.down_proj.grad.transpose(1, 2).flatten(0, 1)
    assert relative_error(observer.of("blk.1.ffn_down_exps.weight"), down.numpy()) < 1e-4


def test_gradients_of_fused_matrices_equal_those_of_transformers(tmp_path: Path) -> None:
    original, observer = differentiated("phi4-mini", tmp_path)
    layer = original.model.layers[1]
    for ours, linear in {"attn_qkv": layer.self_attn.qkv_proj, "ffn_up": layer.mlp.gate_up_proj}.items():
        assert relative_error(observer.of(f"blk.1.{ours}.weight"), linear.weight.grad.numpy()) < 1e-4, ours


def test_gradients_of_mamba_2_equal_those_of_transformers(tmp_path: Path) -> None:
    original, observer = differentiated("granite4-h", tmp_path)
    mamba, last = original.model.layers[1].mamba, original.model.layers[3]
    pairs = {"blk.1.ssm_in": mamba.in_proj, "blk.1.ssm_out": mamba.out_proj}
    pairs |= {"blk.3.attn_v": last.self_attn.v_proj, "blk.3.ffn_down_shexp": last.shared_mlp.output_linear}
    assert_gradients(observer, pairs)


@pytest.mark.parametrize("name", ["nemotron-3", "nemotron-3-super"])
def test_gradients_of_layers_of_one_thing_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    original, observer = differentiated(name, tmp_path)
    mamba, experts, attention, _ = (layer.mixer for layer in original.model.layers)
    pairs = {"blk.0.ssm_in": mamba.in_proj, "blk.2.attn_v": attention.v_proj,
             "blk.1.ffn_up_shexp": experts.shared_experts.up_proj,
             "blk.1.ffn_down_shexp": experts.shared_experts.down_proj}  # fmt: skip
    if name == "nemotron-3-super":  # the sum over tokens and experts of what these make
        pairs["blk.1.ffn_latent_down"] = experts.fc1_latent_proj
        pairs["blk.1.ffn_latent_up"] = experts.fc2_latent_proj
    assert_gradients(observer, pairs)
    for part in ("up", "down"):
        expected = getattr(experts.experts, f"{part}_proj").grad.numpy()
        assert relative_error(observer.of(f"blk.1.ffn_{part}_exps.weight"), expected) < 1e-4, part


@pytest.mark.slow
def test_gradients_of_kimi_delta_attention_equal_those_of_transformers(tmp_path: Path) -> None:
    original, observer = differentiated("kimi-linear", tmp_path)
    delta, latent = (original.model.layers[number].self_attn for number in (2, 3))
    pairs = {f"blk.2.attn_{part}": getattr(delta, f"{part}_proj") for part in "qkv"}
    pairs |= {f"blk.2.ssm_f_{half}": getattr(delta.forget_gate, f"f_{half}_proj") for half in "ab"}
    pairs |= {f"blk.2.ssm_g_{half}": getattr(delta, f"g_{half}_proj") for half in "ab"}
    pairs |= {
        "blk.2.ssm_beta": delta.b_proj,
        "blk.2.attn_output": delta.o_proj,
        "blk.3.attn_q": latent.q_proj,
    }
    assert_gradients(observer, pairs)


@pytest.mark.slow
def test_gradients_of_a_shared_choice_equal_those_of_transformers(tmp_path: Path) -> None:
    original, observer = differentiated("glm5-next-shared", tmp_path)
    chooses, takes_over = (original.model.language_model.layers[number] for number in (1, 2))
    pairs = {"blk.1.attn_q_b": chooses.self_attn.q_b_proj, "blk.2.attn_q_b": takes_over.self_attn.q_b_proj,
             "blk.2.attn_output": takes_over.self_attn.o_proj,
             "blk.2.ffn_down_shexp": takes_over.mlp.shared_experts.down_proj}  # fmt: skip
    assert_gradients(observer, pairs)


@pytest.mark.slow
def test_gradients_of_single_matrices_and_gates_of_heads_equal_those_of_transformers(tmp_path: Path) -> None:
    original, observer = differentiated("ling3-compressed", tmp_path)
    delta, latent = (original.model.layers[number].self_attn for number in (2, 3))
    pairs = {"blk.2.ssm_f_a": delta.forget_gate.f_proj, "blk.2.ssm_g_a": delta.g_proj,
             "blk.2.ssm_beta": delta.b_proj, "blk.3.attn_gate": latent.g_proj,
             "blk.3.attn_output": latent.o_proj}  # fmt: skip
    assert_gradients(observer, pairs)


@pytest.mark.slow
def test_blocks_of_kimi_delta_attention_hand_on_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder_model("kimi-linear", tmp_path / "m")
    with open_model(tmp_path / "m") as model:
        expected, _ = run_all_layers(model, CHUNKS)
        monkeypatch.setattr(delta_net, "_SMALL_BLOCK", 7)
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-5


def test_blocks_of_a_mamba_2_hand_on_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder_model("granite4-h", tmp_path / "m")
    with open_model(tmp_path / "m") as model:
        expected, _ = run_all_layers(model, CHUNKS)
        monkeypatch.setattr(mamba2, "_BLOCK", 7)
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4-experts", "gemma4-small"])
def test_gradients_of_gemmas_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    original, observer = differentiated(name, tmp_path)
    layer, last = original.model.layers[1], original.model.layers[-1]
    pairs = {"blk.1.attn_q": layer.self_attn.q_proj, "blk.1.attn_k": layer.self_attn.k_proj}
    pairs |= {"blk.1.ffn_down": layer.mlp.down_proj}
    if name == "gemma4-small":
        pairs |= {"blk.1.inp_gate": layer.per_layer_input_gate, "blk.5.proj": last.per_layer_projection}
    assert_gradients(observer, pairs)
    if name == "gemma4-experts":
        both, down = last.experts.gate_up_proj.grad.flatten(0, 1), last.experts.down_proj.grad.flatten(0, 1)
        assert relative_error(observer.of("blk.5.ffn_gate_up_exps.weight"), both.numpy()) < 1e-4
        assert relative_error(observer.of("blk.5.ffn_down_exps.weight"), down.numpy()) < 1e-4


def test_gradients_of_a_gemma_3n_equal_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer makes the streams, and the others correct them."""
    monkeypatch.setattr(torch, "std", sample_deviation)
    original, observer = differentiated("gemma3n", tmp_path, **SHALLOW_GEMMA3N)
    first, last = original.model.layers
    assert_gradients(observer, {
        "blk.0.attn_q": first.self_attn.q_proj, "blk.0.ffn_gate": first.mlp.gate_proj,
        "blk.0.laurel_l": first.laurel.linear_left, "blk.0.altup_router": first.altup.modality_router,
        "blk.1.attn_v": last.self_attn.v_proj, "blk.1.inp_gate": last.per_layer_input_gate,
        "blk.1.proj": last.per_layer_projection,
    })  # fmt: skip


@pytest.mark.parametrize("name", ["qwen35-ungrouped", "qwen35moe", "qwen3next", "qwen4exp"])
def test_gradients_of_delta_nets_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    original, observer = differentiated(name, tmp_path)
    net, attention = original.model.layers[1].linear_attn, original.model.layers[3].self_attn
    pairs = {"blk.3.attn_q": attention.q_proj, "blk.3.attn_output": attention.o_proj}
    if name == "qwen35-ungrouped":  # rows and columns of the others stand elsewhere in the file
        pairs |= {"blk.1.attn_qkv": net.in_proj_qkv, "blk.1.attn_gate": net.in_proj_z}
        pairs |= {"blk.1.ssm_alpha": net.in_proj_a, "blk.1.ssm_beta": net.in_proj_b}
    if name == "qwen3next":
        pairs |= {"blk.1.ssm_ba": net.in_proj_ba}
    if name == "qwen4exp":
        strands, ngrams = original.model.layers[2].mlp_hyper_connection, original.model.layers[1].ple
        pairs |= {"blk.2.hc_ffn_down": strands.input_mix_weight_down, "blk.1.ple_key": ngrams.key_proj}
        pairs |= {"blk.2.hc_ffn_up": strands.input_mix_weight_up, "blk.1.ple_value": ngrams.value_proj}
        pairs |= {"blk.2.hc_ffn_inject": strands.block_inject_weight}
    elif name != "qwen35moe":
        pairs |= {"blk.1.ssm_out": net.out_proj}
    assert_gradients(observer, pairs)


def test_blocks_of_a_delta_net_hand_on_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder_model("qwen35", tmp_path / "m")
    with open_model(tmp_path / "m") as model:
        expected, _ = run_all_layers(model, CHUNKS)
        monkeypatch.setattr(delta_net, "_BLOCK", 7)
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-5


def test_tensors_that_no_layer_can_use_are_refused(tmp_path: Path) -> None:
    decoder_model("gemma3n", tmp_path / "m", **SHALLOW_GEMMA3N)
    with open_model(tmp_path / "m") as model:
        tensors: dict[str, Any] = dict(model.tensors)
        assert list(model.findings(16)) == []  # of a folder's keys, as it has none
        for name, shape, found in (
            ("per_layer_token_embd.weight", (560, 512), "560 x 512, expected 576 x 512"),
            ("per_layer_token_embd.weight", (576, 256), "576 x 256, expected 576 x 512"),
            ("per_layer_model_proj.weight", (256, 64), "256 x 64, expected 512 x 64"),
        ):
            changed = {**tensors, name: replace(tensors[name], shape=shape)}
            with pytest.raises(ShapeError, match=f"{name}: found shape {found}"):
                network_of_tensors(model.path, model.metadata, changed)
        for name, like in (("inp_gate", "per_layer_proj_norm"), ("altup_correct_coef", "blk.0.attn_norm")):
            changed = {**tensors, f"blk.0.{name}.bias": tensors[f"{like}.weight"]}
            with pytest.raises(UnexpectedTensors, match=rf"no use for \(blk\.0\.{name}\.bias\)"):
                network_of_tensors(model.path, model.metadata, changed)


def test_a_file_with_impossible_sizes_is_refused(tmp_path: Path) -> None:
    decoder_model("qwen3", tmp_path / "qwen3")
    convert.convert(tmp_path / "qwen3", tmp_path / "out.gguf", outtype="f32")
    data = (tmp_path / "out.gguf").read_bytes()
    key = b"qwen3.attention.head_count_kv\x04\x00\x00\x00"
    assert key in data
    (tmp_path / "bad.gguf").write_bytes(data.replace(key + b"\x01", key + b"\x03"))
    with pytest.raises(FormatError, match="4 heads with 3 keys of 32 columns"):
        open_model(tmp_path / "bad.gguf")
