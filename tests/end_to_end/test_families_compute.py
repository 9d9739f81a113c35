"""Every family of the registry computes, in our forward pass, what transformers or llama.cpp compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.architectures import families, supported
from tests.convert.architectures.test_mistral_large3 import write as write_mistral
from tests.convert.architectures.test_relatives_logits import NAMES, TOKENS, VARIANTS, variant_folder
from tests.convert.f32_files import write_f32
from tests.end_to_end.arch_models import CASES, GOLDEN
from tests.support import oracle
from tests.support.checkpoints import edit_tensors, load_transformers
from tests.support.decoder_models import MODELS, OUR_MODELS, decoder_model
from tests.support.published_models import PUBLISHED, write

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.forward.open import open_model  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402

needs_oracle = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


OF_LLAMA_CPP_ALONE = ("ling-mini-2", "mimo-v2.5", "step-3.5")
"""Published models that llama.cpp computes, and transformers has no class for."""


def logits_of(path: Path, tokens: list[int]) -> np.ndarray:
    with open_model(path) as source:
        logits, _ = run_all_layers(source, np.array([tokens]))
    return logits[0]


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


_BESIDE_VISION = ("Glm5Next", "Qwen3_5", "Qwen3_5Moe", "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified",
                  "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Glm4v",
                  "MiniMaxM3Sparse", "MiniMaxM3VL", "Qwen4Exp", "MuseGlimmer", "Llama4",
                  "Step3p7")  # fmt: skip


def test_every_family_is_in_one_of_these_tests() -> None:
    """DeepSeek V4 has tests of its own, tests/imatrix/forward/test_deepseek4.py.

    Kimi K3's are in tests/imatrix/forward/test_kimi_k3.py, as no class of transformers computes it.
    GLM-5 Next, Qwen 3.5, Qwen4Exp, Gemmas and MiniMax-M3 beside a vision part differ in names alone; see
    tests/end_to_end/test_published_compute.py.
    """
    tested = {variant.architecture for variant in VARIANTS.values()}
    tested |= {f"{kind}ForCausalLM" for kind, _ in [*MODELS.values(), *OUR_MODELS.values()]}
    for case in CASES:
        tested |= set(json.loads((GOLDEN / "models" / case / "config.json").read_text())["architectures"])
    tested |= {"Ernie4_5_ForCausalLM"}  # an older name of Ernie4_5ForCausalLM
    tested |= {"BailingMoeV3ForCausalLM"}  # the published name of BailingHybridForCausalLM
    tested |= {"ExaoneMoEForCausalLM"}  # the published name of ExaoneMoeForCausalLM
    tested |= {"PhiMoEForCausalLM"}  # the published name of PhimoeForCausalLM
    tested |= {"MiniMaxM3SparseForCausalLM"}  # a published name of MiniMaxM3VLForCausalLM
    tested |= {"DeepseekV2ForCausalLM", "KimiVLForConditionalGeneration", "MistralLarge3ForCausalLM"}
    tested |= {f"{name}ForConditionalGeneration" for name in _BESIDE_VISION}
    tested |= {"KimiK3ForConditionalGeneration"}
    tested |= {PUBLISHED[name].config["architectures"][0] for name in OF_LLAMA_CPP_ALONE}
    for family in families():
        if family.reader is None or family.encodes:  # encoders: tests/end_to_end/test_encoders.py
            tested |= set(family.hf_names)
    assert set(supported()) - tested == {"DeepseekV4ForCausalLM"}


@pytest.mark.parametrize("name", NAMES)
def test_relatives_of_deepseek(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = variant_folder(name, tmp_path / "model", monkeypatch)
    with torch.no_grad():
        expected = load_transformers(folder)(torch.tensor([TOKENS])).logits[0].numpy()
    assert_equal(logits_of(folder, TOKENS), expected)
    assert_equal(logits_of(write_f32(folder, tmp_path / "model.gguf"), TOKENS), expected)


def test_a_text_part_computes_what_it_does_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-VL has DeepSeek's configuration in `text_config`, and its tensors under `language_model.`."""
    folder = variant_folder("moonlight", tmp_path / "model", monkeypatch)
    expected = logits_of(folder, TOKENS)
    config = json.loads((folder / "config.json").read_text())
    wrapped = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(wrapped))

    def nest(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    edit_tensors(folder, nest)
    np.testing.assert_array_equal(logits_of(folder, TOKENS), expected)


@needs_oracle
def test_mistral_s_attention_grows_sharper(tmp_path: Path) -> None:
    """Scores change at positions 64 and 128, and without the temperature so do logits."""
    tokens = np.random.default_rng(0).integers(6, 300, 150).tolist()
    folder = write_mistral(tmp_path / "m")
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    with oracle.Model(tmp_path / "m.gguf") as model:
        expected = model.logits(tokens)
    for path in (folder, tmp_path / "m.gguf"):
        assert_equal(logits_of(path, tokens), expected)
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(params | {"llama_4_scaling": None}))
    plain = logits_of(folder, tokens)
    assert_equal(plain[:64], expected[:64])
    assert np.abs(plain[64:] - expected[64:]).max() > 1e-4 * np.abs(expected).max()


@needs_oracle
@pytest.mark.slow
def test_llama_4_s_chunks_end_where_llama_cpp_s_do(tmp_path: Path) -> None:
    """The second chunk begins at position 8192, and scores of layers without rotation grow from 8191 on.

    So far from the beginning, programs round the angles of rotations differently.
    """
    tokens = np.random.default_rng(0).integers(6, 300, 8256).tolist()
    decoder_model("llama4", tmp_path / "m", max_position_embeddings=8448)
    convert.convert(tmp_path / "m", tmp_path / "m.gguf", outtype="f32")
    with oracle.Model(tmp_path / "m.gguf") as model:
        expected = model.logits(tokens)
    found = logits_of(tmp_path / "m.gguf", tokens)
    assert np.abs(found - expected).max() < 3e-4 * np.abs(expected).max()


@needs_oracle
@pytest.mark.parametrize("name", OF_LLAMA_CPP_ALONE)
def test_a_family_without_a_class_in_transformers(name: str, tmp_path: Path) -> None:
    folder, tokens = write(name, tmp_path / "m"), np.random.RandomState(0).randint(3, 550, 60).tolist()
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    with oracle.Model(tmp_path / "m.gguf") as model:
        expected = model.logits(tokens)
    for path in (folder, tmp_path / "m.gguf"):
        assert_equal(logits_of(path, tokens), expected)


@needs_oracle
@pytest.mark.slow
def test_a_choice_goes_past_layers_of_another_kind(tmp_path: Path) -> None:
    """A layer of KDA stands between the one that chooses and the one that takes its choice over."""
    folder, tokens = tmp_path / "m", np.random.RandomState(0).randint(3, 550, 60).tolist()
    decoder_model("glm5-next", folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["indexer_types"] = ["full", "full", "full", "shared"]
    (folder / "config.json").write_text(json.dumps(config))

    def share(tensors: dict[str, np.ndarray]) -> None:
        for name in [each for each in tensors if ".3.self_attn.indexer." in each]:
            del tensors[name]

    edit_tensors(folder, share)
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    with oracle.Model(tmp_path / "m.gguf") as model:
        expected = model.logits(tokens)
    for path in (folder, tmp_path / "m.gguf"):
        assert_equal(logits_of(path, tokens), expected)


def test_deepseek_v1_computes_what_llama_cpp_has_computed() -> None:
    golden = np.load(GOLDEN / "logits" / "deepseek-v1-moe.npz")
    found = logits_of(GOLDEN / "models" / "deepseek-v1-moe", golden["ids"].tolist())
    assert_equal(found[-len(golden["llama_cpp"]) :], golden["llama_cpp"])
