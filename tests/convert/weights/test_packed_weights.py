"""GPTQ, Marlin, AWQ, auto-round, EXL2, EETQ, bitsandbytes, HQQ: the recorded checkpoints, and the corners.

Everything is compared bit for bit. GPTQ, Marlin, AWQ, auto-round, EXL2 and EETQ are exact values rounded once
to float32, so there is one right answer. bitsandbytes and HQQ round more than once; the loaders round
where the formats' own programs do, and give their bits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from convert.weights.base import Weight
from convert.weights.model_weights import ModelWeights
from gguf_tools.errors import BadConfig, CheckpointError, MissingTensor, UnsupportedCheckpoint
from tests.support.checkpoints import (
    Tensors,
    edit_config,
    edit_tensors,
    read_config,
    read_tensors,
    write_checkpoint,
)
from tests.support.golden_checkpoints import cases_in, expected_weights, folder_of
from tests.support.packers import NF4, awq_gemm, gptq, nf4, pack_low_first

CASES: dict[str, tuple[str, ...]] = {
    "auto-round": ("auto_gptq_packing_w4_sym", "auto_round_packing_w4_asym", "w2_asym_v2"),
    "awq": ("gemm_g128", "gemm_g32_bias", "gemm_g64", "gemm_quant_config_json", "gemv_fast_g64", "gemv_g128",
            "marlin_g128", "marlin_g128_2groups"),
    "bnb": ("fp4_bs64", "fp4_double_quant_fp16", "int8", "nf4_bs64", "nf4_double_quant", "nf4_ragged_tail",
            "nf4_storage_bf16"),
    "eetq": ("eetq_own_names", "transformers_names"),
    "exl2": ("b4_g128", "b6_b5_padded_cols", "b8_ragged_last_group", "mixed_5_4", "mixed_8_6_3_2"),
    "gptq": ("dynamic_mixed_bits", "planar_6bit", "quantize_config_json", "v1_2bit_asym_g32",
             "v1_3bit_asym_g64", "v1_4bit_actorder_g64", "v1_4bit_asym_g32_bias", "v1_4bit_sym_g128",
             "v1_4bit_zero_wrap", "v1_8bit_asym_g32", "v1_8bit_sym_gminus1", "v2_2bit_asym_actorder",
             "v2_4bit_asym_g32", "v2_8bit_asym_actorder"),
    "hqq": ("b2_g16_axis1", "b3_g64_axis1", "b4_g64_axis0", "b4_g64_axis1", "b8_g128"),
    "marlin": ("autogptq_marlin_g128_bias", "ist_g128", "ist_per_channel"),
    "marlin_24": ("gptq_names_w4_g128", "w4_channel", "w4_g128", "w8_channel"),
}  # fmt: skip
ALL = [(format_, case) for format_, cases in CASES.items() for case in cases]
NAME = "model.layers.0.self_attn.o_proj"


def opened(folder: Path) -> ModelWeights:
    return open_weights(Checkpoint(folder))


def read_all(weight: Weight) -> np.ndarray:
    return weight.read_rows(0, weight.shape[0])


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def random_matrix(rows: int, cols: int) -> np.ndarray:
    return np.random.RandomState(rows + cols).standard_normal((rows, cols)).astype(np.float32)


def module(folder: Path, tensors: Tensors, **quantization: Any) -> Weight:
    """Return the weight of a checkpoint with one module, whose tensors are given by their suffixes."""
    stored = {NAME + suffix: tensor for suffix, tensor in tensors.items()}
    config = {"quantization_config": quantization} if quantization else {}
    weights = opened(write_checkpoint(folder, config, stored))
    assert weights.names() == (f"{NAME}.weight",)
    return weights.weight(f"{NAME}.weight")


def read_everything(folder: Path) -> None:
    with opened(folder) as weights:
        for name in weights.names():
            weights.read(name)


def ending(tensors: Tensors, suffix: str) -> str:
    """Return the name of the first tensor with `suffix`."""
    return next(name for name in tensors if name.endswith(suffix))


# ---- recorded checkpoints


def test_every_recorded_checkpoint_is_listed() -> None:
    assert {format_: set(cases) for format_, cases in CASES.items()} == {f: cases_in(f) for f in CASES}


@pytest.mark.parametrize(("format_", "case"), ALL)
def test_a_recorded_checkpoint_has_these_weights(format_: str, case: str) -> None:
    expected = expected_weights(format_, case)
    with opened(folder_of(format_, case)) as weights:
        assert set(weights.names()) == set(expected)
        assert not weights.dropped
        for name, weight in expected.items():
            found = weights.read(name)
            assert found.dtype == np.float32
            # -0 and 0 are one weight: what is 2:4 sparse, or 0 times a negative number, has no sign to keep.
            assert found.shape == weight.shape, name
            assert np.array_equal(found, weight), name
            # Nothing, at either end; a row alone; all but the ends.
            n_rows = len(weight) if weight.ndim == 2 else 1
            for start, stop in ((0, 0), (n_rows, n_rows), (n_rows // 3, n_rows // 3 + 1), (1, n_rows - 1)):
                part = weights.weight(name).read_rows(start, max(start, stop))
                assert np.array_equal(part, weight.reshape(n_rows, -1)[start : max(start, stop)]), name


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 10**6), st.data())
def test_row_ranges_equal_the_whole(which: tuple[str, str], pick: int, data: st.DataObject) -> None:
    with opened(folder_of(*which)) as weights:
        matrices = [name for name in weights.names() if len(weights.weight(name).shape) == 2]
        weight = weights.weight(matrices[pick % len(matrices)])
        start = data.draw(st.integers(0, weight.shape[0]))
        stop = data.draw(st.integers(start, weight.shape[0]))
        found = weight.read_rows(start, stop)
        assert found.shape == (stop - start, weight.shape[1])
        assert found.flags.c_contiguous
        assert np.array_equal(found, read_all(weight)[start:stop])


def test_looking_at_checkpoints_does_not_load_numba() -> None:
    folders = [str(folder_of(*which)) for which in ALL]
    probe = (
        "import sys, convert\n"
        f"for folder in {folders}:\n"
        "    with convert.open_checkpoint(folder) as weights:\n"
        "        print(*[weights.weight(name).stored_as for name in weights.names()])\n"
        "print('numba' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "False"


# ---- GPTQ


@pytest.mark.parametrize(
    ("bits", "layout"),
    [
        *((bits, layout) for bits in (2, 3, 4, 8) for layout in ("gptq", "gptq_v2")),
        *((bits, "gptq_p") for bits in (5, 6, 7)),
    ],
)
def test_gptq_of_any_width(bits: int, layout: str, tmp_path: Path) -> None:
    weight = random_matrix(64, 96)
    # Rows of one sign have their zero at an end, which version 1 stores as all ones, or as a borrow.
    weight[:8], weight[8:16] = np.abs(weight[:8]), -np.abs(weight[8:16])
    version = 1 if layout == "gptq" else 2
    tensors, meaning = gptq(weight, bits, np.arange(96) // 32, version=version)
    found = module(tmp_path, tensors, quant_method="gptq", bits=bits, group_size=32, checkpoint_format=layout)
    assert equal_bits(read_all(found), meaning)


def test_gptq_in_planes_of_a_width_that_is_usually_a_stream(tmp_path: Path) -> None:
    from tests.support.packers import pack_planes, quantize_groups

    codes, zeros, scales, meaning = quantize_groups(random_matrix(32, 64), 3, np.arange(64) // 32)
    tensors = {
        ".qweight": np.ascontiguousarray(pack_planes(codes, 3).T).view(np.int32),
        ".qzeros": pack_planes(zeros.T, 3).view(np.int32),
        ".scales": np.ascontiguousarray(scales.T),
        ".g_idx": (np.arange(64) // 32).astype(np.int32),
    }
    found = module(tmp_path, tensors, quant_method="gptq", bits=3, checkpoint_format="gptq_p")
    assert equal_bits(read_all(found), meaning)


def test_gptq_with_a_short_last_group_and_rows_that_fill_no_word(tmp_path: Path) -> None:
    tensors, meaning = gptq(random_matrix(44, 88), 4, np.arange(88) // 32)
    assert tensors[".qzeros"].shape == (3, 6)
    assert equal_bits(read_all(module(tmp_path, tensors, quant_method="gptq", group_size=32)), meaning)


@pytest.mark.parametrize("how", ["missing", "placeholder"])
def test_gptq_without_a_useful_g_idx_has_groups_that_are_runs(how: str, tmp_path: Path) -> None:
    tensors, meaning = gptq(random_matrix(32, 96), 4, np.arange(96) // 32)
    if how == "missing":
        del tensors[".g_idx"]
    else:
        tensors[".g_idx"][:] = 0
    assert equal_bits(
        read_all(module(tmp_path, tensors, quant_method="gptq", bits=4, group_size=32)), meaning
    )


def test_gptq_without_zeros_has_them_in_the_middle(tmp_path: Path) -> None:
    tensors, _ = gptq(random_matrix(32, 64), 4, np.arange(64) // 32, version=2)
    tensors[".qzeros"][:] = np.int32(-0x77777778)  # 8 in every field
    quantization = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    expected = read_all(module(tmp_path / "with", tensors, **quantization))
    del tensors[".qzeros"]
    assert equal_bits(read_all(module(tmp_path / "without", tensors, **quantization)), expected)


def test_group_sizes_of_single_modules_are_found_by_name_or_expression(tmp_path: Path) -> None:
    # 96 columns in 2 groups: of 64 and the rest, not of 48.
    tensors, meaning = gptq(random_matrix(32, 96), 4, np.arange(96) // 64, with_groups=False)
    for index, (key, pattern) in enumerate([("extra_config", NAME), ("dynamic", r"+:.*\.o_proj$")]):
        method = {"dynamic": "gptq", "extra_config": "auto-round"}[key]
        quantization = {
            "quant_method": method,
            "bits": 4,
            "group_size": 32,
            key: {pattern: {"group_size": 64}},
        }
        assert equal_bits(read_all(module(tmp_path / str(index), tensors, **quantization)), meaning)


def test_gptq_is_known_by_its_shapes_when_nothing_says_so(tmp_path: Path) -> None:
    tensors, meaning = gptq(random_matrix(32, 64), 4, np.arange(64) // 32)
    weight = module(tmp_path, tensors)
    assert equal_bits(read_all(weight), meaning)
    assert weight.stored_as == "GPTQ 4 bits in groups of 32"


def test_settings_that_are_stored_as_tensors_are_no_weights(tmp_path: Path) -> None:
    tensors, meaning = gptq(random_matrix(32, 64), 4, np.arange(64) // 32)
    stored = {NAME + suffix: tensor for suffix, tensor in tensors.items()}
    scalars = {"gptq_bits": np.array(4, np.int32), "gptq_groupsize": np.array(32, np.int32)}
    weights = opened(write_checkpoint(tmp_path, {}, stored | scalars))
    assert set(weights.dropped) == set(scalars)
    assert equal_bits(weights.read(f"{NAME}.weight"), meaning)


def test_scales_may_be_any_floats(tmp_path: Path) -> None:
    tensors, _ = gptq(random_matrix(32, 64), 4, np.arange(64) // 32)
    scales = tensors[".scales"].astype(ml_dtypes.bfloat16)
    found = [
        read_all(module(tmp_path / dtype.__name__, tensors | {".scales": scales.astype(dtype)}))
        for dtype in (ml_dtypes.bfloat16, np.float32)
    ]
    assert equal_bits(*found)


# ---- AWQ and auto-round


def test_awq_without_zeros_has_them_in_the_middle(tmp_path: Path) -> None:
    tensors, _ = awq_gemm(random_matrix(32, 64), 32)
    tensors[".qzeros"][:] = np.int32(-0x77777778)
    expected = read_all(module(tmp_path / "with", tensors, quant_method="awq", bits=4, group_size=32))
    del tensors[".qzeros"]
    found = read_all(module(tmp_path / "without", tensors, quant_method="awq", bits=4, group_size=32))
    assert equal_bits(found, expected)


def test_awq_is_known_by_its_shapes_when_nothing_says_so(tmp_path: Path) -> None:
    tensors, meaning = awq_gemm(random_matrix(40, 64), 32)
    weight = module(tmp_path, tensors)
    assert equal_bits(read_all(weight), meaning)
    assert weight.stored_as == "AWQ GEMM 4 bits in groups of 32"


def test_auto_round_packs_as_awq_too(tmp_path: Path) -> None:
    tensors, meaning = awq_gemm(random_matrix(32, 64), 32)
    quantization = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
    found = module(tmp_path, tensors, packing_format="auto_round:auto_awq", **quantization)
    assert equal_bits(read_all(found), meaning)


@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round:gptqmodel", 2),
        ("auto_round:auto_gptq", 1),
        ("auto", 1),
        (None, 1),
        ("auto_round:marlin", 2),
    ],
)
def test_auto_round_packings_have_their_convention_of_zeros(
    packing: str | None, version: int, tmp_path: Path
) -> None:
    tensors, meaning = gptq(random_matrix(32, 64), 4, np.arange(64) // 32, version=version)
    quantization = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing}
    assert equal_bits(read_all(module(tmp_path, tensors, **quantization)), meaning)


# ---- EXL2


def test_exl2_with_a_last_word_that_is_not_full(tmp_path: Path) -> None:
    # 32 columns of 5 bits and 10 of 3: the last ten take 30 of 32 bits.
    random = np.random.RandomState(0)
    codes = [random.randint(0, 1 << bits, (32, n)) for bits, n in ((5, 32), (3, 10))]
    roots = random.randint(0, 16, (2, 32))
    order = random.permutation(42).astype(np.int32)
    maxima = np.array([0.5, 0.25], np.float16)
    words = [pack_low_first(part, bits) for part, bits in zip(codes, (5, 3), strict=True)]
    tensors = {
        ".q_weight": np.ascontiguousarray(np.concatenate(words, axis=1).T).view(np.int32),
        ".q_scale": pack_low_first(roots, 4).view(np.int32),
        ".q_scale_max": maxima,
        ".q_groups": np.array([5, 0, 3, 5], np.int16),
        ".q_invperm": order,
    }
    scales = ((roots + 1) ** 2 * maxima[:, None].astype(np.float32) / 256).astype(np.float32)
    by_group = [(codes[g] - (1 << bits - 1)) * scales[g][:, None] for g, bits in ((0, 5), (1, 3))]
    expected = np.concatenate(by_group, axis=1)[:, order].astype(np.float32)
    assert equal_bits(read_all(module(tmp_path, tensors, quant_method="exl2")), expected)


# ---- bitsandbytes


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("shape", [(7, 9), (64, 33), (40, 200)], ids=str)
def test_nf4_of_any_shape_in_both_spellings(shape: tuple[int, int], nested: bool, tmp_path: Path) -> None:
    tensors, meaning = nf4(random_matrix(*shape), 64, nested=nested)
    found = module(tmp_path / "bnb", tensors, quant_method="bitsandbytes")
    assert equal_bits(read_all(found), meaning)
    for start, stop in ((1, 2), (2, 7), (6, 7)):
        assert equal_bits(found.read_rows(start, stop), meaning[start:stop])
    joined = {
        ".weight_quant_state" if "quant_state" in suffix else suffix.replace(".weight.", ".weight_"): tensor
        for suffix, tensor in tensors.items()
    }
    assert equal_bits(read_all(module(tmp_path / "joined", joined, quant_method="bitsandbytes")), meaning)


def test_floats_that_bitsandbytes_would_quantize_on_loading_stay_as_they_are(tmp_path: Path) -> None:
    weight = random_matrix(4, 6).astype(np.float16)
    assert np.array_equal(
        read_all(module(tmp_path, {".weight": weight}, quant_method="bitsandbytes")), weight
    )


def test_a_stack_of_matrices_counts_its_rows_over_all_of_them(tmp_path: Path) -> None:
    tensors, meaning = nf4(random_matrix(12, 40), 64)
    name = ending(tensors, "__nf4")
    tensors[name] = state(shape=[3, 4, 40])(tensors[name])
    weight = module(tmp_path, tensors, quant_method="bitsandbytes")
    assert weight.shape == (3, 4, 40)
    assert equal_bits(weight.read_rows(3, 9), meaning[3:9])


# ---- HQQ


def hqq(codes: np.ndarray, bits: int, shape: tuple[int, int], axis: int, scales: Any, zeros: Any) -> Tensors:
    """Pack a matrix of groups: sections of its rows, the first in the highest bits."""
    sections = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    dtype = np.int32 if bits == 3 else np.uint8
    n_rows = -(-len(codes) // sections)
    padded = np.concatenate([codes, np.zeros((n_rows * sections - len(codes), codes.shape[1]), np.int64)])
    parts = padded.reshape(sections, n_rows, -1)
    packed = sum(part << bits * (sections - 1 - index) for index, part in enumerate(parts))
    scalar = {".nbits": bits, ".axis": axis}
    return {
        ".W_q": np.asarray(packed).astype(dtype),
        ".scale": scales,
        ".zero": zeros,
        ".shape": np.array(shape, np.int64),
        **{suffix: np.array(value, np.int32) for suffix, value in scalar.items()},
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq_of_any_width_with_groups_that_cross_rows(bits: int, axis: int, tmp_path: Path) -> None:
    random = np.random.RandomState(bits)
    shape, size = (30, 24), 16
    n_groups = 30 * 24 // size
    matrix_shape = (n_groups, size) if axis == 1 else (size, n_groups)
    codes = random.randint(0, 1 << bits, matrix_shape)
    along = (n_groups, 1) if axis == 1 else (1, n_groups)
    scales = random.rand(*along).astype(np.float16)
    zeros = (random.rand(*along) * (1 << bits)).astype(np.float16)
    weight = module(tmp_path, hqq(codes, bits, shape, axis, scales, zeros), quant_method="hqq")
    difference = codes.astype(np.float32) - zeros.astype(np.float32)
    expected = (difference * scales.astype(np.float32)).reshape(shape)
    assert equal_bits(read_all(weight), expected)
    for start, stop in ((1, 2), (13, 16), (29, 30), (0, 17)):
        assert equal_bits(weight.read_rows(start, stop), expected[start:stop])


def test_hqq_codes_under_a_float_dtype_are_bytes(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = ending(tensors, ".W_q")
        tensors[name] = np.ascontiguousarray(tensors[name]).view(np.float16)

    folder = shutil.copytree(folder_of("hqq", "b4_g64_axis1"), tmp_path / "hqq")
    with opened(edit_tensors(folder, edit)) as weights:
        for name, weight in expected_weights("hqq", "b4_g64_axis1").items():
            assert np.array_equal(weights.read(name), weight)


# ---- what is refused


def removing(suffix: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(ending(tensors, suffix))


def setting(suffix: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Any]:
    def edit(tensors: Tensors) -> None:
        name = ending(tensors, suffix)
        tensors[name] = value(tensors[name].copy())

    return edit


def state(**changes: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda stored: np.frombuffer(json.dumps(json.loads(stored.tobytes()) | changes).encode(), np.uint8)


BROKEN: dict[str, tuple[str, str, Callable[[Tensors], Any], type[Exception], str]] = {
    "GPTQ without scales": (
        "gptq", "v1_4bit_sym_g128", removing(".scales"), MissingTensor, r"q_a_proj\.scales is missing"),
    "a group that isn't there": (
        "gptq", "v1_4bit_actorder_g64", setting(".g_idx", lambda g: g + 1), CheckpointError,
        r"q_a_proj\.g_idx: group 3, expected 0 to 2"),
    "GPTQ of no width": (
        "gptq", "v1_4bit_sym_g128", setting(".g_idx", lambda g: g[:-9]), CheckpointError,
        r"q_a_proj: 247 columns in 32 words fit no number of bits, expected .*config\.bits \(4\)"),
    "GPTQ in bytes": (
        "gptq", "v1_4bit_sym_g128", setting(".qweight", lambda q: q.view(np.int8)), UnsupportedCheckpoint,
        r"GPTQ codes packed in I8 .*quantization_config\.pack_dtype"),
    "too few zeros": (
        "gptq", "v1_4bit_sym_g128", setting(".qzeros", lambda z: z[:1]), CheckpointError,
        r"qzeros: shape \(1, 8\), expected \(2, 8\) for 4 bits"),
    "scales of integers": (
        "gptq", "v1_4bit_sym_g128", setting(".scales", lambda s: s.view(np.int16)), UnsupportedCheckpoint,
        r"scales stored as I16"),
    "AWQ whose codes don't fit": (
        "awq", "gemm_g64", setting(".qweight", lambda q: np.ascontiguousarray(q[:, :-1])), CheckpointError,
        r"qweight: I32 \(192, 11\), expected I32 with 12 columns for 96 outputs"),
    "GEMV with too few groups": (
        "awq", "gemv_g128", setting(".scales", lambda s: np.ascontiguousarray(s[:, :1])), CheckpointError,
        r"scales: shape \(64, 1\), expected at least 2 groups"),
    "Marlin without scales": (
        "marlin", "autogptq_marlin_g128_bias", removing(".s"), UnsupportedCheckpoint, r"q_a_proj\.B"),
    "Marlin whose codes don't fit": (
        "marlin", "ist_g128", setting(".B", lambda b: np.ascontiguousarray(b[:, :256])), CheckpointError,
        r"B: shape \(16, 256\), expected 512 columns for 256 outputs"),
    "2:4 without places": (
        "marlin_24", "gptq_names_w4_g128", removing(".B_meta"), MissingTensor, r"B_meta is missing"),
    "EXL2 columns in no order": (
        "exl2", "b4_g128", setting(".q_invperm", lambda p: p // 2), CheckpointError,
        r"q_invperm: no permutation of 256 columns"),
    "EXL2 of 7 bits": (
        "exl2", "b4_g128", setting(".q_groups", lambda g: g + np.int16([3, 0, 0, 0])), CheckpointError,
        r"q_groups: group 0 has 7 bits from word 0"),
    "EXL2 with too many columns": (
        "exl2", "b4_g128", setting(".q_invperm", lambda p: np.arange(300, dtype=np.int32)), CheckpointError,
        r"q_groups: groups of 256 columns, expected 300"),
    "EETQ whose scales don't fit": (
        "eetq", "transformers_names", setting(".weight_scales", lambda s: s[:-1]), CheckpointError,
        r"weight_scales: shape \(127,\), expected \(128,\)"),
    "bitsandbytes without blocks": (
        "bnb", "nf4_bs64", setting("__nf4", state(blocksize=0)), CheckpointError,
        r"blocksize 0, expected a multiple of 8"),
    "bitsandbytes with other blocks": (
        "bnb", "nf4_bs64", setting("__nf4", state(blocksize=128)), CheckpointError,
        r"absmax: 128 scales, expected 64 blocks of 128"),
    "bitsandbytes with nested scales and nothing to add": (
        "bnb", "nf4_double_quant", setting("__nf4", state(nested_offset=None)), CheckpointError,
        r"nested_blocksize 256 and nested_offset None, expected a size and a number"),
    "bitsandbytes with a state that isn't JSON": (
        "bnb", "nf4_bs64", setting("__nf4", lambda s: s[1:]), CheckpointError, r"no JSON object"),
    "bitsandbytes with too few codes": (
        "bnb", "nf4_bs64", setting("q_a_proj.weight", lambda w: w[1:]), CheckpointError,
        r"4095 bytes, expected 4096"),
    "int8 in tiles": (
        "bnb", "int8", setting(".weight_format", lambda f: f + np.uint8(2)), UnsupportedCheckpoint,
        r"weight_format: bitsandbytes int8 in order 2"),
    "HQQ with quantized zeros": (
        "hqq", "b4_g64_axis1", setting(".quant_zero", lambda f: f | np.uint8(1)), UnsupportedCheckpoint,
        r"quant_zero: HQQ with quantized scales or zero points"),
    "HQQ in a packing that isn't known": (
        "hqq", "b4_g64_axis1", setting(".packing", lambda p: np.frombuffer(b"7bit_u8", np.uint8)),
        UnsupportedCheckpoint, r"HQQ packed as '7bit_u8' is not read \(read: 8bit_u8"),
    "HQQ with too few codes": (
        "hqq", "b4_g64_axis1", setting(".W_q", lambda q: q[:-1]), CheckpointError,
        r"W_q: 4032 bytes, expected 8192 codes of 4 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    format_, case, edit, error, words = BROKEN[name]
    folder = edit_tensors(shutil.copytree(folder_of(format_, case), tmp_path / case), edit)
    with pytest.raises(error, match=words) as caught:
        read_everything(folder)
    assert "\n" not in str(caught.value)


MISSHAPEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a scalar": lambda t: t.reshape(-1)[:1].reshape(()),
    "flat": lambda t: t.reshape(-1),
    "one axis more": lambda t: t[None],
    "no rows": lambda t: np.atleast_1d(t)[:0],
    "half of the rows": lambda t: np.atleast_1d(t)[: len(np.atleast_1d(t)) // 2],
    "half of the columns": lambda t: np.atleast_1d(t)[..., : np.atleast_1d(t).shape[-1] // 2],
    "transposed": lambda t: t.T,
    "bytes": lambda t: np.atleast_1d(np.ascontiguousarray(t)).view(np.uint8),
    "other floats": lambda t: t.astype(np.float32 if t.dtype != np.float32 else np.float16),
    "longer integers": lambda t: t.astype(np.int64),
    "below zero": lambda t: np.full(t.shape, -1).astype(t.dtype),
}


@pytest.mark.parametrize(
    ("format_", "case"),
    [("auto-round", "w2_asym_v2"), ("awq", "gemm_g32_bias"), ("awq", "gemv_fast_g64"), ("awq", "gemv_g128"),
     ("bnb", "int8"), ("bnb", "nf4_double_quant"), ("bnb", "nf4_bs64"), ("eetq", "eetq_own_names"),
     ("exl2", "mixed_8_6_3_2"), ("gptq", "v1_3bit_asym_g64"), ("gptq", "v2_2bit_asym_actorder"),
     ("hqq", "b3_g64_axis1"), ("hqq", "b4_g64_axis0"), ("marlin", "ist_per_channel"),
     ("marlin_24", "w8_channel")],
)  # fmt: skip
def test_tensors_of_another_shape_or_type_are_read_or_refused(
    format_: str, case: str, tmp_path: Path
) -> None:
    tensors, config = read_tensors(folder_of(format_, case)), read_config(folder_of(format_, case))
    for name, tensor in tensors.items():
        for change in MISSHAPEN.values():
            stored = tensors | {name: np.ascontiguousarray(change(tensor)).reshape(change(tensor).shape)}
            # Weights, or an error of ours; never that of a library.
            with suppress(CheckpointError):
                read_everything(write_checkpoint(tmp_path, config, stored))


@pytest.mark.parametrize(
    ("format_", "case", "changes", "error", "words"),
    [
        ("gptq", "v1_4bit_sym_g128", {"checkpoint_format": "bitblas"}, UnsupportedCheckpoint,
         r"config\.checkpoint_format is 'bitblas'.*first tensor: model\.layers\.0.*qweight"),
        ("gptq", "v1_4bit_sym_g128", {"checkpoint_format": ["gptq"]}, UnsupportedCheckpoint,
         r"config\.checkpoint_format is \['gptq'\], which is not read"),
        ("gptq", "v1_4bit_sym_g128", {"bits": "four"}, BadConfig, r"quantization_config\.bits is 'four'"),
        ("awq", "gemm_g64", {"bits": 3}, UnsupportedCheckpoint,
         r"config\.bits is 3, .*AWQ.*first tensor: .*qweight"),
        ("awq", "gemv_g128", {"group_size": None}, CheckpointError, r"group_size is None, expected the"),
        ("auto-round", "w2_asym_v2", {"packing_format": 7}, BadConfig, r"packing_format is '7'"),
        ("auto-round", "w2_asym_v2", {"extra_config": {"(": {"group_size": 32}}}, BadConfig,
         r"extra_config: '\(' is not a regular expression"),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_named(
    format_: str, case: str, changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(folder_of(format_, case), tmp_path / case)
    edit_config(folder, lambda config: config["quantization_config"].update(changes))
    with pytest.raises(error, match=words):
        read_everything(folder)


def test_the_values_of_nf4_are_those_that_are_stored(tmp_path: Path) -> None:
    tensors, meaning = nf4(random_matrix(8, 16), 64)
    tensors[".weight.quant_map"] = -NF4
    found = module(tmp_path, tensors, quant_method="bitsandbytes")
    assert np.array_equal(read_all(found), -meaning)
