"""An evaluation as one self-contained page: no script, and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from gguf_tools import __version__
from gguf_tools.hub.names import folder_name
from gguf_tools.text import printable, size_text
from quality.divergence import Estimate
from quality.evaluation import EvaluatedModel, EvaluatedText, Evaluation, TensorSize
from quality.report.charts import NARROW, WIDE, Canvas, drift_chart, routing_chart, size_chart, tokens_chart
from quality.report.map_chart import TensorMap, map_chart, map_width, price_chart, types_by_bits
from quality.report.passages import Passage, worst_passages
from quality.report.points import (
    Earlier,
    earlier_points,
    is_of_base,
    measured_points,
    prices_of,
    refuse_another_base,
    refuse_another_text,
)
from quality.report.style import STYLE
from quantize.plan.sensitivities import Sensitivities


@dataclass(frozen=True)
class PageInputs:
    """Files that the user has named for the page.

    earlier  evaluations whose files are shown beside
    losses   what each tensor costs at each type; None: the page gets no map of that
    """

    earlier: tuple[Earlier, ...]
    losses: Sensitivities | None

    def refuse_unfit(self, text: EvaluatedText, files: Sequence[tuple[TensorSize, ...]]) -> None:
        """Raise BadRequest, before anything is computed, for what would not fit in the end.

        files  the tensors of each model
        """
        for each in self.earlier:
            refuse_another_text(each, text)
        if self.losses is not None:
            for tensors in files:
                prices_of(tensors, self.losses)

    def page(self, evaluation: Evaluation) -> str:
        """Return the page, without evaluations that turn out to be of another base."""

        ppl = evaluation.base_ppl.value
        return report_page(evaluation, [each for each in self.earlier if is_of_base(each, ppl)], self.losses)

    def refuse_other_bases(self, evaluation: Evaluation) -> None:
        """Raise BadRequest for an evaluation that the page is without: only the perplexity shows its base."""
        for each in self.earlier:
            refuse_another_base(each, evaluation.base_ppl.value)


N_PASSAGES = 4
"""Number of passages that are shown for each model."""

_FULL_HEAT = 2.0
"""Divergence, in nats, from which a token has the deepest colour."""

_WIDE_MAP, _NARROW_MAP = 1100, 356
"""Largest width of a map in both sizes, in the page's pixels."""

_HEADINGS = ("file", "size", "bpw", "PPL", "KLD", "median", "99%", "max", "same top", "RMS dp")


def report_page(
    evaluation: Evaluation, earlier: Sequence[Earlier] = (), losses: Sensitivities | None = None
) -> str:
    """Return the page.

    earlier  evaluations whose files are shown beside, by size and divergence
    losses   of the base: what each tensor costs at each type, for a map of that
    raises   BadRequest for an earlier evaluation of another text or base, and losses of another model
    """
    others = [
        point for number, each in enumerate(earlier, 1) for point in earlier_points(each, number, evaluation)
    ]
    points = (*measured_points(evaluation), *others)
    models = evaluation.models
    sections = [
        *_heading(evaluation),
        '<div class="charts">',
        _chart("size", "Divergence against size", _size_caption(evaluation, earlier),
               lambda prefix, canvas: size_chart(points, prefix, canvas)),
        _chart("tokens", "Divergence over tokens",
               "The share of tokens whose divergence is larger than a value. A file with a long tail to the"
               " right is good on most tokens and far off on a few.",
               lambda prefix, canvas: tokens_chart(models, prefix, canvas)),
    ]  # fmt: skip
    if any(model.layers for model in models):
        sections.append(
            _chart("drift", "Drift by layer",
                   "Norm of the change of the hidden states over the norm of the base's. A leap shows in"
                   " which layer a file loses.",
                   lambda prefix, canvas: drift_chart(models, prefix, canvas))
        )  # fmt: skip
    if any(layer.routing_changed is not None for model in models for layer in model.layers):
        sections.append(
            _chart("routing", "Routing by layer",
                   "Share of the base's choices of experts that a file does not make.",
                   lambda prefix, canvas: routing_chart(models, prefix, canvas))
        )  # fmt: skip
    sections += ["</div>", *_maps(models), *_price_maps(models, losses), *_passages(evaluation)]
    title = f"{printable(folder_name(evaluation.base_path))}: how good are {len(models)} files?"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="gguf-tools {__version__}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}</style></head>",
            "<body>",
            *sections,
            "</body></html>\n",
        ]
    )


def _heading(evaluation: Evaluation) -> Iterator[str]:
    text = evaluation.text
    name = (evaluation.base_path if text.path is None else text.path).name
    yield f"<h1>{escape(printable(folder_name(evaluation.base_path)))}</h1>"
    yield (
        f'<p class="note">{text.n_tokens_measured:,} tokens measured, in {text.n_chunks} chunks of'
        f" {text.chunk_size} tokens of {escape(printable(name))}. The base's perplexity is"
        f" {_estimate(evaluation.base_ppl, 4)}. KLD is the Kullback-Leibler divergence from the base, in"
        " nats.</p>"
    )
    yield '<div class="scroll"><table>'
    yield "<tr>" + "".join(f"<th>{heading}</th>" for heading in _HEADINGS) + "</tr>"
    for model in evaluation.models:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _measures(model)) + "</tr>"
    yield "</table></div>"


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    kld = found.kld.percentiles
    return (
        printable(model.path.name),
        size_text(model.n_bytes),
        f"{model.bits_per_weight:.2f}",
        _estimate(found.ppl, 3),
        _estimate(found.kld.mean, 5),
        *(f"{kld[name]:.5f}" for name in ("median", "p99", "max")),
        f"{found.same_top.value:.2%}",
        f"{found.rms_delta_p.value:.3%}",
    )


def _size_caption(evaluation: Evaluation, earlier: Sequence[Earlier]) -> str:
    parts = ["Both axes are logarithmic. The line joins the files that no other beats in both."]
    if earlier:
        names = ", ".join(printable(each.path.name) for each in earlier)
        parts.append(f"Hollow: files of {names}.")
    equal = [model.path.name for model in evaluation.models if not model.divergence.kld.mean.value > 1e-9]
    if equal:
        parts.append(f"Not shown, because the divergence is 0: {', '.join(map(printable, equal))}.")
    return " ".join(parts)


def _chart(name: str, title: str, caption: str, draw: Callable[[str, Canvas], str]) -> str:
    """Return a figure with the chart in both sizes, of which the style sheet shows one."""
    drawn = "".join(
        f'<div class="{canvas.name}">{draw(f"{name}-{canvas.name}-", canvas)}</div>'
        for canvas in (WIDE, NARROW)
    )
    return f"<figure><h2>{escape(title)}</h2><figcaption>{escape(caption)}</figcaption>{drawn}</figure>"


def _maps(models: Sequence[EvaluatedModel]) -> Iterator[str]:
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


def _price_maps(models: Sequence[EvaluatedModel], losses: Sensitivities | None) -> Iterator[str]:
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
    return f"<details{opened}><summary>{escape(summary)}</summary><figure>{drawn}</figure></details>"


def _passages(evaluation: Evaluation) -> Iterator[str]:
    yield "<h2>Where a file is worst</h2>"
    yield (
        '<p class="note">The passages with the largest mean divergence. The deeper the colour of a token,'
        " the farther its prediction is from the base's; from"
        f" {_FULL_HEAT:g} nats on it is deepest. Grey text comes before.</p>"
    )
    for number, model in enumerate(evaluation.models):
        name = escape(printable(model.path.name))
        yield f"<details{' open' if number == 0 else ''}><summary>{name}</summary>"
        for passage in worst_passages(evaluation.text, model.tokens, N_PASSAGES):
            yield (
                f'<p class="note">KLD {passage.kld:.4f}, chunk {passage.chunk + 1}, token'
                f" {passage.position}</p>{_coloured(passage)}"
            )
        yield "</details>"


def _coloured(passage: Passage) -> str:
    tokens = "".join(
        f'<span style="--heat-share: {_heat(token.kld):.2f}"'
        f' title="KLD {token.kld:.4f}; probability {token.base_p:.2%} by the base, {token.p:.2%} here">'
        f"{_visible(token.text)}</span>"
        for token in passage.tokens
    )
    return f'<p class="passage"><span class="before">{_visible(passage.before)}</span>{tokens}</p>'


def _heat(kld: float) -> float:
    """Scale a token's colour, 0 to 0.9."""
    return 0.9 * min(1.0, max(0.0, kld) / _FULL_HEAT) ** 0.5


def _visible(text: str) -> str:
    """Return text as HTML in which line ends and control characters can be seen."""
    shown = "".join(
        "\u23ce\n"
        if character == "\n"
        else character
        if character.isprintable()
        else f"\\x{ord(character):x}"
        for character in text
    )
    return escape(shown)


def _estimate(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} \u00b1 {estimate.error:.{digits}f}"
