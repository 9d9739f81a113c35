"""Maps of the tensors of each file: their types, and what more bytes would save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gguf_tools.text import html_text, printable, size_text
from imatrix.evaluate.evaluation import EvaluatedModel
from imatrix.evaluate.report.map_chart import TensorMap, map_chart, map_width, price_chart, types_by_bits
from imatrix.evaluate.report.points import prices_of
from quantize.plan.sensitivities import Sensitivities

_WIDE_MAP, _NARROW_MAP = 1100, 356
"""Largest width of a map in both sizes, in the page's pixels."""


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
        '<p class="note">The darker a tensor, the more damage each further MiB would save there, as the'
        " losses predict it for stock encoding, in nats per token. In a file whose types were chosen by them,"
        " all tensors that could have more bytes are about equally dark. The pointer shows the damage at the"
        " tensor's type and the type that would save most.</p>"
    )
    for number, model in enumerate(models):
        map_, prices = TensorMap.of(model.tensors), prices_of(model.tensors, losses)
        total = sum(price.damage for price in prices.values())
        summary = f"{printable(model.path.name)}, predicted damage {total:.5f}"
        draw = partial(price_chart, map_, prices)
        yield _map(f"prices{number}", map_.n_layers, summary, draw, is_open=number == 0)


def _map(
    prefix: str, n_layers: int, summary: str, draw: Callable[[str, str, int], str], *, is_open: bool
) -> str:
    """Return a map in both sizes.

    draw  is given a prefix of identifiers, a class of the style sheet and a width
    """
    drawn = "".join(
        f'<div class="{name}" style="max-width: {width}px">{draw(f"{prefix}-{name}-", name, width)}</div>'
        for name, width in (("wide", map_width(n_layers, _WIDE_MAP)), ("narrow", _NARROW_MAP))
    )
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{html_text(summary)}</summary><figure>{drawn}</figure></details>"
