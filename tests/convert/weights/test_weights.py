"""Weights of a checkpoint: plain floats as they are, FP8 against the obvious decoding, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.weights import MODULES, all_loaders
from convert.weights.base import PlainWeight, Weight, WeightsLoader
from convert.weights.model_weights import ModelWeights
from convert.weights.schemes.fp8 import CODE_VALUES, Fp8Weight
from gguf_tools.errors import BadConfig, CheckpointError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import BF16, F16, F32
from tests.support.checkpoints import dequantize_fp8, quantize_fp8, write_checkpoint

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NAME = "model.layers.0.self_attn.o_proj.weight"


def weights_in(folder: Path, tensors: dict[str, np.ndarray], quantization: Any = None) -> ModelWeights:
    config = {} if quantization is None else {"quantization_config": quantization}
    return convert.open_checkpoint(write_checkpoint(folder, config, tensors))


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
    weights = weights_in(tmp_path, {"a.weight": stored, "a.bias": stored[0]})
    weight = weights.weight("a.weight")
    assert isinstance(weight, PlainWeight)
    assert (weight.name, weight.shape, weight.type) == ("a.weight", (6, 5), type_)
    assert weight.read_rows(2, 5).dtype == dtype
    assert np.array_equal(weight.read_rows(2, 5), stored[2:5])
    # A vector is one row.
    assert np.array_equal(weights.weight("a.bias").read_rows(0, 1), stored[:1])
    assert weights.names() == ("a.bias", "a.weight")


def test_64_bit_floats_are_rounded_to_32(tmp_path: Path) -> None:
    stored = random_matrix(3, 5).astype(np.float64) + np.pi
    with weights_in(tmp_path, {"a.weight": stored}) as weights:
        assert weights.weight("a.weight").type == F32
        assert np.array_equal(read_all(weights.weight("a.weight")), stored.astype(np.float32))


def test_constants_of_a_models_code_are_dropped(tmp_path: Path) -> None:
    constants = {
        "a.position_ids": np.arange(9)[None], "a.masked_bias": np.array(-1e4, np.float32),
        "b.self_attn.bias": np.ones((1, 1, 4, 4), np.uint8),
    }  # fmt: skip
    with weights_in(tmp_path, {"a.weight": random_matrix(3, 5), **constants}) as weights:
        assert weights.names() == ("a.weight",)
        assert set(weights.dropped) == set(constants)


@pytest.mark.parametrize("name", ["a.lora_A.weight", "a.modules_to_save.default.weight"])
def test_a_model_with_an_adapter_in_it_is_refused(name: str, tmp_path: Path) -> None:
    tensors = {"a.base_layer.weight": random_matrix(3, 5), name: random_matrix(3, 5)}
    with pytest.raises(UnsupportedCheckpoint, match=f"{name}: part of an adapter; merge it into the model"):
        weights_in(tmp_path, tensors)


def test_a_plain_checkpoint_that_still_says_fp8_is_read_as_plain(tmp_path: Path) -> None:
    weights = weights_in(tmp_path, {"a.weight": random_matrix(2, 3)}, FP8)
    assert isinstance(weights.weight("a.weight"), PlainWeight)
    assert not weights.is_quantized


# ---- FP8


@pytest.mark.parametrize("block", [(128, 128), (32, 48), (1, 128), (64, 7)], ids=str)
@pytest.mark.parametrize("shape", [(256, 128), (130, 129), (5, 300), (127, 1)], ids=str)
def test_fp8_equals_the_obvious_decoding(
    block: tuple[int, int], shape: tuple[int, int], tmp_path: Path
) -> None:
    codes, scales = quantize_fp8(random_matrix(*shape), block)
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    weights = weights_in(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, quantization)
    weight = weights.weight(NAME)
    expected = dequantize_fp8(codes, scales, block)
    assert isinstance(weight, Fp8Weight)
    assert (weight.type, weight.shape, weight.name) == (F32, shape, NAME)
    assert weights.names() == (NAME,)
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
    found = read_all(weights_in(tmp_path, tensors, FP8).weight(NAME)).reshape(-1)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        # 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, NaN only where all bits are set.
        value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if code & 127 == 127:
            assert np.isnan(found[code])
        else:
            assert found[code] == (-1) ** sign * value / 2
    assert np.signbit(CODE_VALUES["F8_E4M3"][128])


def test_the_product_is_rounded_once_in_float32(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(128, 128), (128, 128))
    found = read_all(weights_in(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, FP8).weight(NAME))
    exact = codes.astype(np.float64) * scales.astype(np.float64)[0, 0]
    assert np.array_equal(found, exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu], ids=str)
def test_scales_in_other_floats_are_widened(dtype: Any, tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(200, 140), (128, 128))
    scales = np.array([[1, 0.5], [2, 0.25]], np.float32)
    tensors = {NAME: codes, NAME + "_scale_inv": scales.astype(dtype)}
    found = read_all(weights_in(tmp_path, tensors, FP8).weight(NAME))
    assert np.array_equal(found, dequantize_fp8(codes, scales, (128, 128)))


def test_the_block_size_defaults_to_128_and_needs_no_config(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(130, 200), (128, 128))
    tensors = {NAME: codes, NAME + "_scale_inv": scales}
    for quantization in (None, {"quant_method": "fp8"}):
        found = read_all(weights_in(tmp_path, tensors, quantization).weight(NAME))
        assert np.array_equal(found, dequantize_fp8(codes, scales, (128, 128)))


def test_modules_are_plain_or_fp8_one_by_one(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    plain = random_matrix(4, 8).astype(ml_dtypes.bfloat16)
    tensors = {
        "a.weight": codes, "a.weight_scale_inv": scales, "a.input_scale": np.ones(1, np.float32),
        "b.weight": plain, "b.bias": plain[0],
    }  # fmt: skip
    weights = weights_in(tmp_path, tensors, FP8)
    assert weights.is_quantized
    assert weights.names() == ("a.weight", "b.bias", "b.weight")
    assert weights.dropped == {"a.input_scale": "scales activations, not weights"}
    assert isinstance(weights.weight("a.weight"), Fp8Weight)
    assert weights.weight("b.weight").type == BF16


def test_padded_scales_are_accepted(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(100, 100), (128, 128))
    padded = np.pad(scales, ((0, 1), (0, 2)), constant_values=np.nan)
    found = read_all(weights_in(tmp_path, {NAME: codes, NAME + "_scale_inv": padded}, FP8).weight(NAME))
    assert np.array_equal(found, dequantize_fp8(codes, scales, (128, 128)))


def test_missing_scales_name_module_and_tensor(tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(8, 8), (128, 128))
    with pytest.raises(
        MissingTensor, match=r"o_proj\.weight: quantized, but .*o_proj\.weight_scale_inv is missing .*shard"
    ):
        weights_in(tmp_path, {NAME: codes}, FP8).weight(NAME)


def test_scales_that_do_not_cover_the_matrix_are_an_error(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(129, 128), (128, 128))
    with pytest.raises(
        CheckpointError, match=r"shape \(1, 1\), expected \(2, 1\) for \(129, 128\) in blocks of 128x128"
    ):
        weights_in(tmp_path, {NAME: codes, NAME + "_scale_inv": scales[:1]}, FP8).weight(NAME)


def test_scales_that_are_no_scales_are_refused(tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(8, 8), (128, 128))
    tensors = {NAME: codes, NAME + "_scale_inv": np.ones((1, 1), np.int32)}
    with pytest.raises(CheckpointError, match="scales stored as I32, expected F32, BF16"):
        weights_in(tmp_path, tensors, FP8).weight(NAME)


@pytest.mark.parametrize("block", [[128], [0, 128], "128", [128.0, 128]], ids=str)
def test_a_senseless_block_size_is_an_error(block: Any, tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    with pytest.raises(BadConfig, match=r"config\.json: quantization_config\.weight_block_size is"):
        weights_in(
            tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, {**FP8, "weight_block_size": block}
        ).weight(NAME)


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize(
    ("stored", "block"),
    [((), None), ((1,), None), ((6,), (1, 8)), ((6, 1), (1, 8)), ((6, 2), (1, 4)), ((2, 1, 1, 1), (4, 8))],
    ids=str,
)
def test_every_form_of_scales(
    stored: tuple[int, ...], block: tuple[int, int] | None, suffix: str, tmp_path: Path
) -> None:
    codes, _ = quantize_fp8(random_matrix(6, 8), (128, 128))
    scales = np.random.RandomState(3).random_sample(stored or 1).astype(np.float32).reshape(stored)
    blocks = {"weight_block_size": [4, 8]} if len(stored) == 4 else {}
    weights = weights_in(tmp_path, {NAME: codes, NAME + suffix: scales}, {"quant_method": "fp8", **blocks})
    block = block or (6, 8)
    grid = scales.reshape(-(-6 // block[0]), -(-8 // block[1]))
    assert np.array_equal(weights.read(NAME), dequantize_fp8(codes, grid, block))


def test_a_vector_of_scales_is_one_per_row_even_when_the_matrix_is_square(tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(8, 8), (128, 128))
    scales = np.arange(1, 9, dtype=np.float32)
    weights = weights_in(tmp_path, {NAME: codes, NAME + "_scale": scales}, {"quant_method": "fbgemm_fp8"})
    assert np.array_equal(weights.read(NAME), codes.astype(np.float32) * scales[:, None])
    assert weights.weight(NAME).stored_as == "F8_E4M3 with a scale per row"


def test_scales_divide_where_the_config_says_so(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    quantization = {
        "quant_method": "fp8",
        "weight_scale_method": "block",
        "weight_scale_semantics": "inverse",
    }
    weights = weights_in(tmp_path, {NAME: codes, NAME + "_scale_inv": scales}, quantization)
    assert np.array_equal(weights.read(NAME), codes.astype(np.float32) / scales[0, 0])


@pytest.mark.parametrize("scale_shape", [(3, 2, 1), (3, 1, 1), (3,), (3, 5, 1)], ids=str)
def test_fused_experts_have_no_weight_in_their_names(scale_shape: tuple[int, ...], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = [quantize_fp8(random_matrix(5, 8) + index, (4, 8))[0] for index in range(3)]
    scales = np.random.RandomState(3).random_sample(scale_shape).astype(np.float32)
    tensors = {name: np.stack(parts), name + "_scale_inv": scales}
    weights = weights_in(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [4, 8]})
    grids = scales.reshape(3, -1, 1)
    block = ({1: 5, 2: 4, 5: 1}[grids.shape[1]], 8)
    expected = [dequantize_fp8(codes, grid, block) for codes, grid in zip(parts, grids, strict=True)]
    assert weights.names() == (name,)
    assert np.array_equal(weights.read(name), np.stack(expected))
    assert np.array_equal(weights.read_rows(name, 3, 12), np.concatenate(expected)[3:12])


def test_bytes_of_integers_are_floats_where_the_config_says_so(tmp_path: Path) -> None:
    codes, _ = quantize_fp8(random_matrix(4, 8), (128, 128))
    tensors = {NAME: codes.view(np.uint8), NAME + "_scale": np.float32(0.5).reshape(())}
    weights = weights_in(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert np.array_equal(weights.read(NAME), codes.astype(np.float32) / 2)


# ---- choosing


GPTQ_TENSORS = {"a.qweight": np.ones((2, 2), np.int32), "a.scales": np.ones((1, 2), np.float16)}


def test_an_unknown_method_is_named_with_key_and_tensor(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"config\.json: quantization_config\.quant_method is 'aqlm', which is not read \(read: .*gptq"
        r".*; first such tensor: a\.qweight \(I32\)$",
    ):
        weights_in(tmp_path, GPTQ_TENSORS, {"quant_method": "aqlm", "bits": 4})


def test_tensors_of_another_method_are_named_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"a\.qweight: stored as I32 \(2, 2\), part of no weight .*quant_method is 'fp8'; tried FP8",
    ):
        weights_in(tmp_path, GPTQ_TENSORS, FP8)


def test_integers_without_a_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedCheckpoint, match=r"a\.codes: stored as I32 .*\(no quantization_config; tried FP8, "
    ):
        weights_in(tmp_path, {"a.codes": np.ones((2, 2), np.int32)})


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"quantization_config": {"quant_method": "aqlm"}}'),
        ("config.json", '{"quantization_config": {"method": "AQLM"}}'),
        ("config.json", '{"text_config": {"quantization_config": {"quant_method": "aqlm"}}}'),
        ("config.json", '{"compression_config": {"quant_method": "aqlm"}}'),
        ("quantize_config.json", '{"quant_method": "aqlm"}'),
        ("quant_config.json", '{"quant_method": "aqlm"}'),
        ("hf_quant_config.json", '{"quantization": {"quant_method": "aqlm"}}'),
    ],
)
def test_the_method_is_found_wherever_it_stands(file: str, text: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"a.weight": random_matrix(2, 2)})
    (tmp_path / file).write_text(text)
    with pytest.raises(UnsupportedCheckpoint, match=rf"{file}.*method is 'aqlm', which is not read"):
        convert.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "method"),
    [
        ("config.json", '{"compression_config": {"format": "int-quantized"}}', "compressed-tensors"),
        ("config.json", '{"quantization_config": {"quant_algo": "FP8"}}', "modelopt"),
        ("config.json", '{"quantization_config": {"quant_method": "intel/auto-round"}}', "auto-round"),
        ("quantize_config.json", '{"bits": 4}', "gptq"),
        ("quant_config.json", '{"w_bit": 4}', "awq"),
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "NVFP4"}}', "modelopt"),
    ],
)
def test_settings_without_a_method_mean_their_programs(
    file: str, text: str, method: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, {}, {"a.weight": random_matrix(2, 2)})
    (tmp_path / file).write_text(text)
    assert convert.open_checkpoint(tmp_path).settings.method == method


def test_a_method_that_is_no_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"quantization_config\.quant_method is 7, expected the name"):
        weights_in(tmp_path, {"a.weight": random_matrix(2, 2)}, {"quant_method": 7})


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask' is not read"),
        ({"quantization_status": "calibration"}, "'calibration', expected compressed or frozen"),
    ],
)
def test_what_the_weights_alone_do_not_say_is_refused(
    quantization: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tensors = {"a.weight": np.ones((2, 2), np.int8), "a.weight_scale": np.ones(1, np.float32)}
    config = {"quant_method": "compressed-tensors", **quantization}
    with pytest.raises(UnsupportedCheckpoint, match=words + r".*first such tensor: a\.weight \(I8\)$"):
        weights_in(tmp_path, tensors, config)


@pytest.mark.parametrize("suffix", ["pre_quant_scale", "bitmask", "act.scales", "trellis"])
def test_tensors_of_what_is_not_read_are_refused(suffix: str, tmp_path: Path) -> None:
    tensors = {"a.weight": random_matrix(2, 2), f"a.{suffix}": np.ones(2, np.float32)}
    with pytest.raises(UnsupportedCheckpoint, match=rf"a\.{suffix}: .*, which is not read"):
        weights_in(tmp_path, tensors)


def test_a_weight_that_is_stored_twice_is_an_error(tmp_path: Path) -> None:
    tensors = {
        "a.weight": random_matrix(2, 8),
        "a.weight_packed": np.ones((2, 1), np.int32),
        "a.weight_scale": np.ones((2, 1), np.float32),
    }
    with pytest.raises(CheckpointError, match=r"a\.weight is stored twice"):
        weights_in(tmp_path, tensors)


def test_a_quantization_config_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="quantization_config is 'fp8'"):
        weights_in(tmp_path, {"a.weight": random_matrix(2, 2)}, "fp8")


@pytest.mark.parametrize("loader", all_loaders(), ids=lambda loader: loader.format)
def test_the_registry_holds_loaders(loader: WeightsLoader) -> None:
    assert loader.methods == tuple(dict.fromkeys(loader.methods))
    assert loader.main not in loader.sides
    assert len(loader.sides) == len(set(loader.sides))


def test_every_module_of_loaders_is_in_the_registry() -> None:
    package = Path(convert.__file__).parent
    found = {
        ".".join(("convert", *path.relative_to(package).with_suffix("").parts))
        for path in (package / "weights").rglob("*.py")
        if "\nLOADERS" in path.read_text()
    }
    assert found == set(MODULES)


def test_looking_at_an_fp8_checkpoint_does_not_load_numba(tmp_path: Path) -> None:
    codes, scales = quantize_fp8(random_matrix(8, 8), (128, 128))
    write_checkpoint(tmp_path, {"quantization_config": FP8}, {NAME: codes, NAME + "_scale_inv": scales})
    probe = (
        "import sys; from convert import open_checkpoint;"
        f"print(open_checkpoint({str(tmp_path)!r}).weight({NAME!r}).shape, 'numba' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "(8, 8) False"
