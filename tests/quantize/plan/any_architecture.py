"""llama.cpp's recorded plans of many architectures (tests/golden/plans-any) as our own types."""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.format import keys
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.importances.entries import Importance
from quantize.plan.plan import in_file_order
from quantize.plan.recipes import RECIPES

GOLDEN = Path(__file__).parents[2] / "golden" / "plans-any"
MODELS = sorted(path.name.removesuffix(".json.xz") for path in GOLDEN.glob("*.json.xz"))
KEYS = [f"{name}{imatrix}" for name in RECIPES if name != "COPY" for imatrix in ("", "+imatrix")]
"""Names of the recorded plans of a model: every file type, without and with importances."""


@lru_cache(maxsize=2)
def recorded(model: str) -> Any:
    """Return the contents of a golden file."""
    return json.loads(lzma.decompress((GOLDEN / f"{model}.json.xz").read_bytes()))


def plans_of(model: str) -> dict[str, Any]:
    """Return what llama-quantize recorded, by file type."""
    plans: dict[str, Any] = recorded(model)["plans"]
    return plans


@lru_cache(maxsize=2)
def tensors_of(model: str) -> tuple[TensorInfo, ...]:
    """Return the tensors of a model in the order in which llama-quantize writes them."""
    listed = recorded(model)["tensors"]
    return tuple(in_file_order(TensorInfo(t["name"], tuple(t["shape"]), by_name(t["type"])) for t in listed))


def metadata_of(model: str) -> Metadata:
    """Return the metadata of a model, with the architecture's name."""
    golden = recorded(model)
    metadata = {keys.ARCHITECTURE: Value.string(golden["architecture"])}
    return metadata | {key: _value(data) for key, data in golden["metadata"].items()}


def _value(data: Any) -> Value:
    if isinstance(data, list):
        whole = all(isinstance(number, int) for number in data)
        return Value.i32s(data) if whole else Value.f32s(data)
    for type_, make in ((bool, Value.bool_), (int, Value.u32), (float, Value.f32), (str, Value.string)):
        if isinstance(data, type_):
            return make(data)
    raise TypeError(f"found {data!r} in the golden metadata")


@lru_cache(maxsize=2)
def importances_for(model: str) -> dict[str, Importance]:
    """Return importances for every tensor of a model, all ones, which take no memory."""
    one = np.float32(1)
    return {
        tensor.name: Importance(
            np.broadcast_to(one, (tensor.n_mats, tensor.n_cols)), np.broadcast_to(one, tensor.n_mats)
        )
        for tensor in tensors_of(model)
    }
