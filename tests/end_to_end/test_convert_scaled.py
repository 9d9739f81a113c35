"""Whole models in FP8, int4, MXFP4 and NVFP4: llama.cpp computes what transformers computes
from the decoded weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.format.ggml_types import BF16, MXFP4, NVFP4
from quantize.formats import get_format
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides
from tests.end_to_end.packed_models import Format, Pack, assert_same_q8_0, error_of_logits, packed_model
from tests.support import oracle
from tests.support.packers import Packed
from tests.support.scaled_packers import fp8, mxfp4, nvfp4, packed_integers

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


def as_found(pack: Callable[[np.ndarray], Packed]) -> Pack:
    """Return `pack` for all modules but two, which stay plain: a projection and one expert of many."""

    def packed(module: str, weight: np.ndarray) -> Packed | None:
        plain = module == "model.layers.2.self_attn.o_proj" or ".experts.5." in module
        return None if plain else pack(weight)

    return packed


def int4_with_act_order(weight: np.ndarray) -> Packed:
    groups = np.random.RandomState(weight.shape[1]).permutation(np.arange(weight.shape[1]) // 32)
    return packed_integers(weight, 4, groups, act_order=True)


def compressed(format_: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups,
            "quantization_status": "compressed", "ignore": ["lm_head"]}  # fmt: skip


FORMATS = {
    "fp8 blocks": Format(
        as_found(lambda weight: fp8(weight, (64, 48), ".weight_scale_inv")),
        {"quant_method": "fp8", "weight_block_size": [64, 48]},
    ),
    "fp8 blocks, ue8m0": Format(
        as_found(
            lambda weight: fp8(
                weight, (128, 128), ".weight_scale_inv", powers=True, stored=ml_dtypes.float8_e8m0fnu
            )
        ),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "fp8 rows": Format(
        as_found(lambda weight: fp8(weight, (1, weight.shape[1]), ".weight_scale", shape=(len(weight),))),
        {"quant_method": "fbgemm_fp8"},
    ),
    "fp8 tensors": Format(
        as_found(lambda weight: fp8(weight, weight.shape, ".weight_scale", shape=())),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "mxfp8": Format(
        as_found(lambda weight: fp8(weight, (1, 32), ".weight_scale", powers=True, stored=np.uint8)),
        compressed("mxfp8-quantized", num_bits=8, group_size=32),
    ),
    "int4": Format(
        as_found(lambda weight: packed_integers(weight, 4, np.arange(weight.shape[1]) // 32)),
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
    ),
    "int4, act-order": Format(
        as_found(int4_with_act_order),
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False, actorder="group"),
    ),
    "mxfp4": Format(as_found(mxfp4), compressed("mxfp4-pack-quantized", num_bits=4, group_size=32)),
    "nvfp4": Format(as_found(nvfp4), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_llama_cpp_computes_what_the_decoded_weights_compute(name: str, tmp_path: Path) -> None:
    assert error_of_logits(tmp_path, FORMATS[name]) <= 1e-5


@pytest.mark.parametrize("name", ["fp8 blocks", "int4"])
def test_auto_is_bf16_for_quantized_sources(name: str, tmp_path: Path) -> None:
    """BF16 even where the plain tensors are F16."""
    folder, _ = packed_model(tmp_path, FORMATS[name], dtype="float16")
    convert.convert(folder, tmp_path / "model.gguf")
    with open_gguf(tmp_path / "model.gguf") as file:
        matrices = [info for name, info in file.tensors.items() if "_exps" in name or "attn_output" in name]
        assert {info.type for info in matrices} == {BF16}


def test_fp8_goes_straight_to_q8_0(tmp_path: Path) -> None:
    """The file is the one made from the decoded float32 weights, with nothing rounded in between."""
    assert_same_q8_0(tmp_path, FORMATS["fp8 blocks"])


WIDE = {"hidden_size": 128, "intermediate_size": 192}
"""Sizes that blocks of 64 divide."""


def nvfp4_without_factor(weight: np.ndarray) -> Packed:
    return nvfp4(weight, factor=np.float32(1))


REPACKED = {
    "mxfp4": (FORMATS["mxfp4"], MXFP4),
    "nvfp4 with factors of 1": (
        Format(as_found(nvfp4_without_factor), {"quant_method": "modelopt", "quant_algo": "NVFP4"}), NVFP4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPACKED)
def test_4_bit_floats_keep_their_codes(name: str, tmp_path: Path) -> None:
    """GGUF's type of the same name: the blocks decode to the checkpoint's weights, bit for bit."""
    format_, type_ = REPACKED[name]
    everywhere = Format(lambda _module, weight: format_.pack("", weight), format_.quantization)
    folder, _ = packed_model(tmp_path, everywhere, **WIDE)
    types = PlanOptions(overrides=parse_overrides([f"ffn_.*exps|shexp|attn_q_a|attn_v_b={type_.name}"]))
    convert.convert(folder, tmp_path / "model.gguf", outtype="Q8_0", types=types)
    convert.convert(tmp_path / "decoded", tmp_path / "decoded.gguf", outtype="f32")
    codec = get_format(type_)
    with open_gguf(tmp_path / "model.gguf") as found, open_gguf(tmp_path / "decoded.gguf") as expected:
        packed = [name for name, info in found.tensors.items() if info.type == type_]
        assert len(packed) == 2 * 3 + 2 * 3 + 3 + 3
        for tensor in packed:
            info = found.tensors[tensor]
            blocks = found.raw(tensor).reshape(info.n_rows, -1)
            weights = expected.raw(tensor).view(np.float32).reshape(info.n_rows, -1)
            assert np.array_equal(codec.decode(blocks, info.n_cols), weights), tensor


def test_nvfp4_with_a_factor_is_encoded_again(tmp_path: Path) -> None:
    folder, decoded = packed_model(tmp_path, FORMATS["nvfp4"], **WIDE)
    types = PlanOptions(overrides=parse_overrides(["ffn_.*exps=NVFP4"]))
    for source in (folder, decoded):
        result = convert.convert(source, tmp_path / f"{source.name}.gguf", outtype="Q8_0", types=types)
        notes = [note for note in result.preparation.plan.notes if "encoded again" in note]
        assert len(notes) == (source == folder)
    with open_gguf(tmp_path / "hf.gguf") as found, open_gguf(tmp_path / "decoded.gguf") as expected:
        for tensor in found.tensors:
            assert np.array_equal(found.raw(tensor), expected.raw(tensor)), tensor
