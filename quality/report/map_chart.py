"""The map of a file's tensors as a chart: colour is the type, and the sides of a box tell the size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gguf_tools.ggml_types import GGMLType
from gguf_tools.text import printable, size_text
from quality.report.charts import Canvas, drawing
from quality.report.svg import RING, svg_text
from quality.report.tensor_map import TensorMap

_ROW_HEIGHT, _MARGIN = 17, 90
"""Height of a row, and of axis and legend together, in the page's pixels."""

_SMALLEST_BYTES, _SMALLEST_SIDE = 1 << 12, 0.3
"""Tensors up to this size have this side; 1 is a whole cell, and the side of the largest tensor."""


def map_width(n_layers: int, canvas_width: int) -> int:
    """Return how wide a map should be: `canvas_width` at most, less where cells would get too wide."""
    return min(canvas_width, 220 + 34 * (n_layers + 1))


def type_colours(types: Sequence[GGMLType]) -> Mapping[int, str]:
    """Return a colour for each type, by its id; `types` are in the order of their bits."""
    import matplotlib

    scale = matplotlib.colormaps["viridis"]
    n_steps = max(1, len(types) - 1)
    return {
        type_.id: "#" + "".join(f"{round(255 * part):02x}" for part in scale(0.12 + 0.8 * step / n_steps)[:3])
        for step, type_ in enumerate(types)
    }


def map_chart(map_: TensorMap, types: Sequence[GGMLType], prefix: str, name: str, width: int) -> str:
    """Return the map of a file's tensors.

    types  of all files of the page, in the order of their bits: a type has the same colour in all maps
    name   of a class of the style sheet
    """
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    colours = type_colours(types)
    here = {cell.tensor.type.id for cell in map_.cells}
    used = [type_ for type_ in types if type_.id in here]
    largest = max((cell.tensor.n_bytes for cell in map_.cells), default=1)
    titles = {}
    n_columns = max(1, (width - 140) // 90)
    legend_height = 22 * -(-len(used) // n_columns)
    canvas = Canvas(name, width, _MARGIN + legend_height + _ROW_HEIGHT * len(map_.rows))
    with drawing(canvas) as figure:
        axes = figure.subplots()
        for number, cell in enumerate(map_.cells):
            side, tensor = _side(cell.tensor.n_bytes, largest), cell.tensor
            square = Rectangle(
                (cell.column - side / 2, cell.row - side / 2), side, side, facecolor=colours[tensor.type.id],
                edgecolor=RING, linewidth=0.6,
            )  # fmt: skip
            square.set_gid(f"cell{number}")
            titles[f"cell{number}"] = f"{printable(tensor.name)}: {tensor.type}, {size_text(tensor.n_bytes)}"
            axes.add_patch(square)
        axes.set_xlim(-0.6, map_.n_layers + 0.6)
        axes.set_ylim(len(map_.rows) - 0.4, -0.6)
        axes.set_yticks(range(len(map_.rows)), [printable(row) for row in map_.rows], fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=max(2, min(16, width // 60))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda column, _: _layer_text(column, map_.n_layers)))
        axes.set_xlabel("layer")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        handles = [Patch(facecolor=colours[type_.id], edgecolor=RING, label=type_.name) for type_ in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(used), n_columns))
        return svg_text(figure, prefix, "Type and size of each tensor, by layer", titles)


def _side(n_bytes: int, largest: int) -> float:
    """Return the side of a tensor's square, which grows with the logarithm of its size."""
    if largest <= _SMALLEST_BYTES:
        return 1.0
    share = math.log(max(n_bytes, _SMALLEST_BYTES) / _SMALLEST_BYTES) / math.log(largest / _SMALLEST_BYTES)
    return 0.92 * (_SMALLEST_SIDE + (1 - _SMALLEST_SIDE) * share)


def _layer_text(column: float, n_layers: int) -> str:
    """Return what stands below a column: nothing for the one of tensors outside of layers."""
    return str(round(column) - 1) if 1 <= round(column) <= n_layers else ""
