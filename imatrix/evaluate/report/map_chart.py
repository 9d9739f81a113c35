"""Maps of a file's tensors as charts: a row for each part of a layer, a column for each layer.

Colour is the type or a price, and the sides of a box tell the size. So they show the types of each file, and
what more bytes would save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gguf_tools.drawing import RING, SERIES, SURFACE, Canvas, drawing, heat_colours, svg_text
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import html_text, printable, size_text
from imatrix.evaluate.evaluation import EvaluatedModel
from imatrix.evaluate.report.points import Price, prices_of
from quantize.plan.sensitivities import Sensitivities
from quantize.roles import layer_of


@dataclass(frozen=True)
class Cell:
    """A tensor in its place; column 0 is for tensors outside of layers."""

    row: int
    column: int
    tensor: TensorInfo


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
    def of(cls, tensors: Sequence[TensorInfo]) -> TensorMap:
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


def types_by_bits(tensors: Iterable[TensorInfo]) -> tuple[GGMLType, ...]:
    """Return the types that occur, those of the fewest bits per weight first."""
    types = {tensor.type.id: tensor.type for tensor in tensors}
    return tuple(sorted(types.values(), key=lambda type_: (type_.bits_per_weight, type_.id)))


_ROW_HEIGHT, _MARGIN = 17, 90
"""Height of a row, and of axis and legend together, in the page's pixels."""

_WIDE_MAP, _NARROW_MAP = 1100, 356
"""Largest width of a map in both sizes, in the page's pixels."""

_SMALLEST_BYTES, _SMALLEST_SIDE = 1 << 12, 0.3
"""Tensors up to this size have this side; 1 is a whole cell, and the side of the largest tensor."""

_LEAST_SHARE = 1e-3
"""The share of the highest price below which all prices have one colour."""


@dataclass(frozen=True)
class _Fill:
    """Filling of a box: a colour, and lines across it once all colours are taken."""

    colour: str
    hatch: str = ""


def _fills_of(types: Sequence[GGMLType]) -> Mapping[int, _Fill]:
    """Give each type a fill, by its id. Types that are neighbours in bits are far apart in colour."""
    return {
        type_.id: _Fill(SERIES[number % len(SERIES)], "///" if number >= len(SERIES) else "")
        for number, type_ in enumerate(types)
    }


def map_chart(map_: TensorMap, types: Sequence[GGMLType], prefix: str, name: str, width: int) -> str:
    """Return the map of a file's tensors.

    types  of all files of the page, in the order of their bits: a type has the same colour in all maps
    name   of a class of the style sheet
    """
    fills = _fills_of(types)
    here = {cell.tensor.type.id for cell in map_.cells}
    legend = {type_.name: fills[type_.id] for type_ in types if type_.id in here}
    boxes = [
        _Box(fills[tensor.type.id], f"{printable(tensor.name)}: {tensor.type}, {size_text(tensor.n_bytes)}")
        for tensor in (cell.tensor for cell in map_.cells)
    ]
    return _drawn(map_, boxes, legend, prefix, name, width, "Type and size of each tensor, by layer")


def price_chart(map_: TensorMap, prices: Mapping[str, Price], prefix: str, name: str, width: int) -> str:
    """Return the map of what more bytes for each tensor would save.

    prices  by tensor; the others are drawn empty
    name    of a class of the style sheet
    """
    saved = [price.per_mib for price in prices.values() if price.per_mib > 0]
    highest = max(saved, default=1.0)
    colours = heat_colours(1 + round(-2 * math.log10(_LEAST_SHARE)))  # two to each power of ten
    legend = {
        f"{_LEAST_SHARE * highest * 10 ** (step / 2):.1g} per MiB": _Fill(colour)
        for step, colour in enumerate(colours)
        if step % 2 == 0
    }
    boxes = []
    for tensor in (cell.tensor for cell in map_.cells):
        title, price = f"{printable(tensor.name)}: {tensor.type}", prices.get(tensor.name)
        colour = SURFACE
        if price is not None:
            title += f", predicted loss {price.loss:.2g}"
            if price.larger is not None:
                title += f"; {price.larger} would save {price.per_mib:.2g} per MiB"
            share = max(price.per_mib / highest, _LEAST_SHARE)
            colour = colours[round(2 * math.log10(share / _LEAST_SHARE))]
        boxes.append(_Box(_Fill(colour), title))
    return _drawn(map_, boxes, legend, prefix, name, width, "What more bytes for each tensor would save")


@dataclass(frozen=True)
class _Box:
    """How a tensor is drawn, and what the pointer shows."""

    fill: _Fill
    title: str


def _drawn(
    map_: TensorMap,
    boxes: Sequence[_Box],
    legend: Mapping[str, _Fill],
    prefix: str,
    name: str,
    width: int,
    label: str,
) -> str:
    """Return a map whose boxes, one for each cell, have the given fills."""
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    largest = max((cell.tensor.n_bytes for cell in map_.cells), default=1)
    titles = {f"cell{number}": box.title for number, box in enumerate(boxes)}
    n_columns = max(1, (width - 140) // 90)
    legend_height = 22 * -(-len(legend) // n_columns)
    canvas = Canvas(name, width, _MARGIN + legend_height + _ROW_HEIGHT * len(map_.rows))
    with drawing(canvas) as figure:
        axes = figure.subplots()
        for number, (cell, box) in enumerate(zip(map_.cells, boxes, strict=True)):
            side = _side(cell.tensor.n_bytes, largest)
            square = Rectangle(
                (cell.column - side / 2, cell.row - side / 2), side, side, facecolor=box.fill.colour,
                edgecolor=RING, linewidth=0.6, hatch=box.fill.hatch,
            )  # fmt: skip
            square.set_gid(f"cell{number}")
            axes.add_patch(square)
        axes.set_xlim(-0.6, map_.n_layers + 0.6)
        axes.set_ylim(len(map_.rows) - 0.4, -0.6)
        axes.set_yticks(range(len(map_.rows)), [printable(row) for row in map_.rows], fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=max(2, min(16, width // 60))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda column, _: _layer_text(column, map_.n_layers)))
        axes.set_xlabel("layer")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        handles = [
            Patch(facecolor=fill.colour, edgecolor=RING, hatch=fill.hatch, label=text)
            for text, fill in legend.items()
        ]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), n_columns))
        return svg_text(figure, prefix, label, titles)


def _side(n_bytes: int, largest: int) -> float:
    """Return the side of a tensor's square, which grows with the logarithm of its size."""
    if largest <= _SMALLEST_BYTES:
        return 1.0
    share = math.log(max(n_bytes, _SMALLEST_BYTES) / _SMALLEST_BYTES) / math.log(largest / _SMALLEST_BYTES)
    return 0.92 * (_SMALLEST_SIDE + (1 - _SMALLEST_SIDE) * share)


def _layer_text(column: float, n_layers: int) -> str:
    """Label of a column: nothing for the one of tensors outside of layers."""
    return str(round(column) - 1) if 1 <= round(column) <= n_layers else ""


def map_sections(models: Sequence[EvaluatedModel]) -> Iterator[str]:
    """Yield the maps of types."""
    yield "<h2>Types and sizes</h2>"
    yield (
        '<p class="note">Each box is a tensor; the first column has those outside of layers. Its colour is'
        " the type, and its sides grow with the logarithm of its size. The pointer shows name and bytes.</p>"
    )
    types = types_by_bits(tensor for model in models for tensor in model.tensors)
    for number, model in enumerate(models):
        map_ = TensorMap.of(model.tensors)
        draw = partial(map_chart, map_, types)
        summary = f"{printable(model.path.name)}, {size_text(model.n_bytes)}"
        yield _map(f"map{number}", map_.n_layers, summary, draw, is_open=number == 0)


def price_sections(models: Sequence[EvaluatedModel], losses: Sensitivities | None) -> Iterator[str]:
    """Yield the maps of what tensors cost; nothing without losses."""
    if losses is None:
        return
    yield "<h2>What more bytes would save</h2>"
    yield (
        '<p class="note">The darker a tensor, the more loss each further MiB would save there. The loss of a'
        " tensor is the divergence that its rounding by the stock encoder adds, in nats per token. In a file"
        " whose types were chosen by losses, all tensors that could have more bytes are about equally dark."
        " The pointer shows the loss at the tensor's type, and the type that would save most.</p>"
    )
    for number, model in enumerate(models):
        map_, prices = TensorMap.of(model.tensors), prices_of(model.tensors, losses)
        total = sum(price.loss for price in prices.values())
        summary = f"{printable(model.path.name)}, predicted loss {total:.5f}"
        draw = partial(price_chart, map_, prices)
        yield _map(f"prices{number}", map_.n_layers, summary, draw, is_open=number == 0)


def _map(
    prefix: str, n_layers: int, summary: str, draw: Callable[[str, str, int], str], *, is_open: bool
) -> str:
    """Return a map in both sizes.

    draw  is given a prefix of identifiers, a class of the style sheet and a width
    """
    wide = min(_WIDE_MAP, 220 + 34 * (n_layers + 1))  # less where cells would get too wide
    drawn = "".join(
        f'<div class="{name}" style="max-width: {width}px">{draw(f"{prefix}-{name}-", name, width)}</div>'
        for name, width in (("wide", wide), ("narrow", _NARROW_MAP))
    )
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{html_text(summary)}</summary><figure>{drawn}</figure></details>"
