"""Which type and how many bytes each tensor has, as a map: a row for each part of a layer, a column each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gguf_tools.format.ggml_types import GGMLType
from quality.evaluation import TensorSize
from quantize.roles import layer_of


@dataclass(frozen=True)
class Cell:
    """A tensor in its place; column 0 is for tensors outside of layers."""

    row: int
    column: int
    tensor: TensorSize


@dataclass(frozen=True)
class TensorMap:
    """A file's tensors.

    rows      parts of a layer such as "attn_q_a", or whole names
    n_layers  there is one column more
    """

    rows: tuple[str, ...]
    n_layers: int
    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, tensors: Sequence[TensorSize]) -> TensorMap:
        """Return the map of a file's tensors; rows come in the order of the file."""
        layers = [layer_of(tensor.name) for tensor in tensors]
        parts = [
            tensor.name.removeprefix(f"blk.{layer}.").removesuffix(".weight")
            for tensor, layer in zip(tensors, layers, strict=True)
        ]
        rows = tuple(dict.fromkeys(parts))
        places = {row: number for number, row in enumerate(rows)}
        cells = tuple(
            Cell(places[part], 0 if layer is None else layer + 1, tensor)
            for part, layer, tensor in zip(parts, layers, tensors, strict=True)
        )
        return cls(rows, max((cell.column for cell in cells), default=0), cells)


def types_by_bits(tensors: Iterable[TensorSize]) -> tuple[GGMLType, ...]:
    """Return the types that occur, those of the fewest bits per weight first."""
    types = {tensor.type.id: tensor.type for tensor in tensors}
    return tuple(sorted(types.values(), key=lambda type_: (type_.bits_per_weight, type_.id)))
