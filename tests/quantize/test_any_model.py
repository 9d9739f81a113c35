"""Files of other architectures, quantized from end to end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import quantize
from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.header import Endian
from gguf_tools.format.keys import expected_kinds
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.fill.sources import GGUFTensor
from quantize.importances.entries import Importance
from quantize.plan.plan import PlanOptions
from quantize.value_errors import compare_values, compare_with_source
from tests.quantize.codecs import encode
from tests.support import oracle

N_VOCAB, HIDDEN, N_HEADS, FFN = 320, 256, 4, 512
TOKENS = list(range(3, 35))

Shapes = dict[str, tuple[int, ...]]


def llama() -> tuple[Metadata, Shapes]:
    """Return a model of two layers with grouped queries, without a tokenizer."""
    numbers = {
        "block_count": 2, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": N_HEADS, "attention.head_count_kv": 2, "vocab_size": N_VOCAB,
        "rope.dimension_count": HIDDEN // N_HEADS,
    }  # fmt: skip
    layer: Shapes = {
        "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN),
        "attn_v": (HIDDEN // 2, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, HIDDEN), "output.weight": (N_VOCAB, HIDDEN)}
    shapes["output_norm.weight"] = (HIDDEN,)
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    return {
        "general.architecture": Value.string("llama"),
        **{f"llama.{key}": Value.u32(number) for key, number in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": Value.f32(1e-5),
        "tokenizer.ggml.model": Value.string("none"),
    }, shapes


def mmproj() -> tuple[Metadata, Shapes]:
    """Return a vision part of two layers, whose metadata have no key of the model itself."""
    layer: Shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
        "attn_out": (HIDDEN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN), "ln1": (HIDDEN,),
    }  # fmt: skip
    shapes: Shapes = {"v.patch_embd.weight": (HIDDEN, 3, 14, 14), "mm.1.weight": (HIDDEN, HIDDEN)}
    shapes |= {f"v.blk.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    return {
        "general.architecture": Value.string("clip"),
        "clip.has_vision_encoder": Value.bool_(True),
        "clip.vision.block_count": Value.u32(2),
        "clip.vision.attention.head_count": Value.u32(N_HEADS),
    }, shapes


def image_model() -> tuple[Metadata, Shapes]:
    """Return a few tensors in the manner of an image model, whose metadata say nothing of sizes."""
    shapes: Shapes = {
        "img_in.weight": (HIDDEN, 64), "double_blocks.0.img_attn.qkv.weight": (3 * HIDDEN, HIDDEN),
        "single_blocks.0.linear1.weight": (FFN, HIDDEN), "blocks.0.ffn.0.weight": (FFN, HIDDEN),
        "double_blocks.0.img_attn.norm.key_norm.scale": (128,),
    }  # fmt: skip
    return {"general.architecture": Value.string("flux")}, shapes


def write(path: Path, model: tuple[Metadata, Shapes], endian: Endian = "little") -> dict[str, np.ndarray]:
    """Write a model of random weights in F32; return them."""
    metadata, shapes = model
    rng = np.random.default_rng(5)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.05, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    infos = [TensorInfo(name, shape, F32) for name, shape in shapes.items()]
    layout = FileLayout.of(metadata, infos, endian=endian)
    with GGUFWriter(path, layout) as writer:
        for name, values in weights.items():
            writer.write(layout.offset_of(name), values.astype(">f4" if endian == "big" else "<f4"))
        writer.publish()
    return weights


def importances_of(weights: dict[str, np.ndarray]) -> dict[str, Importance]:
    rng = np.random.default_rng(6)
    return {
        name: Importance(
            rng.uniform(0.1, 3, (1, values.shape[-1])).astype(np.float32), np.ones(1, np.float32)
        )
        for name, values in weights.items()
        if values.ndim == 2
    }


def assert_encoded(path: Path, weights: dict[str, np.ndarray], matrix: dict[str, Importance] | None) -> None:
    """Compare every tensor of a file with its weights, encoded by themselves."""
    with open_gguf(path) as file:
        for info in file.tensors.values():
            values = weights[info.name]
            expected = values if info.type is F32 else _encode(info, values, matrix)
            assert bytes(file.raw(info.name)) == expected.tobytes(), info.name


def _encode(info: TensorInfo, values: np.ndarray, matrix: dict[str, Importance] | None) -> np.ndarray:
    weighs = matrix[info.name].values[0] if matrix is not None and info.type.is_quantized else None
    return encode(info.type.name, values, weighs)


def logits(path: Path) -> np.ndarray:
    """Return what llama.cpp computes, float32 (n_tokens, n_vocab)."""
    with oracle.Model(path) as model:
        return model.logits(TOKENS)


@pytest.mark.parametrize(("file_type", "with_matrix"), [("Q4_K_M", False), ("IQ3_XXS", True)])
def test_a_llama_file(tmp_path: Path, file_type: str, with_matrix: bool) -> None:
    weights = write(tmp_path / "in.gguf", llama())
    matrix = importances_of(weights) if with_matrix else None
    quantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type, importances=matrix)
    assert_encoded(tmp_path / "out.gguf", weights, matrix)
    if oracle.available():
        requantize = PlanOptions(allow_requantize=True)
        # The weights as they are now, in F32: what differs is that llama.cpp rounds activations to 8 bits.
        quantize.quantize(tmp_path / "out.gguf", tmp_path / "f32.gguf", "F32", options=requantize)
        expected, found = logits(tmp_path / "f32.gguf"), logits(tmp_path / "out.gguf")
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


OF_ANY_KIND = (Value.u32(1), Value.i32(1), Value.f32(1), Value.bool_(True), Value.string("linear"))


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize(
    "key", ["attention.causal", "pooling_type", "rope.scale_linear", "rope.scaling.type", "rope.freq_base"]
)
def test_llama_cpp_loads_the_kinds_of_the_table(tmp_path: Path, key: str) -> None:
    metadata, shapes = llama()
    loaded = []
    for number, value in enumerate(OF_ANY_KIND):
        write(tmp_path / f"{number}.gguf", ({**metadata, f"llama.{key}": value}, shapes))
        with suppress(RuntimeError), oracle.Model(tmp_path / f"{number}.gguf"):
            loaded.append(value.type_name)
    assert loaded == list(expected_kinds(f"llama.{key}", "llama"))


@pytest.mark.parametrize("file_type", ["Q8_0", "F32", "COPY"])
def test_a_big_endian_file_becomes_a_little_endian_one(tmp_path: Path, file_type: str) -> None:
    weights = write(tmp_path / "in.gguf", llama(), "big")
    result = quantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type)
    (note,) = (text for text in result.preparation.plan.remarks if "endian" in text)
    assert note.endswith("in.gguf is for big-endian machines, the output for little-endian ones")
    assert_encoded(tmp_path / "out.gguf", weights, None)


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "Q4_K_M", "Q2_K", "IQ4_XS", "F16", "COPY"])
def test_an_image_model_needs_no_number_of_layers(tmp_path: Path, file_type: str) -> None:
    weights = write(tmp_path / "in.gguf", image_model())
    quantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert set(file.tensors) == set(weights)
        assert "flux.block_count" not in file.metadata


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q8_0", "F16", "COPY"])
def test_a_tensor_without_dimensions_is_copied(tmp_path: Path, file_type: str) -> None:
    metadata, shapes = llama()
    names = ("blk.0.scale", "blk.0.logit_scale.weight", "logit_scale")
    write(tmp_path / "in.gguf", (metadata, {**shapes, **dict.fromkeys(names, ())}))
    quantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type)
    with open_gguf(tmp_path / "in.gguf") as source, open_gguf(tmp_path / "out.gguf") as output:
        for name in names:
            assert output.tensors[name] == TensorInfo(name, (), F32)
            assert bytes(output.raw(name)) == bytes(source.raw(name))
            assert len(bytes(output.raw(name))) == 4
        assert compare_values(source, output).tensors[-1].n_elems >= 1
        sources = {name: GGUFTensor(source, name) for name in source.tensors}
        assert not [each for each in compare_with_source(output, sources, "in.gguf") if each.is_bad]


@pytest.mark.parametrize(("file_type", "with_matrix"), [("Q4_K_M", False), ("IQ3_M", True)])
def test_an_mmproj_file(tmp_path: Path, file_type: str, with_matrix: bool) -> None:
    weights = write(tmp_path / "in.gguf", mmproj())
    matrix = importances_of(weights) if with_matrix else None
    quantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type, importances=matrix)
    assert_encoded(tmp_path / "out.gguf", weights, matrix)
    if oracle.available():
        facts = oracle.read_gguf(tmp_path / "out.gguf")
        assert set(facts.tensors) == set(weights)


def test_an_mmproj_file_is_refused_where_llama_quantize_stops(tmp_path: Path) -> None:
    matrix = importances_of(write(tmp_path / "in.gguf", mmproj()))
    with pytest.raises(BadRequest, match="which clip files do not say") as refusal:
        quantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "IQ3_XXS", importances=matrix)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out.gguf").exists()
