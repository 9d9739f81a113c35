"""Corners of packed integers, 8-bit integers, 4-bit floats and torchao that no recorded checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from convert.checkpoint.safetensors_file import SafetensorsFile
from convert.weights.model_weights import ModelWeights
from gguf_tools.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from tests.support.checkpoints import Tensors, write_checkpoint
from tests.support.golden_checkpoints import folder_of
from tests.support.packers import pack_low_first, quantize_groups
from tests.support.scaled_packers import mxfp4, nvfp4, packed_integers


def matrix(n_rows: int, n_cols: int) -> np.ndarray:
    return np.random.RandomState(n_rows + n_cols).standard_normal((n_rows, n_cols)).astype(np.float32)


def weights_of(folder: Path, stored: Tensors, config: dict[str, Any] | None) -> ModelWeights:
    tensors = {"a" + suffix: array for suffix, array in stored.items()}
    return convert.open_checkpoint(
        write_checkpoint(folder, {} if config is None else {"quantization_config": config}, tensors)
    )


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}


# ---- packed integers


@settings(max_examples=25, deadline=None)
@given(bits=st.sampled_from([2, 4, 8]), n_rows=st.integers(1, 40), n_groups=st.integers(1, 4), data=st.data())
def test_any_rows_of_packed_integers(
    bits: int, n_rows: int, n_groups: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weight = matrix(n_rows, 16 * n_groups)
    stored, expected = packed_integers(weight, bits, np.arange(16 * n_groups) // 16)
    start = data.draw(st.integers(0, n_rows))
    stop = data.draw(st.integers(start, n_rows))
    folder = tmp_path_factory.mktemp("packed")
    with weights_of(folder, stored, compressed(num_bits=bits, group_size=16)) as weights:
        assert np.array_equal(weights.read_rows("a.weight", start, stop), expected[start:stop])


def test_no_config_is_needed(tmp_path: Path) -> None:
    stored, expected = packed_integers(matrix(8, 64), 4, np.arange(64) // 32)
    with weights_of(tmp_path, stored, None) as weights:
        assert np.array_equal(weights.read("a.weight"), expected)


def test_the_shape_may_be_stored_in_32_bits_or_not_at_all(tmp_path: Path) -> None:
    stored, expected = packed_integers(matrix(8, 64), 4, np.arange(64) // 32)
    config = compressed(num_bits=4, group_size=32)
    stored[".weight_shape"] = stored[".weight_shape"].astype(np.int32)
    with weights_of(tmp_path / "32", stored, config) as weights:
        assert np.array_equal(weights.read("a.weight"), expected)
    del stored[".weight_shape"]
    with weights_of(tmp_path / "none", stored, config) as weights:
        assert np.array_equal(weights.read("a.weight"), expected)


def test_zero_points_may_be_bytes(tmp_path: Path) -> None:
    weight = matrix(6, 64)
    stored, expected = packed_integers(weight, 4, np.arange(64) // 32)
    _, zeros, _, _ = quantize_groups(weight, 4, np.arange(64) // 32)
    stored[".weight_zero_point"] = (zeros - 8).astype(np.int8)
    with weights_of(tmp_path, stored, compressed(num_bits=4, group_size=32)) as weights:
        assert np.array_equal(weights.read_rows("a.weight", 1, 5), expected[1:5])


def test_the_last_group_may_be_shorter(tmp_path: Path) -> None:
    stored, expected = packed_integers(matrix(4, 80), 4, np.arange(80) // 32)
    with weights_of(tmp_path, stored, compressed(num_bits=4, group_size=32)) as weights:
        assert weights.weight("a.weight").stored_as == "int4 in groups of 32"
        assert np.array_equal(weights.read("a.weight"), expected)


def test_a_group_index_of_minus_one_is_not_used(tmp_path: Path) -> None:
    stored, expected = packed_integers(matrix(4, 64), 4, np.arange(64) // 32)
    stored[".weight_g_idx"] = np.full(64, -1, np.int32)
    with weights_of(tmp_path, stored, compressed(num_bits=4, group_size=32)) as weights:
        assert np.array_equal(weights.read("a.weight"), expected)


@pytest.mark.parametrize(
    ("version", "dense"), [("0.17.1", False), ("0.18.0", True), ("1.0", True), (None, True), ("dev", True)]
)
def test_the_version_tells_where_the_width_does_not(version: str | None, dense: bool, tmp_path: Path) -> None:
    """12 codes of 5 bits take 2 words in both packings."""
    codes = np.random.RandomState(5).randint(0, 32, (3, 12))
    packed = pack_low_first(codes, 5)
    if not dense:
        packed = np.concatenate([pack_low_first(codes[:, :6], 5), pack_low_first(codes[:, 6:], 5)], axis=1)
    stored = {
        ".weight_packed": packed.view(np.int32), ".weight_shape": np.array([3, 12]),
        ".weight_scale": np.ones((3, 1), np.float32),
    }  # fmt: skip
    with weights_of(tmp_path, stored, compressed(num_bits=5) | {"version": version}) as weights:
        assert np.array_equal(weights.read("a.weight"), codes - 16)


@pytest.mark.parametrize(
    ("suffix", "array", "words"),
    [
        (".weight_packed", np.zeros((8, 7), np.int32), r"shape \(8, 7\) for \(8, 64\), expected codes of 4"),
        (".weight_scale", np.zeros((8, 3), np.float32), r"shape \(8, 3\), expected \(8, 2\) for \(8, 64\)"),
        (".weight_zero_point", np.zeros((2, 2), np.int32), r"as I32 \(2, 2\), expected I32 \(1, 2\) or"),
        (".weight_g_idx", np.zeros(63, np.int32), r"shape \(63,\), expected \(64,\), a group for every"),
        (".weight_g_idx", np.full(64, 2, np.int32), r"groups from 2 to 2, expected 0 to 1"),
        (".weight_shape", np.array([8, 8, 8]), "expected a matrix"),
        (".weight_shape", np.array([8, -5]), r"weight_shape \(8, -5\), expected a matrix that is not empty"),
        (".weight_shape", np.array([9, 64]), r"shape \(8, 8\) for \(9, 64\), expected codes of 4"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(suffix: str, array: np.ndarray, words: str, tmp_path: Path) -> None:
    stored, _ = packed_integers(matrix(8, 64), 4, np.arange(64) // 32)
    config = compressed(num_bits=4, group_size=32)
    with (
        weights_of(tmp_path, {**stored, suffix: array}, config) as weights,
        pytest.raises(CheckpointError, match=words),
    ):
        weights.read("a.weight")


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    stored, _ = packed_integers(matrix(8, 64), 4, np.arange(64) // 32)
    del stored[".weight_scale"]
    with (
        weights_of(tmp_path, stored, compressed(num_bits=4)) as weights,
        pytest.raises(MissingTensor, match=r"a\.weight: quantized, but a\.weight_scale is missing"),
    ):
        weights.weight("a.weight")


# ---- 8-bit integers


@pytest.mark.parametrize("shape", [(1,), (6, 1), (6, 2)], ids=str)
def test_8_bit_integers_with_zero_points(shape: tuple[int, ...], tmp_path: Path) -> None:
    random = np.random.RandomState(8)
    codes = random.randint(-128, 128, (6, 8)).astype(np.int8)
    zeros = random.randint(-128, 128, shape).astype(np.int8)
    scales = random.random_sample(shape).astype(np.float32)
    stored = {".weight": codes, ".weight_scale": scales, ".weight_zero_point": zeros}

    def wide(part: np.ndarray) -> np.ndarray:
        return np.repeat(part.astype(np.float32).reshape(-1, part.shape[-1]), 8 // part.shape[-1], axis=1)

    expected = (codes.astype(np.float32) - wide(zeros)) * wide(scales)
    with weights_of(tmp_path, stored, {"quant_method": "compressed-tensors"}) as weights:
        assert np.array_equal(weights.read("a.weight"), expected)
        assert np.array_equal(weights.read_rows("a.weight", 1, 4), expected[1:4])


def test_zero_points_of_another_shape_are_an_error(tmp_path: Path) -> None:
    stored = {
        ".weight": np.zeros((6, 8), np.int8), ".weight_scale": np.ones((6, 1), np.float32),
        ".weight_zero_point": np.zeros((6, 2), np.int8),
    }  # fmt: skip
    with (
        weights_of(tmp_path, stored, {"quant_method": "compressed-tensors"}) as weights,
        pytest.raises(CheckpointError, match=r"stored as I8 \(6, 2\), expected I8 \(6, 1\), as of a\."),
    ):
        weights.weight("a.weight")


# ---- 4-bit floats


def test_4_bit_floats_under_every_name(tmp_path: Path) -> None:
    weight = matrix(4, 64)
    compressed_names, expected = mxfp4(weight)
    codes, scales = compressed_names[".weight_packed"], compressed_names[".weight_scale"]
    exponents = scales.view(ml_dtypes.float8_e8m0fnu)
    for index, (method, stored) in enumerate({
        "compressed-tensors": compressed_names,
        "modelopt": {".weight": codes, ".weight_scale": scales},
        "fp8": {".weight": codes.view(np.int8), ".scale": exponents},
        "mxfp4": {".weight_blocks": codes.reshape(4, 2, 16), ".weight_scales": scales},
    }.items()):  # fmt: skip
        with weights_of(tmp_path / str(index), stored, {"quant_method": method}) as weights:
            assert weights.names() == ("a.weight",)
            assert np.array_equal(weights.read("a.weight"), expected)


def test_factors_multiply_or_divide(tmp_path: Path) -> None:
    stored, expected = nvfp4(matrix(4, 64))
    with weights_of(tmp_path / "multiplies", stored, {"quant_method": "modelopt"}) as weights:
        assert np.array_equal(weights.read("a.weight"), expected)
    inverse = np.float32(1) / stored[".weight_scale_2"]
    divided = {
        ".weight_packed": stored[".weight"], ".weight_scale": stored[".weight_scale"],
        ".weight_global_scale": inverse.reshape(1),
    }  # fmt: skip
    with weights_of(tmp_path / "divides", divided, {"quant_method": "compressed-tensors"}) as weights:
        np.testing.assert_allclose(weights.read("a.weight"), expected, rtol=2**-22)


def test_scales_in_tiles_are_refused(tmp_path: Path) -> None:
    stored, _ = nvfp4(matrix(4, 64))
    stored[".weight_scale"] = np.zeros((128, 4), ml_dtypes.float8_e4m3fn)
    with (
        weights_of(tmp_path, stored, {"quant_method": "modelopt"}) as weights,
        pytest.raises(
            CheckpointError, match=r"shape \(128, 4\), expected \(4, 4\) for \(4, 64\) in groups of"
        ),
    ):
        weights.weight("a.weight")


# ---- torchao


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (None, "__metadata__ doesn't say what it is"),
        ("{", "expected an object with _type"),
        ("[]", "expected an object with _type"),
        ('{"_type": "Int4TilePackedTo4dTensor"}', "torchao's Int4TilePackedTo4dTensor in I8, expected Int8T"),
        ('{"_type": "Float8Tensor"}', "stored as I8, expected F8_E4M3"),
    ],
)
def test_other_tensors_of_torchao_are_refused(told: str | None, words: str, tmp_path: Path) -> None:
    source = folder_of("torchao", "int8wo")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with SafetensorsFile(source / "model.safetensors") as file:
        metadata = dict(file.metadata)
        name = next(name for name in metadata if name.endswith("q_a_proj.weight"))
    del metadata[name]
    if told is not None:
        metadata[name] = told
    _with_metadata(source / "model.safetensors", tmp_path / "model.safetensors", metadata)
    with (
        convert.open_checkpoint(tmp_path) as weights,
        pytest.raises(CheckpointError, match=words) as caught,
    ):
        weights.weight(name)
    assert isinstance(caught.value, UnsupportedCheckpoint) or "stored as" in words


def _with_metadata(source: Path, target: Path, metadata: dict[str, str]) -> None:
    """Write the safetensors file `source` with other strings in its header."""
    content = source.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | {"__metadata__": metadata}
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
