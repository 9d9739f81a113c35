"""Weights that lie on a grid of 4 bits keep it: whole numbers times a scale for every 32 of them.

Kimi K2 Thinking stores its experts as integers of 4 bits with a scale in bfloat16, which is nearly always a
float16, too. Gemma's QAT checkpoints are such weights rounded to bfloat16. llama-quantize rounds them once
more, because it makes each block's scale of the largest weight.

Whether a tensor lies on a grid is tested on some of its rows. A type of 4 or 5 bits lies on it if it errs no
more than Q8_0 there; of ordinary weights it errs ten times as much. Rows become Q4_0 with the scale of least
error, which is the grid's, and Q4_1 where codes have zero points. Q4_K is encoded as always.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q4_0, Q4_1, Q4_K, Q8_0, GGMLType
from gguf_tools.text import counted
from quantize.fill.sources import FLOAT_DTYPES, MadeOfTensor, RowSource, SourceTensor
from quantize.formats import get_decoder, get_format
from quantize.plan.decide import KEEPING, KeptGrid, PlanOptions
from quantize.roles import tensor_role

_ROWS = 16
"""Rows of a tensor that are tested, over all matrices of a stack."""


@dataclass(frozen=True)
class GridTensor(MadeOfTensor):
    """A tensor of the input as blocks with the scales of its grid."""

    tensor: SourceTensor
    type: GGMLType

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self.tensor.read_rows(start, stop)

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return _encode(self.read_rows(start, stop), self.type).reshape(-1)


def keep_grids(tensors: Mapping[str, SourceTensor], types: Mapping[str, GGMLType]) -> dict[str, SourceTensor]:
    """Let tensors keep their grid as these types; the keys stay."""
    return {
        name: GridTensor(tensor, types[name]) if name in types else tensor for name, tensor in tensors.items()
    }


def with_grids(options: PlanOptions | None, tensors: Mapping[str, SourceTensor]) -> PlanOptions:
    """Find the tensors that lie on a grid, and let them have its type; reads some rows of each."""
    found = {name: find_grid(tensor) for name, tensor in tensors.items() if _may_lie_on_one(tensor)}
    grids = {name: grid for name, grid in found.items() if grid is not None}
    return replace(options or PlanOptions(), grids=grids)


def _may_lie_on_one(tensor: SourceTensor) -> bool:
    """Whether a tensor has rows that are floats, or are read as such, and that would be quantized."""
    shape = tensor.shape
    is_matrix = len(shape) > 1 and prod(shape) > 0 and tensor_role(tensor.name, shape).kept_as is None
    return is_matrix and tensor.type in FLOAT_DTYPES and shape[-1] % Q4_0.block_elems == 0


def find_grid(tensor: RowSource) -> KeptGrid | None:
    """Find the smallest type that errs no more than Q8_0 on some rows of a tensor; None for most tensors."""
    rows = _some_rows(tensor)
    limit = _error(rows, Q8_0)
    for type_ in _types_for(rows):
        error = _error(rows, type_)
        if error <= limit:
            how = "exactly" if error == 0 else f"to {100 * error:.2g} % ({100 * limit:.2g} % as Q8_0)"
            n_rows = prod(tensor.shape[:-1])
            return KeptGrid(type_, f"{len(rows)} rows of {n_rows:,} lie on a grid of {type_}, {how}")
    return None


def lost_grids(tensors: Mapping[str, RowSource], grids: Collection[str]) -> Iterator[str]:
    """Say of integers of 4 bits that keep no grid by how much the types err, going by the first of each kind.

    tensors  of a checkpoint, which say what they are stored as
    grids    names of those that keep theirs
    """
    lost: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        stored = getattr(tensor, "stored_as", "")
        if ("int4" in stored or " 4 bits" in stored) and name not in grids:
            lost.setdefault(stored, []).append(name)
    for stored, names in lost.items():
        rows = _some_rows(tensors[names[0]])
        errors = (f"{type_} {100 * _error(rows, type_):.2g} %" for type_ in (*_types_for(rows), Q8_0))
        yield (
            f"{counted(len(names), 'tensor')} ({names[0]} ...): {stored} in the checkpoint, which no type of"
            f" 4 bits holds as well as Q8_0: {', '.join(errors)}"
        )


def _some_rows(tensor: RowSource) -> npt.NDArray[Any]:
    """Read rows from all over a tensor, (n_rows, n_cols)."""
    n_rows = prod(tensor.shape[:-1])
    numbers = sorted({n_rows * number // _ROWS for number in range(_ROWS)})
    return np.concatenate([tensor.read_rows(row, row + 1) for row in numbers])


def _types_for(rows: npt.NDArray[Any]) -> list[GGMLType]:
    """List the types that rows are tried at, from few bits to more."""
    return [type_ for type_ in (Q4_0, Q4_K, Q4_1) if rows.shape[1] % type_.block_elems == 0]


def _error(rows: npt.NDArray[Any], type_: GGMLType) -> float:
    """The errors of rows at a type: the root of their squares over those of the rows."""
    values = rows.astype(np.float64)
    total = float(np.square(values).sum())
    errors = get_decoder(type_)(_encode(rows, type_), rows.shape[1]) - values
    return float(np.sqrt(np.square(errors).sum() / total)) if total else 0.0


def _encode(rows: npt.NDArray[Any], type_: GGMLType) -> npt.NDArray[np.uint8]:
    """Encode rows, where the type can with the scales of least error: uint8 (n_rows, row bytes)."""
    from quantize.formats.blocks_of_32.on_grid import encode_on_grid  # loads numba

    return encode_on_grid(rows, type_) if type_ in KEEPING else get_format(type_).encode(rows, None)
