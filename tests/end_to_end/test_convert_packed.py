"""Whole models in GPTQ, AWQ and nf4: llama.cpp computes what transformers computes from the decoded weights.

The packers of tests/support make the checkpoints from the layouts alone, and decode them as well: the loaders
have no part in the expected values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from tests.support import oracle
from tests.support.checkpoints import load_transformers, shard, transformers_checkpoint
from tests.support.packers import Packed, awq_gemm, gptq, nf4, pack_projections
from tests.support.tokenizer_files import VOCAB_SIZES, copy_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

TEXT = "def mean(values):\n    return sum(values) / len(values)\n\n# 中文, 日本語 and 3.14159\n" * 3
SIZES = {"q_lora_rank": 64, "moe_intermediate_size": 64, "vocab_size": VOCAB_SIZES["tiny"]}


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


FORMATS: dict[str, tuple[Callable[[str, np.ndarray], Packed | None], dict[str, object]]] = {
    "gptq": (
        gptq_as_found,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False,
         "dynamic": {"+:.*kv_[ab]_proj.*": {"bits": 8}}},
    ),
    "awq": (
        awq_as_found,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["kv_a_proj_with_mqa"]},
    ),
    "bitsandbytes": (
        nf4_as_found,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_llama_cpp_computes_what_the_decoded_weights_compute(name: str, tmp_path: Path) -> None:
    import torch

    pack, quantization = FORMATS[name]
    folder = transformers_checkpoint(tmp_path / "hf", "v3", **SIZES)
    shard(pack_projections(folder, tmp_path / "decoded", pack, quantization), 4)
    copy_tokenizer("tiny", folder)
    convert.convert(folder, tmp_path / "model.gguf", outtype="f32")
    with oracle.Model(tmp_path / "model.gguf") as model:
        ids = model.tokenize(TEXT)
        found = model.logits(ids, n_threads=1)
    torch.set_num_threads(1)
    with torch.no_grad():
        original = load_transformers(tmp_path / "decoded")
        expected = original(torch.tensor([ids])).logits[0].numpy()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 1e-5


def test_a_quantized_source_goes_straight_to_a_quantized_type(tmp_path: Path) -> None:
    """Q8_0 of a GPTQ checkpoint is Q8_0 of its decoded weights, with nothing in between."""
    pack, quantization = FORMATS["gptq"]
    folder = transformers_checkpoint(tmp_path / "hf", "v3", **SIZES)
    pack_projections(folder, tmp_path / "decoded", pack, quantization)
    for source in (folder, tmp_path / "decoded"):
        copy_tokenizer("tiny", source)
        convert.convert(source, tmp_path / f"{source.name}.gguf", outtype="q8_0")
    with open_gguf(tmp_path / "hf.gguf") as found, open_gguf(tmp_path / "decoded.gguf") as expected:
        assert set(found.tensors) == set(expected.tensors)
        for tensor in found.tensors:
            assert np.array_equal(found.raw(tensor), expected.raw(tensor)), tensor
