"""Ways in which a tensor may have been made of its source: through 16 bits or not, with importances or not.

A file that was quantized from a folder came through a file of F32, F16 or BF16, which nothing in it names.
Rounding to a type that holds the source's weights changes none, so it is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import BF16, F16, GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.encode import RowSources
from quantize.fill.sources import FLOAT_DTYPES, MadeOfTensor, SourceTensor, rows_dtype
from quantize.grids import GridTensor
from quantize.plan.decide import KEEPING

GRID = "the grid of its weights"


@dataclass(frozen=True)
class Way:
    """One way to make a tensor.

    through     type of 16 bits that its source was rounded to before, "" for none; GRID where its weights lie
                on a grid of 4 bits that --keep-grid has left as it is
    is_weighed  whether the importances that are known for it are used; True where there are none
    sources     from which it is made so
    """

    through: str
    is_weighed: bool
    sources: RowSources


@dataclass(frozen=True)
class Rounded(MadeOfTensor):
    """A tensor whose rows were rounded to a float type."""

    tensor: SourceTensor
    type: GGMLType

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.float16]:
        with np.errstate(over="ignore"):  # what overflows is refused where rows are encoded
            return self.tensor.read_rows(start, stop).astype(FLOAT_DTYPES[self.type])

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(self.read_rows(start, stop)).reshape(-1).view(np.uint8)


def ways_of(info: TensorInfo, sources: RowSources, *, rounded: bool) -> Iterator[Way]:
    """Yield the ways of a tensor, the likeliest first.

    sources  where its rows come from, with its importances if it has some
    rounded  whether a file of another float type may lie between
    """
    through = [""]
    if rounded and sources.is_encoded(info.name, info.type):
        dtype = rows_dtype(sources.tensors[info.name].type)
        through += [type_.name for type_ in (BF16, F16) if FLOAT_DTYPES[type_] != dtype]
    source = sources.tensors[info.name]
    made_of = {name: Rounded(source, by_name(name)) if name else source for name in through}
    for weighed in (True, False) if info.name in sources.importances else (True,):
        importances = sources.importances if weighed else {}
        for name, tensor in made_of.items():
            yield Way(name, weighed, replace(sources, tensors={info.name: tensor}, importances=importances))
    if info.type in KEEPING and source.type in FLOAT_DTYPES:
        for tensor in made_of.values():
            yield Way(GRID, True, RowSources({info.name: GridTensor(tensor, info.type)}, {}))
