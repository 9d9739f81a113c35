"""An evaluation on one text as a page: no script, and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gguf_tools.text import html_text, printable, size_text
from imatrix.evaluate.drafts import DRAFT_HEADINGS, DRAFTS_ARE, draft_rows
from imatrix.evaluate.evaluation import EvaluatedModel, Evaluation
from imatrix.evaluate.noise_floor import NOISE_HEADINGS, noise_rows
from imatrix.evaluate.report.charts import SMALLEST_KLD, drift_chart, routing_chart, size_chart, tokens_chart
from imatrix.evaluate.report.html import chart_html, estimate_text, page_html, page_title, table_html
from imatrix.evaluate.report.model_sections import map_sections, price_sections
from imatrix.evaluate.report.passage_section import passage_sections
from imatrix.evaluate.report.points import Earlier, Point, earlier_points, measured_points
from imatrix.evaluate.report.summary import comparison_section, summary_section
from quantize.plan.sensitivities import Sensitivities

_HEADINGS = ("file", "size", "bpw", "PPL", "KLD", "median", "99%", "max", "same top", "flips", "RMS dp")


def report_page(
    evaluation: Evaluation, earlier: Sequence[Earlier] = (), losses: Sensitivities | None = None
) -> str:
    """Return the page, with the smallest file first everywhere.

    earlier  evaluations whose files are shown beside, by size and divergence
    losses   of the base: what each tensor costs at each type, for a map of that
    raises   BadRequest for an earlier evaluation of another text or base, and losses of another model
    """
    evaluation = evaluation.by_size()
    models, klds = evaluation.models, [each.divergence.kld.mean.value for each in evaluation.models]
    measured = measured_points(models, klds)
    others = [
        point
        for number, each in enumerate(earlier, 1)
        for point in earlier_points(each, number, [evaluation])
    ]
    floor = None if evaluation.noise is None else evaluation.noise.kld
    sections = [
        *_heading(evaluation),
        *summary_section(measured, floor, evaluation.comparisons),
        *_tables(evaluation),
        '<div class="charts">',
        size_figure((*measured, *others), earlier, floor),
        *_charts(models),
        "</div>",
        *comparison_section(evaluation.comparisons),
        *map_sections(models),
        *price_sections(models, losses),
        *passage_sections({None: evaluation}),
    ]
    return page_html(page_title(evaluation.base_path, len(models)), sections)


def _heading(evaluation: Evaluation) -> Iterator[str]:
    text = evaluation.text
    name = (evaluation.base_path if text.path is None else text.path).name
    yield f"<h1>{html_text(page_title(evaluation.base_path, len(evaluation.models)))}</h1>"
    yield (
        f'<p class="note">{text.n_tokens_measured:,} tokens measured, in {text.n_chunks} chunks of'
        f" {text.chunk_size} tokens of {html_text(name)}. The base's perplexity is"
        f" {estimate_text(evaluation.base_ppl, 4)}. KLD is the Kullback-Leibler divergence from the base, in"
        " nats.</p>"
    )


def _tables(evaluation: Evaluation) -> Iterator[str]:
    yield from table_html(_HEADINGS, map(_measures, evaluation.models))
    drafts = list(draft_rows((model.path, model.drafts) for model in evaluation.models))
    if drafts:
        yield f'<p class="note">The {DRAFTS_ARE}.</p>'
        yield from table_html(DRAFT_HEADINGS, drafts)
    if evaluation.noise is not None:
        yield from table_html(NOISE_HEADINGS, noise_rows(evaluation.noise))


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    kld = found.kld.percentiles
    return (
        printable(model.path.name),
        size_text(model.n_bytes),
        f"{model.bits_per_weight:.2f}",
        estimate_text(found.ppl, 3),
        estimate_text(found.kld.mean, 5),
        *(f"{kld[name]:.5f}" for name in ("median", "p99", "max")),
        f"{found.same_top.value:.2%}",
        f"{found.flips.value:.2%}",
        f"{found.rms_delta_p.value:.3%}",
    )


def size_figure(points: Sequence[Point], earlier: Sequence[Earlier], floor: float | None) -> str:
    """Draw files by size and divergence.

    points  those that were measured, and those of earlier evaluations
    floor   divergence that is noise; None: not measured
    """
    parts = [
        "Both axes are logarithmic. The line joins the best files: none is both smaller and nearer to"
        " the base."
    ]
    if earlier:
        names = ", ".join(printable(each.path.name) for each in earlier)
        parts.append(f"Hollow: files of {names}.")
    if floor is not None:
        parts.append(f"The base itself loses {floor:.2g} to rounding: the noise floor.")
    equal = [point.name for point in points if point.group == 0 and not point.kld > SMALLEST_KLD]
    if equal:
        parts.append(f"Not shown, because the divergence is 0: {', '.join(map(printable, equal))}.")
    return chart_html(
        "size", "Divergence against size", " ".join(parts),
        lambda prefix, canvas: size_chart(points, prefix, canvas, floor),
    )  # fmt: skip


def _charts(models: Sequence[EvaluatedModel]) -> Iterator[str]:
    yield chart_html(
        "tokens", "Divergence over tokens",
        "The share of tokens whose divergence is larger than a value. A file with a long tail to the right is"
        " good on most tokens and far off on a few.",
        lambda prefix, canvas: tokens_chart(models, prefix, canvas),
    )  # fmt: skip
    if any(model.layers for model in models):
        yield chart_html(
            "drift", "Drift by layer",
            "Norm of the change of the hidden states over the norm of the base's. A leap shows in which layer"
            " a file loses.",
            lambda prefix, canvas: drift_chart(models, prefix, canvas),
        )  # fmt: skip
    if any(layer.routing_changed is not None for model in models for layer in model.layers):
        yield chart_html(
            "routing", "Routing by layer",
            "Share of tokens' choices of experts that are other ones than the base's.",
            lambda prefix, canvas: routing_chart(models, prefix, canvas),
        )  # fmt: skip
