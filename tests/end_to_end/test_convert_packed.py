"""Whole models in GPTQ, AWQ and nf4: llama.cpp computes what transformers does from the decoded weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.packed_models import Format, assert_same_q8_0, error_of_logits
from tests.support import oracle
from tests.support.packers import Packed, awq_gemm, gptq, nf4

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


def gptq_as_found(module: str, weight: np.ndarray) -> Packed | None:
    """4 bits with act-order, 8 bits for the most sensitive weights, one layer's output left plain."""
    if module == "model.layers.2.self_attn.o_proj":
        return None
    groups = np.arange(weight.shape[1]) // 32
    if module.endswith(("kv_b_proj", "kv_a_proj_with_mqa")):
        return gptq(weight, 8, groups)
    return gptq(weight, 4, np.random.RandomState(weight.shape[1]).permutation(groups))


def awq_as_found(module: str, weight: np.ndarray) -> Packed | None:
    """All but the module whose width AutoAWQ's own lists usually leave out, and one expert."""
    if module.endswith("kv_a_proj_with_mqa") or ".experts.3." in module:
        return None
    return awq_gemm(weight, 32)


def nf4_as_found(module: str, weight: np.ndarray) -> Packed | None:
    return nf4(weight, 64, nested="experts" in module)


FORMATS = {
    "gptq": Format(
        gptq_as_found,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False,
         "dynamic": {"+:.*kv_[ab]_proj.*": {"bits": 8}}},
    ),
    "awq": Format(
        awq_as_found,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["kv_a_proj_with_mqa"]},
    ),
    "bitsandbytes": Format(
        nf4_as_found,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_llama_cpp_computes_what_the_decoded_weights_compute(name: str, tmp_path: Path) -> None:
    assert error_of_logits(tmp_path, FORMATS[name]) <= 1e-5


def test_a_quantized_source_goes_straight_to_a_quantized_type(tmp_path: Path) -> None:
    assert_same_q8_0(tmp_path, FORMATS["gptq"])
