"""Checkpoints recorded from the formats' own packers: every weight, at any row range, and nothing else."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from convert.weights.base import PlainWeight, Weight
from convert.weights.schemes.fp4 import Fp4Weight
from convert.weights.schemes.fp8 import Fp8Weight
from convert.weights.schemes.integers import Int8Weight, PackedWeight, RowPairWeight
from gguf_tools.errors import CheckpointError
from gguf_tools.format.ggml_types import F32, MXFP4
from quantize.fill.sources import SourceTensor
from quantize.formats import get_format
from tests.support.checkpoints import write_checkpoint
from tests.support.golden_checkpoints import cases_in, expected_weights, folder_of

LIKE = {
    "fp8": {
        "all_codes_e4m3fn": Fp8Weight,
        "all_codes_e4m3fnuz": Fp8Weight,
        "all_codes_e5m2": Fp8Weight,
        "block128_ue8m0_e8m0fnu": Fp8Weight,
        "block128_ue8m0_f32": Fp8Weight,
        "block_64x32": Fp8Weight,
        "deepseek_v3_block128": Fp8Weight,
        "deepseek_v3_ragged_two_shards": Fp8Weight,
        "fbgemm_per_row": Fp8Weight,
        "fbgemm_per_row_1d": Fp8Weight,
        "gptqmodel_inverse_semantics": Fp8Weight,
        "per_tensor_e4m3fnuz": Fp8Weight,
        "per_tensor_e5m2": Fp8Weight,
        "per_tensor_scalar": Fp8Weight,
        "per_tensor_shape1": Fp8Weight,
    },
    "compressed-tensors": {
        "fp8_block_ragged": Fp8Weight,
        "fp8_channel": Fp8Weight,
        "fp8_tensor_static": Fp8Weight,
        "int_w8_tensor": Int8Weight,
        "int_w8a8_channel": Int8Weight,
        "mxfp4": Fp4Weight,
        "mxfp8": Fp8Weight,
        "naive_w8_channel_asym": Int8Weight,
        "nvfp4": Fp4Weight,
        "pack_w3_dense": PackedWeight,
        "pack_w3_old": PackedWeight,
        "pack_w4_actorder_group": PackedWeight,
        "pack_w4_asym_g32": PackedWeight,
        "pack_w4_asym_rowpad": PackedWeight,
        "pack_w4_sym_g128": PackedWeight,
        "pack_w8_channel": PackedWeight,
    },
    "modelopt": {"fp8": Fp8Weight, "nvfp4": Fp4Weight, "w4a16_awq": RowPairWeight},
    "mxfp4": {"deepseek_v4": Fp4Weight, "gpt_oss": Fp4Weight},
    "torchao": {"f8wo": Fp8Weight, "int8wo": Int8Weight, "intx4": Int8Weight},
}
"""Format -> recorded case -> the class of its quantized weights."""

CASES = [(format_, case) for format_, cases in LIKE.items() for case in cases]

ROUNDED_ELSEWHERE = {("compressed-tensors", "nvfp4"), ("modelopt", "nvfp4")}
"""Cases with three factors, recorded with the product of two scales rounded first; ours is rounded once."""


@pytest.mark.parametrize("format_", LIKE)
def test_every_recorded_case_is_tested(format_: str) -> None:
    assert cases_in(format_) == set(LIKE[format_])


@pytest.mark.parametrize(("format_", "case"), CASES)
def test_the_weights_are_those_recorded(format_: str, case: str) -> None:
    expected = expected_weights(format_, case)
    with convert.open_checkpoint(folder_of(format_, case)) as weights:
        assert sorted(weights.names()) == sorted(expected)
        kinds = {type(weights.weight(name)) for name in weights.names()}
        assert LIKE[format_][case] in kinds <= {LIKE[format_][case], Fp8Weight, PlainWeight}
        for name in weights.names():
            found = weights.read(name)
            assert found.dtype == np.float32
            assert found.shape == expected[name].shape
            if (format_, case) in ROUNDED_ELSEWHERE:
                np.testing.assert_allclose(found, expected[name], rtol=2**-23, atol=0)
            else:
                assert np.array_equal(found, expected[name]), name


def weight_of(checkpoint: Checkpoint, kind: type) -> Weight:
    weights = open_weights(checkpoint)
    return next(weight for weight in map(weights.weight, weights.names()) if isinstance(weight, kind))


@pytest.mark.parametrize(("format_", "case"), CASES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_rows_are_those_rows_of_the_whole(format_: str, case: str, data: st.DataObject) -> None:
    with Checkpoint(folder_of(format_, case)) as checkpoint:
        weight = weight_of(checkpoint, LIKE[format_][case])
        n_rows = prod(weight.shape[:-1])
        whole = weight.read_rows(0, n_rows)
        start = data.draw(st.integers(0, n_rows))
        stop = data.draw(st.integers(start, n_rows))
        found = weight.read_rows(start, stop)
        assert found.shape == (stop - start, weight.shape[-1])
        assert found.tobytes() == whole[start:stop].tobytes()


def test_what_is_no_part_of_a_weight_is_dropped_with_its_reason() -> None:
    with convert.open_checkpoint(folder_of("modelopt", "nvfp4")) as weights:
        assert weights.dropped["model.layers.0.self_attn.q_a_proj.input_scale"].startswith(
            "scales activations"
        )
        assert weights.dropped["model.layers.0.self_attn.q_a_proj.k_scale"] == "scales the cache"
        assert len(weights.dropped) == 4


def test_bits_per_weight_count_scales_and_all() -> None:
    from convert.weights.model_weights import describe

    with convert.open_checkpoint(folder_of("compressed-tensors", "pack_w4_asym_rowpad")) as weights:
        found = {tensor["name"]: tensor for tensor in describe(weights)["tensors"]}
    tensor = found["model.layers.0.self_attn.q_a_proj.weight"]
    # 44 x 8 words of codes, 44 x 2 halves of scales, 6 x 2 words of zero points, two sizes of 8 bytes.
    assert tensor["bits_per_weight"] == round((44 * 8 * 4 + 44 * 2 * 2 + 6 * 2 * 4 + 16) * 8 / (44 * 64), 4)
    assert tensor["stored_as"] == "int4 in groups of 32"
    assert found["lm_head.weight"]["bits_per_weight"] == 16


MXFP4_CASES = [("compressed-tensors", "mxfp4"), ("mxfp4", "deepseek_v4"), ("mxfp4", "gpt_oss")]


@pytest.mark.parametrize(("format_", "case"), MXFP4_CASES)
@pytest.mark.parametrize("rows", [slice(0, None), slice(3, 8), slice(5, 5)], ids=str)
def test_blocks_of_mxfp4_mean_what_the_checkpoint_means(format_: str, case: str, rows: slice) -> None:
    with Checkpoint(folder_of(format_, case)) as checkpoint:
        weight = weight_of(checkpoint, Fp4Weight)
        assert isinstance(weight, SourceTensor)
        assert weight.type == MXFP4
        start, stop, _ = rows.indices(prod(weight.shape[:-1]))
        data = weight.raw_rows(start, stop)
        expected = expected_weights(format_, case)[weight.name].reshape(-1, weight.shape[-1])
        n_cols = expected.shape[1]
        data = data.reshape(stop - start, MXFP4.row_bytes(n_cols))
        assert np.array_equal(get_format("MXFP4").decode(data, n_cols), expected[rows])


@pytest.mark.parametrize("case", [("compressed-tensors", "nvfp4"), ("modelopt", "nvfp4")])
def test_nvfp4_with_a_factor_is_no_block_type(case: tuple[str, str]) -> None:
    with Checkpoint(folder_of(*case)) as checkpoint:
        assert weight_of(checkpoint, Fp4Weight).type == F32


def test_a_scale_that_is_nan_can_be_read_but_not_kept(tmp_path: Path) -> None:
    scales = np.array([[127], [255]], np.uint8)
    tensors = {"a.weight_packed": np.zeros((2, 16), np.uint8), "a.weight_scale": scales}
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    with Checkpoint(write_checkpoint(tmp_path, config, tensors)) as checkpoint:
        weight = weight_of(checkpoint, Fp4Weight)
        assert np.isnan(weight.read_rows(0, 2)).any(axis=1).tolist() == [False, True]
        assert isinstance(weight, SourceTensor)
        with pytest.raises(CheckpointError, match=r"a\.weight_scale: row 1 has a scale that is NaN"):
            weight.raw_rows(0, 2)
