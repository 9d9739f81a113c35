"""llama.cpp's recorded plans (tests/golden/plans) as our own types."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.format.ggml_types import F32, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.importances.entries import Importance
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import in_file_order

GOLDEN = Path(__file__).parents[2] / "golden" / "plans"

FACTS = {
    "v3": ModelFacts("deepseek2", n_layers=61, n_experts=256, n_heads=128, n_kv_heads=1),
    "v2-lite": ModelFacts("deepseek2", n_layers=27, n_experts=64, n_heads=16, n_kv_heads=1),
    "tiny-deepseek-v3": ModelFacts("deepseek2", n_layers=3, n_experts=16, n_heads=4, n_kv_heads=1),
}


@cache
def recorded(name: str) -> Any:
    """Return the contents of a golden file."""
    return json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))


@cache
def tensors_of(model: str) -> tuple[TensorInfo, ...]:
    """Return the tensors of a model in the order in which llama-quantize writes them."""
    if model == "tiny-deepseek-v3":
        types = recorded("converted.outtypes")[model]["f32"]
        return tuple(in_file_order(TensorInfo(n, tuple(shape), F32) for n, (_, shape) in types.items()))
    listed = recorded(f"{model}.tensors")
    return tuple(in_file_order(TensorInfo(t["name"], tuple(t["shape"]), by_name(t["type"])) for t in listed))


@cache
def importances_for(model: str) -> dict[str, Importance]:
    """Return importances for every tensor of a model, all ones, which take no memory."""
    one = np.float32(1)
    return {
        tensor.name: Importance(
            np.broadcast_to(one, (tensor.n_mats, tensor.n_cols)), np.broadcast_to(one, tensor.n_mats)
        )
        for tensor in tensors_of(model)
    }
