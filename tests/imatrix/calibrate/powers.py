"""The stock encoder under the power of the importances that costs each row least."""

from collections.abc import Sequence

import numpy as np

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes
from quantize.formats.codecs import ignores_importances
from quantize.importances.weighting import ColumnWeights
from quantize.rounding.factor import Factor
from quantize.rounding.methods.base import Matrix, Method, Rates

_POWERS = 0.5, 1.0, 1.5


def _encode(matrices: Sequence[Matrix], type_: GGMLType, factor: Factor) -> list[Bytes]:
    codec, importances = get_format(type_), np.diag(factor.hessian)
    encoded = []
    for matrix in matrices:
        tried = [codec.encode(matrix.rows, ColumnWeights(importances**power)) for power in _POWERS]
        costs = []
        for data in tried:
            errors = matrix.rows - codec.decode(data, factor.size)
            costs.append(((errors @ factor.hessian) * errors).sum(1))
        best = np.argmin(costs, axis=0)
        encoded.append(np.stack(tried)[best, np.arange(len(best))])
    return encoded


POWERS = Method(
    name="powers",
    version=1,
    can_encode=lambda type_: not ignores_importances(type_.name),
    encode=_encode,
    rates=lambda type_: Rates(0.11, 1.1e-5),
    settings={"powers": list(_POWERS)},
)
