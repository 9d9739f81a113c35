"""Loaders: plain floats as they are, FP8 blocks against the obvious decoding, and what is refused."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint import Checkpoint
from convert.weights import LOADERS, choose_loader
from convert.weights.base import Weight, WeightsLoader
from convert.weights.fp8 import E4M3_VALUES, Fp8BlockWeight, Fp8Loader
from convert.weights.plain import PlainLoader, PlainWeight
from gguf_tools.errors import BadConfig, CheckpointError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.ggml_types import BF16, F16, F32
from tests.checkpoints import dequantize_fp8, quantize_fp8, write_checkpoint

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NAME = "model.layers.0.self_attn.o_proj.weight"


def loader_of(folder: Path, tensors: dict[str, np.ndarray], quantization: Any = None) -> WeightsLoader:
    config = {} if quantization is None else {"quantization_config": quantization}
    return choose_loader(Checkpoint(write_checkpoint(folder, config, tensors)))


def read_all(weight: Weight) -> np.ndarray:
    return weight.read_rows(0, int(np.prod(weight.shape[:-1]))).reshape(weight.shape)


def random_matrix(rows: int, cols: int) -> np.ndarray:
    return np.random.RandomState(rows + cols).standard_normal((rows, cols)).astype(np.float32)


# ---- plain


@pytest.mark.parametrize(
    ("dtype", "type_"), [(np.float32, F32), (np.float16, F16), (ml_dtypes.bfloat16, BF16)], ids=str
)
def test_floats_are_read_as_they_are_stored(dtype: Any, type_: Any, tmp_path: Path) -> None:
    stored = random_matrix(6, 5).astype(dtype)
    loader = loader_of(tmp_path, {"a.weight": stored, "a.bias": stored[0]})
    weight = loader.weight("a.weight")
    assert isinstance(weight, PlainWeight)
    assert (weight.name, weight.shape, weight.type) == ("a.weight", (6, 5), type_)
    assert weight.read_rows(2, 5).dtype == dtype
    assert np.array_equal(weight.read_rows(2, 5), stored[2:5])
    # A vector is one row.
    assert np.array_equal(loader.weight("a.bias").read_rows(0, 1), stored[:1])
    assert loader.names() == ("a.bias", "a.weight")


def test_a_plain_checkpoint_that_still_says_fp8_is_read_as_plain(tmp_path: Path) -> None:
    assert isinstance(loader_of(tmp_path, {"a.weight": random_matrix(2, 3)}, FP8), PlainLoader)


# ---- FP8


@pytest.mark.parametrize("block", [(128, 128), (32, 48), (1, 128), (64, 7)], ids=str)
@pytest.mark.parametrize("shape", [(256, 128), (130, 129), (5, 300), (127, 1)], ids=str)
def test_fp8_equals_the_obvious_decoding(
    block: tuple[int, int], shape: tuple[int, int], tmp_path: Path
) -> None:
    codes, scales = quantize_fp8(random_matrix(*shape), block)
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    loader = loader_of(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, quantization)
    weight = loader.weight(NAME)
    expected = dequantize_fp8(codes, scales, block)
    assert isinstance(weight, Fp8BlockWeight)
    assert (weight.type, weight.shape, weight.name) == (F32, shape, NAME)
    assert loader.names() == (NAME,)
    assert np.array_equal(read_all(weight), expected)
    random = np.random.RandomState(1)
    for _ in range(5):
        start, stop = sorted(random.randint(0, shape[0] + 1, 2))
        assert np.array_equal(weight.read_rows(start, stop), expected[start:stop])


def test_every_code_has_its_value(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    tensors = {
        NAME: codes.view(ml_dtypes.float8_e4m3fn),
        NAME + "_scale_inv": np.full((1, 1), 0.5, np.float32),
    }
    found = read_all(loader_of(tmp_path, tensors, FP8).weight(NAME)).reshape(-1)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        # 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, NaN only where all bits are set.
        value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if code & 127 == 127:
            assert np.isnan(found[code])
        else:
            assert found[code] == (-1) ** sign * value / 2
    assert np.signbit(E4M3_VALUES[128])


def test_the_product_is_rounded_once_in_float32(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(128, 128), (128, 128))
    found = read_all(loader_of(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, FP8).weight(NAME))
    exact = codes.astype(np.float64) * scales.astype(np.float64)[0, 0]
    assert np.array_equal(found, exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu], ids=str)
def test_scales_in_other_floats_are_widened(dtype: Any, tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(200, 140), (128, 128))
    scales = np.array([[1, 0.5], [2, 0.25]], np.float32)
    tensors = {NAME: codes, NAME + "_scale_inv": scales.astype(dtype)}
    found = read_all(loader_of(tmp_path, tensors, FP8).weight(NAME))
    assert np.array_equal(found, dequantize_fp8(codes, scales, (128, 128)))


def test_the_block_size_defaults_to_128_and_needs_no_config(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(130, 200), (128, 128))
    tensors = {NAME: codes, NAME + "_scale_inv": scales}
    for quantization in (None, {"quant_method": "fp8"}):
        found = read_all(loader_of(tmp_path, tensors, quantization).weight(NAME))
        assert np.array_equal(found, dequantize_fp8(codes, scales, (128, 128)))


def test_modules_are_plain_or_fp8_one_by_one(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    plain = random_matrix(4, 8).astype(ml_dtypes.bfloat16)
    tensors = {
        "a.weight": codes, "a.weight_scale_inv": scales, "a.input_scale": np.ones(1, np.float32),
        "b.weight": plain, "b.bias": plain[0],
    }  # fmt: skip
    loader = loader_of(tmp_path, tensors, FP8)
    assert isinstance(loader, Fp8Loader)
    assert loader.names() == ("a.weight", "b.bias", "b.weight")
    assert loader.dropped == {"a.input_scale": "scales activations, not weights"}
    assert isinstance(loader.weight("a.weight"), Fp8BlockWeight)
    assert loader.weight("b.weight").type == BF16


def test_padded_scales_are_accepted(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(100, 100), (128, 128))
    padded = np.pad(scales, ((0, 1), (0, 2)), constant_values=np.nan)
    found = read_all(loader_of(tmp_path, {NAME: codes, NAME + "_scale_inv": padded}, FP8).weight(NAME))
    assert np.array_equal(found, dequantize_fp8(codes, scales, (128, 128)))


def test_missing_scales_name_module_and_tensor(tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(8, 8), (128, 128))
    with pytest.raises(
        MissingTensor, match=r"self_attn\.o_proj: stored as F8_E4M3 without .*weight_scale_inv"
    ):
        loader_of(tmp_path, {NAME: codes}, FP8).weight(NAME)


def test_scales_that_do_not_cover_the_matrix_are_an_error(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(129, 128), (128, 128))
    with pytest.raises(
        CheckpointError, match=r"shape \(1, 1\), expected \(2, 1\) for \(129, 128\) in blocks of 128x128"
    ):
        loader_of(tmp_path, {NAME: codes, NAME + "_scale_inv": scales[:1]}, FP8).weight(NAME)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({NAME + "_scale_inv": np.ones((1, 1), np.int32)}, "scales stored as I32"),
        ({NAME.replace("weight", "weight_scale"): np.ones(1, np.float32)}, r"with .*\.weight_scale; only"),
    ],
)  # fmt: skip
def test_other_scales_are_refused(tensors: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(8, 8), (128, 128))
    with pytest.raises(UnsupportedCheckpoint, match=words):
        loader_of(tmp_path, {NAME: codes, **tensors}, FP8).weight(NAME)


@pytest.mark.parametrize("block", [[128], [0, 128], "128", [128.0, 128]], ids=str)
def test_a_senseless_block_size_is_an_error(block: Any, tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    with pytest.raises(BadConfig, match=r"config\.json: quantization_config\.weight_block_size is"):
        loader_of(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, {**FP8, "weight_block_size": block})


def test_scales_that_divide_are_refused(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    quantization = {
        "quant_method": "fp8",
        "weight_scale_method": "block",
        "weight_scale_semantics": "inverse",
    }
    with pytest.raises(UnsupportedCheckpoint, match="scales that divide"):
        loader_of(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, quantization)


# ---- choosing


def test_an_unknown_method_is_named_with_key_and_tensor(tmp_path: Path) -> None:
    tensors = {"a.qweight": np.ones((2, 2), np.int32), "a.scales": np.ones((1, 2), np.float16)}
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"config\.json: quantization_config\.quant_method is 'gptq'.*tensor: a\.qweight \(I32\)$",
    ):
        loader_of(tmp_path, tensors, {"quant_method": "gptq", "bits": 4})


def test_quantized_tensors_without_a_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedCheckpoint, match=r"no quantization_config.*first such tensor: a\.qweight \(I32\)"
    ):
        loader_of(tmp_path, {"a.qweight": np.ones((2, 2), np.int32)})


def test_a_quantization_config_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="quantization_config is 'fp8'"):
        loader_of(tmp_path, {"a.weight": random_matrix(2, 2)}, "fp8")


@pytest.mark.parametrize(("module", "name"), LOADERS)
def test_the_registry_names_loaders(module: str, name: str) -> None:
    loader = getattr(importlib.import_module(module), name)
    for method in ("matches", "names", "weight"):
        assert callable(getattr(loader, method))


def test_looking_at_an_fp8_checkpoint_does_not_load_numba(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    write_checkpoint(tmp_path, {"quantization_config": FP8}, {NAME: codes, NAME + "_scale_inv": scales})
    probe = (
        "import sys; from convert.checkpoint import Checkpoint; from convert.weights import choose_loader;"
        f"print(choose_loader(Checkpoint({str(tmp_path)!r})).weight({NAME!r}).shape, 'numba' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "(8, 8) False"
