"""Modules as MLX quantizes them: its modes, and settings of single modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from gguf_tools.errors import BadConfig, CheckpointError, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import MXFP4, NVFP4
from tests.support.checkpoints import Tensors, write_checkpoint
from tests.support.packers import Packed, pack_low_first
from tests.support.scaled_packers import mxfp4, nvfp4


def matrix(rows: int = 6, cols: int = 128) -> np.ndarray:
    return np.random.RandomState(3).randn(rows, cols).astype(np.float32)


def words(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes).view(np.uint32)


def affine(weight: np.ndarray, bits: int, group_size: int, dtype: Any = np.float16) -> Packed:
    groups = weight.reshape(len(weight), -1, group_size)
    low = groups.min(axis=2).astype(dtype)
    scales = ((groups.max(axis=2) - low.astype(np.float32)) / (2**bits - 1)).astype(dtype)
    wide, lows = (np.repeat(each.astype(np.float32), group_size, axis=1) for each in (scales, low))
    codes = np.clip(np.rint((weight - lows) / wide), 0, 2**bits - 1).astype(np.int64)
    stored = {".weight": pack_low_first(codes, bits), ".scales": scales, ".biases": low}
    return stored, codes.astype(np.float32) * wide + lows


def as_mxfp4(weight: np.ndarray) -> Packed:
    stored, meaning = mxfp4(weight)
    return {".weight": words(stored[".weight_packed"]), ".scales": stored[".weight_scale"]}, meaning


def as_nvfp4(weight: np.ndarray) -> Packed:
    stored, meaning = nvfp4(weight, np.float32(1))
    return {".weight": words(stored[".weight"]), ".scales": stored[".weight_scale"].view(np.uint8)}, meaning


def as_mxfp8(weight: np.ndarray) -> Packed:
    exponents = np.ceil(np.log2(np.abs(weight).reshape(len(weight), -1, 32).max(axis=2) / 448))
    wide = np.repeat(np.exp2(exponents), 32, axis=1).astype(np.float32)
    codes = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
    stored = {".weight": words(codes.view(np.uint8)), ".scales": (exponents + 127).astype(np.uint8)}
    return stored, codes.astype(np.float32) * wide


def opened(folder: Path, modules: dict[str, Tensors], quantization: dict[str, Any]) -> Any:
    tensors = {name + suffix: array for name, stored in modules.items() for suffix, array in stored.items()}
    write_checkpoint(folder, {"quantization": quantization}, tensors)
    return convert.open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (3, 32), (4, 64), (5, 32), (6, 64), (8, 128)])
def test_affine_codes_are_scaled_and_biased(bits: int, group_size: int, dtype: Any, tmp_path: Path) -> None:
    stored, meaning = affine(matrix(), bits, group_size, dtype)
    with opened(tmp_path, {"a": stored}, {"bits": bits, "group_size": group_size}) as weights:
        assert np.array_equal(weights.read("a.weight"), meaning)
        assert weights.weight("a.weight").stored_as == f"MLX {bits} bits in groups of {group_size}"
        assert weights.notes == ()


@pytest.mark.parametrize(
    ("mode", "pack", "bits", "group_size", "type_"),
    [("mxfp4", as_mxfp4, 4, 32, MXFP4), ("nvfp4", as_nvfp4, 4, 16, NVFP4), ("mxfp8", as_mxfp8, 8, 32, None)],
)
def test_other_modes_are_floats_with_scales(
    mode: str, pack: Any, bits: int, group_size: int, type_: Any, tmp_path: Path
) -> None:
    stored, meaning = pack(matrix())
    stacked = {suffix: np.stack([array, array[::-1]]) for suffix, array in stored.items()}
    said = {"bits": bits, "group_size": group_size, "mode": mode}
    with opened(tmp_path, {"a": stored, "b": stacked}, said) as weights:
        assert np.array_equal(weights.read("a.weight"), meaning)
        assert np.array_equal(weights.read("b.weight"), np.stack([meaning, meaning[::-1]]))
        assert type_ is None or weights.weight("a.weight").type == type_


def test_a_module_may_have_settings_of_its_own(tmp_path: Path) -> None:
    """What they lack is MLX's default, not what all others have."""
    many, meant_many = as_mxfp4(matrix())
    own, meant_own = affine(matrix(), 8, 64)
    said = {"bits": 4, "group_size": 32, "mode": "mxfp4", "own": {"bits": 8}, "plain": False}
    modules = {"many": many, "own": own, "plain": {".weight": matrix()}}
    with opened(tmp_path, modules, said) as weights:
        assert np.array_equal(weights.read("many.weight"), meant_many)
        assert np.array_equal(weights.read("own.weight"), meant_own)
        assert np.array_equal(weights.read("plain.weight"), matrix())
        assert weights.notes == ()


@pytest.mark.parametrize("mode", [{}, {"mode": "affine"}])
def test_quantization_config_may_say_it_alone(mode: dict[str, str], tmp_path: Path) -> None:
    stored, meaning = affine(matrix(), 4, 64)
    said = {"bits": 4, "group_size": 64, **mode}
    tensors = {f"a{suffix}": array for suffix, array in stored.items()}
    write_checkpoint(tmp_path, {"quantization_config": said}, tensors)
    with convert.open_checkpoint(tmp_path) as weights:
        assert np.array_equal(weights.read("a.weight"), meaning)


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ({"bits": 4, "group_size": 64, "mode": "fp3"}, UnsupportedCheckpoint, "MLX's mode 'fp3' is not"),
        ({"bits": 4, "group_size": 32}, CheckpointError,
         r"a\.scales: shape \(6, 2\), expected \(6, 4\) for \(6, 16\) with 4 bits in groups of 32, as"),
        ({"bits": "4", "group_size": 64}, BadConfig, r"quantization\.bits is '4', expected bits and gr"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp8"}, CheckpointError, "a.scales: F16, 4 bits in groups"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(said: Any, error: Any, text: str, tmp_path: Path) -> None:
    stored, _ = affine(matrix(), 4, 64)
    with opened(tmp_path, {"a": stored}, said) as weights, pytest.raises(error, match=text) as caught:
        weights.weight("a.weight")
    assert "\n" not in str(caught.value)


def test_a_factor_of_the_whole_is_not_read(tmp_path: Path) -> None:
    stored, _ = as_nvfp4(matrix())
    said = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    modules = {"a": {**stored, ".global_scale": np.ones(1, np.float32)}}
    with opened(tmp_path, modules, said) as weights, pytest.raises(UnsupportedCheckpoint, match="global_sc"):
        weights.weight("a.weight")
