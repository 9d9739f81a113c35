"""torchao's flattened tensors: 8-bit integers or floats, whose types stand in the header of the file.

    X._weight_qdata       I8 or F8_E4M3 (rows, cols)
    X._weight_scale       float (rows, n)
    X._weight_zero_point  I8 (rows, n), for integers
    __metadata__          "X.weight": {"_type": "Int8Tensor", "_data": {"block_size": [1, cols / n] ...} ...}

    weight[i, j] = (data[i, j] - zero) * scale     of the block of (i, j)

Int8Tensor and IntxUnpackedToInt8Tensor (fewer bits, a byte each) are read as Int8Weight, and Float8Tensor as
Fp8Weight. The other types hold the layouts of kernels and are refused.
"""

from __future__ import annotations

import json

from convert.weights.base import Module, Weight, WeightsLoader
from convert.weights.schemes.fp8 import fp8_weight
from convert.weights.schemes.integers import int8_weight
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import quoted

_INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_FLOATS = ("Float8Tensor",)


def _load(module: Module) -> Weight:
    data, scales = module["._weight_qdata"], module["._weight_scale"]
    kind = _type_of(module)
    if kind in _FLOATS:
        return fp8_weight(module, data, scales)
    if kind in _INTEGERS and data.dtype == "I8":
        return int8_weight(module, data, scales, module.get("._weight_zero_point"))
    raise UnsupportedCheckpoint(
        f"{data.path}: {data.name}: torchao's {kind} in {data.dtype}, expected"
        f" {', '.join(_INTEGERS + _FLOATS)}"
    )


def _type_of(module: Module) -> str:
    """Return the `_type` of the tensor, as the header of its file tells."""
    path, text = module["._weight_qdata"].path, module["._weight_qdata"].file.metadata.get(module.name)
    if text is None:
        raise UnsupportedCheckpoint(
            f"{path}: {module.name}: the header's __metadata__ doesn't say what it is"
        )
    try:
        return str(json.loads(text)["_type"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnsupportedCheckpoint(
            f"{path}: {module.name}: __metadata__ holds {quoted(text)}, expected an object with _type"
        ) from None


LOADERS = (
    WeightsLoader(
        format="torchao",
        methods=("torchao",),
        main="._weight_qdata",
        sides=("._weight_scale", "._weight_zero_point"),
        load=_load,
    ),
)
