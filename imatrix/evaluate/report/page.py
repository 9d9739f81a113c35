"""An evaluation as a page: no script, and nothing that is loaded from elsewhere.

A text alone is shown token by token and layer by layer, a suite by class: its charts have a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.card.facts import Report, read_report
from gguf_tools.drawing import Canvas, require_matplotlib
from gguf_tools.files.named_files import AnyPath, Paths, paths_of
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import html_text, printable, size_text
from gguf_tools.web_page import page_html, table_html
from imatrix.evaluate.against import HEADINGS, FileComparison, comparison_rows
from imatrix.evaluate.comparison import Comparison, Interval, Verdict, flips_interval, kld_interval
from imatrix.evaluate.divergence import DRAFT_HEADINGS, DRAFTS_ARE, draft_rows
from imatrix.evaluate.evaluation import EvaluatedModel, Evaluation
from imatrix.evaluate.figures import ALL
from imatrix.evaluate.likeness import LIKENESS_HEADINGS, Likeness, PassageValues
from imatrix.evaluate.noise_floor import NOISE_HEADINGS, mean_floor, noise_by_class_rows, noise_rows
from imatrix.evaluate.report.charts import (
    SMALLEST_KLD,
    drift_chart,
    routing_chart,
    size_chart,
    tokens_chart,
)
from imatrix.evaluate.report.class_charts import ClassRows, Mark, class_chart, floor_text
from imatrix.evaluate.report.html import chart_html, estimate_text, page_title
from imatrix.evaluate.report.map_chart import map_sections, price_sections
from imatrix.evaluate.report.passages import passage_sections
from imatrix.evaluate.report.points import (
    Point,
    earlier_points,
    is_of_base,
    measured_points,
    pareto_front,
    prices_of,
    refuse_another_base,
    refuse_another_text,
    refuse_other_classes,
    short_names,
)
from imatrix.texts.suite import Suite
from imatrix.texts.tokenise import ClassChunks
from quantize.plan.sensitivities import Sensitivities, read_sensitivities


@dataclass(frozen=True)
class PageInputs:
    """Files that the user has named for a page; those that don't fit are refused before anything is computed.

    earlier  evaluations whose files are shown beside
    losses   what each tensor costs at each type; None: the page gets no map of that
    """

    earlier: tuple[Report, ...]
    losses: Sensitivities | None

    @classmethod
    def read(cls, earlier: Paths, losses: AnyPath | Sensitivities | None) -> PageInputs:
        """Read them; raises BadRequest for a file that is something else, and where matplotlib is missing."""
        require_matplotlib("--html")
        if losses is not None and not isinstance(losses, Sensitivities):
            losses = read_sensitivities(Path(losses))
        return cls(tuple(map(read_report, paths_of("earlier", earlier, least=0))), losses)

    def refuse_other_suites(self, suite: Suite) -> None:
        """Raise BadRequest for evaluations on other classes than those of a suite."""
        for each in self.earlier:
            refuse_other_classes(each, [text_class.name for text_class in suite.classes])

    def refuse_unfit(self, text: ClassChunks, files: Sequence[Sequence[TensorInfo]]) -> None:
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
        fit = [each for each in self.earlier if is_of_base(each, evaluation)]
        return report_page(evaluation, fit, self.losses)

    def refuse_other_bases(self, evaluation: Evaluation) -> None:
        """Raise BadRequest for an evaluation that the page is without: only the perplexity shows its base."""
        for each in self.earlier:
            refuse_another_base(each, evaluation)


def report_page(
    evaluation: Evaluation, earlier: Sequence[Report] = (), losses: Sensitivities | None = None
) -> str:
    """Return the page, with the smallest file first everywhere.

    earlier  evaluations on the same texts, whose files are shown beside, by size and divergence
    losses   of the base: what each tensor costs at each type, for a map of that
    raises   BadRequest for an earlier evaluation of other texts or base, and losses of another model
    """
    evaluation = evaluation.by_size()
    models, is_alone = evaluation.models, evaluation.suite is None
    measured = measured_points(evaluation)
    others = [
        point for number, each in enumerate(earlier, 1) for point in earlier_points(each, number, evaluation)
    ]
    floor = mean_floor(evaluation.noise.values()) if evaluation.noise else None
    title = page_title(evaluation.base_path, len(models))
    sections = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="note">{_note(evaluation)}</p>',
        *summary_section(measured, floor, evaluation.comparisons, evaluation.measure_name),
        *(_tables(evaluation) if is_alone else table_html(*_overall(evaluation))),
        '<div class="charts">',
        _size_figure((*measured, *others), earlier, floor, evaluation.measure_name),
        *(_token_charts(models) if is_alone else _class_charts(evaluation)),
        "</div>",
        *comparison_section(evaluation.comparisons),
        *(() if is_alone else _by_class(evaluation)),
        *map_sections(models),
        *price_sections(models, losses),
        *(() if evaluation.is_of_vectors else passage_sections(evaluation.by_class)),
    ]
    return page_html(title, sections)


_FLIPS = (
    "A flip is a token to which the base gives a probability above 90 %, and in whose place the file prefers"
    " another one."
)


def _note(evaluation: Evaluation) -> str:
    """Say what was measured, and what the figures mean."""
    if evaluation.is_of_vectors:
        return _note_on_vectors(evaluation)
    nats = "KLD is the Kullback-Leibler divergence from the base, in nats."
    suite = evaluation.suite
    if suite is None:
        alone = evaluation.alone
        text = alone.text
        assert alone.base_ppl is not None
        return (
            f"{text.n_tokens_measured:,} tokens measured, in {text.n_chunks} chunks of {text.chunk_size}"
            f" tokens of {html_text(text.name)}. The base's perplexity is"
            f" {estimate_text(alone.base_ppl, 4)}. {nats} Its mean is followed by its median, its 99th"
            f" percentile and its maximum over tokens. {_FLIPS}"
        )
    texts = [each.text for each in evaluation.by_class.values()]
    n_measured, n_chunks = sum(each.n_tokens_measured for each in texts), sum(each.n_chunks for each in texts)
    name = html_text(suite.name) + (", a tenth of each" if suite.quick else "")
    return (
        f"{len(texts)} classes of texts, suite {name}: {n_measured:,} tokens measured, in {n_chunks} chunks."
        f" In the mean over all classes, each class has the same weight. {nats} {_FLIPS} The last column is"
        " their share of the tokens that the base is that sure of. A standard error over chunks follows"
        " \u00b1."
    )


def _note_on_vectors(evaluation: Evaluation) -> str:
    """Say the same of a model for embeddings."""
    texts = [each.text for each in evaluation.by_class.values()]
    suite = evaluation.suite
    name = html_text(texts[0].name if suite is None else f"{suite.name}, {len(texts)} classes")
    return (
        f"{sum(each.n_chunks for each in texts):,} passages of {name}. A passage's vectors by the file and by"
        " the base are compared by the cosine of their angle: 1 where they agree. Recall@10 is the share of"
        " each passage's ten nearest by the base that are among the ten nearest by the file. Brackets have"
        " 95 % intervals over passages. In the mean over all classes, each class has the same weight."
    )


_VECTORS = ("file", "size", "bpw", *LIKENESS_HEADINGS)
_HEADINGS = ("file", "KLD", "size", "bpw", "PPL", "median", "99%", "max", "same top", "flips", "RMS dp")


def _tables(evaluation: Evaluation) -> Iterator[str]:
    if evaluation.is_of_vectors:
        yield from table_html(*_overall(evaluation))
        return
    yield from table_html(_HEADINGS, map(_measures, evaluation.models))
    drafts = list(draft_rows((model.path, model.drafts) for model in evaluation.models))
    if drafts:
        yield f'<p class="note">The {DRAFTS_ARE}.</p>'
        yield from table_html(DRAFT_HEADINGS, drafts)
    for noise in evaluation.noise.values():
        rows = ([cell.replace("+/-", "\u00b1") for cell in row] for row in noise_rows(noise))
        yield from table_html(NOISE_HEADINGS, rows)


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    kld = found.kld.percentiles
    return (
        printable(model.path.name),
        estimate_text(found.kld.mean, 5),
        size_text(model.n_bytes),
        f"{model.bits_per_weight:.2f}",
        estimate_text(found.ppl, 3),
        *(f"{kld[name]:.5f}" for name in ("median", "p99", "max")),
        f"{found.same_top.value:.2%}",
        f"{found.flips.value:.2%}",
        f"{found.rms_delta_p.value:.3%}",
    )


_OVERALL = ("file", "KLD", "size", "bpw", "99.9%", "same top", "flips", "flips of the confident")


def _overall(evaluation: Evaluation) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the heads and rows of the table over all classes."""
    rows: list[Sequence[str]] = []
    for file, figures in zip(evaluation.models, evaluation.figures, strict=True):
        found, size, bpw = figures[ALL], size_text(file.n_bytes), f"{file.bits_per_weight:.2f}"
        if evaluation.is_of_vectors:
            rows.append((file.path.name, size, bpw, *found.cells()))
            continue
        rows.append((
            file.path.name,
            f"{found.kld.value:.5f} \u00b1 {found.kld.error:.5f}",
            size,
            bpw,
            f"{found.p99_9:.4f}",
            f"{found.same_top.value:.2%}",
            f"{found.flips.value:.2%}",
            f"{found.flips_of_confident.value:.2%}",
        ))  # fmt: skip
    return _VECTORS if evaluation.is_of_vectors else _OVERALL, rows


def _by_class(evaluation: Evaluation) -> Iterator[str]:
    """Yield tables of the divergences by class, with the noise floor beside them."""
    names = [*evaluation.by_class, ALL]
    yield f"<h2>Mean {'cosine' if evaluation.is_of_vectors else 'divergence'} by class</h2>"
    noise = noise_by_class_rows(evaluation.noise) if evaluation.noise else []
    rows = [
        (file.path.name, *(f"{_mean_of(figures[name]).value:.5f}" for name in names))
        for file, figures in zip(evaluation.models, evaluation.figures, strict=True)
    ]
    yield from table_html(("", *names), [*rows, *noise])


def _mean_of(figures: Any) -> Any:
    """Return the mean divergence, or the mean cosine of vectors."""
    return figures.cosine if isinstance(figures, Likeness) else figures.kld


def _size_figure(
    points: Sequence[Point], earlier: Sequence[Report], floor: float | None, measure: str = "KLD"
) -> str:
    """Draw files by size and divergence, which is called `measure`.

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
        parts.append(f"The base itself diverges by {floor:.2g} through rounding: the noise floor.")
    equal = [point.name for point in points if point.group == 0 and not point.kld > SMALLEST_KLD]
    if equal:
        parts.append(f"Not shown, because the divergence is 0: {', '.join(map(printable, equal))}.")
    return chart_html(
        "size", "Divergence against size" if measure == "KLD" else f"{measure} against size", " ".join(parts),
        lambda prefix, canvas: size_chart(points, prefix, canvas, floor, measure),
    )  # fmt: skip


def _token_charts(models: Sequence[EvaluatedModel]) -> Iterator[str]:
    if not isinstance(models[0].divergence, Likeness):
        yield chart_html(
            "tokens", "Divergence over tokens",
            "The share of tokens whose divergence is larger than a value. A file with a long tail to the"
            " right is good on most tokens and far off on a few.",
            lambda prefix, canvas: tokens_chart(models, prefix, canvas),
        )  # fmt: skip
    if any(model.layers for model in models):
        yield chart_html(
            "drift", "Drift by layer",
            "Norm of the change of the hidden states over the norm of the base's. A jump shows the layer"
            " that adds most to it.",
            lambda prefix, canvas: drift_chart(models, prefix, canvas),
        )  # fmt: skip
    if any(layer.routing_changed is not None for model in models for layer in model.layers):
        yield chart_html(
            "routing", "Routing by layer",
            "Share of the choices of experts that differ from the base's.",
            lambda prefix, canvas: routing_chart(models, prefix, canvas),
        )  # fmt: skip


def _class_charts(evaluation: Evaluation) -> Iterator[str]:
    if evaluation.is_of_vectors:
        about = "with its 95 % interval over passages, each by itself. Bars join the files."
        for name, title, of in (("cosines", "cosine", "cosine"), ("recalls", "Recall@10", "recall")):
            interval = partial(_interval_of, of)
            rows = _rows_of(evaluation, f"mean {title}", interval, "{:.5f}")
            yield _class_figure(name, f"Mean {title} by class", f"Mean {title} of each file {about}", rows)
        return
    divergences = _rows_of(evaluation, "mean KLD, nats a token", kld_interval, "{:.5f}")
    about = "Mean KLD of each file with its 95 % interval over chunks, each by itself. Bars join the files."
    yield _class_figure("classes", "Divergence by class", f"{about} {floor_text(divergences)}", divergences)
    if evaluation.comparisons:
        yield _class_figure(
            "ratios", f"Against {printable(evaluation.comparisons[0].stock.name)}",
            "Mean KLD over that of the stock file, with the 95 % interval from paired chunks: left of 1 is"
            " better. Intervals by class are corrected for the number of classes. Hollow marks show"
            " no significant difference from it.",
            _ratios(evaluation),
        )  # fmt: skip
    yield _class_figure(
        "flips", "Flips by class",
        f"Share of tokens that flip. {_FLIPS} A reader notices flips.",
        _rows_of(evaluation, "share of tokens flipped", flips_interval, "{:.3%}"),
    )  # fmt: skip


def _interval_of(name: str, classes: Sequence[PassageValues]) -> Interval:
    """Return the cosine, or the recall, of some classes."""
    found: Interval = getattr(Likeness.over(classes), name)
    return found


def _class_figure(name: str, title: str, caption: str, rows: ClassRows) -> str:
    def draw(prefix: str, canvas: Canvas) -> str:
        return class_chart(rows, prefix, canvas)

    return chart_html(name, title, caption, draw)


def _rows_of(evaluation: Evaluation, label: str, interval: Callable[[Any], Interval], form: str) -> ClassRows:
    """Return a figure of every file by class and over all, with its interval."""
    is_kld = interval is kld_interval
    floors = [each.kld for each in evaluation.noise.values()]
    marks = []
    for number, file in enumerate(evaluation.models):
        tokens = {name: each.models[number].tokens for name, each in evaluation.by_class.items()}
        rows = {name: [each] for name, each in tokens.items()} | {ALL: [*tokens.values()]}
        found = {name: interval(each) for name, each in rows.items()}
        marks.append([_mark(f"{file.path.name}, {name}", each, form) for name, each in found.items()])
    return ClassRows(
        names=[*evaluation.by_class, ALL],
        files=[(number, file.path.name) for number, file in enumerate(evaluation.models)],
        marks=marks,
        label=label,
        scale="log" if is_kld else "linear",
        floors=[*floors, mean_floor(evaluation.noise.values())] if is_kld and floors else None,
        has_total=True,
    )


def _ratios(evaluation: Evaluation) -> ClassRows:
    """Return the ratio of every file to the stock one, by class and over all."""
    comparisons = evaluation.comparisons
    paths = [file.path for file in evaluation.models]
    marks = []
    for each in comparisons:
        found = (*each.found.by_class, each.found.overall)
        marks.append([_ratio_mark(each.path.name, comparison) for comparison in found])
    return ClassRows(
        names=[*evaluation.by_class, ALL],
        files=[(paths.index(each.path), each.path.name) for each in comparisons],
        marks=marks,
        label="KLD, ratio to stock",
        line=1.0,
        has_total=True,
    )


def _ratio_mark(file: str, found: Comparison) -> Mark:
    is_sure = found.verdict is not Verdict.NO_DIFFERENCE
    title = f"{file}, {found.name or ALL}"
    return replace(_mark(title, found.kld_ratio, "{:.3f}"), is_sure=is_sure, title=f"{title}: {found.words}")


def _mark(title: str, found: Interval, form: str) -> Mark:
    value, low, high = map(form.format, (found.value, found.low, found.high))
    return Mark(found.value, found.low, found.high, f"{printable(title)}: {value} ({low} to {high})")


_MOST_BEATEN, _NOTABLE, _EQUAL = 4, 0.005, 0.05
"""How many files get a sentence of their own; the shares of bytes and of divergence that are worth words."""


def summary_section(
    points: Sequence[Point], floor: float | None, comparisons: Sequence[FileComparison], measure: str = "KLD"
) -> Iterator[str]:
    """Yield some sentences on the files of an evaluation.

    points       the files that were measured
    floor        divergence that is noise; None: not measured
    comparisons  with the stock file
    measure      name of what points have
    """
    sentences = [*_sentences(points, floor, measure), *(each.words for each in comparisons)]
    yield '<ul class="summary">'
    yield from (f"<li>{html_text(each)}</li>" for each in sentences)
    yield "</ul>"


def _sentences(points: Sequence[Point], floor: float | None, measure: str) -> Iterator[str]:
    nearest = min(points, key=lambda point: point.kld)
    if len(points) == 1:
        yield f"{nearest.name} has a mean {measure} of {nearest.kld:.5f}."
    else:
        figure = f"mean {measure} {nearest.kld:.5f}"
        yield f"Of {len(points)} files, {nearest.name} is nearest to the base: {figure}."
        front = pareto_front(points)
        names = short_names([point.name for point in points])
        shown = {point.name: name for point, name in zip(points, names, strict=True)}
        beaten = [point for point in points if point not in front]
        for point in beaten[:_MOST_BEATEN]:
            better = next(each for each in front if each.kld <= point.kld)
            fewer = 1 - better.n_bytes / point.n_bytes
            size = f"at {100 * fewer:.0f} % fewer bytes" if fewer >= _NOTABLE else "at the same size"
            how = "is as good as" if better.kld > (1 - _EQUAL) * point.kld else "is nearer to the base than"
            yield f"{shown[better.name]} {how} {shown[point.name]} {size}."
        if len(beaten) > _MOST_BEATEN:
            more = ", ".join(shown[point.name] for point in beaten[_MOST_BEATEN:])
            yield f"Other files are no larger and nearer to the base than {more}, too."
    if floor is not None:
        below = [point.name for point in points if point.kld < floor]
        said = f"; below it: {', '.join(below)}" if below else ""
        yield f"The noise floor, by which the base itself diverges through rounding, is {floor:.5f}{said}."


def comparison_section(comparisons: Sequence[FileComparison]) -> Iterator[str]:
    """Yield a table for every comparison with the stock file; nothing without one."""
    if comparisons:
        yield f"<h2>Each file against {html_text(comparisons[0].stock.name)}</h2>"
        yield f'<p class="note">{html_text(_HOW)}</p>'
    for number, each in enumerate(comparisons):
        words = f"{each.path.name}: {each.found.overall.words}"
        yield f"<details{' open' if number == 0 else ''}><summary>{html_text(words)}</summary>"
        yield from table_html(HEADINGS, comparison_rows(each))
        yield "</details>"


_HOW = (
    "Both files have read the same chunks, over which the intervals are computed. The interval over all"
    " classes contains the true value in 95 of 100 cases. Intervals and verdicts by class are corrected for"
    " the number of classes: in 95 of 100 cases, all intervals of a file contain their true values."
)
