"""An evaluation on a suite as one self-contained page: its charts have a row for each class of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gguf_tools.text import html_text, printable, size_text
from imatrix.evaluate.comparison import Comparison, Interval, Verdict, flips_interval, kld_interval
from imatrix.evaluate.divergence import TokenValues
from imatrix.evaluate.noise_floor import mean_floor, noise_by_class_rows
from imatrix.evaluate.report.charts import Canvas
from imatrix.evaluate.report.class_charts import ClassRows, Mark, class_chart, floor_text
from imatrix.evaluate.report.html import chart_html, page_html, page_title, table_html
from imatrix.evaluate.report.model_sections import map_sections, price_sections
from imatrix.evaluate.report.page import size_figure
from imatrix.evaluate.report.passage_section import passage_sections
from imatrix.evaluate.report.points import Earlier, earlier_points, measured_points
from imatrix.evaluate.report.summary import comparison_section, summary_section
from imatrix.evaluate.suite.result import ALL, SuiteEvaluation
from quantize.plan.sensitivities import Sensitivities

_HEADINGS = ("file", "size", "bpw", "KLD", "99.9%", "same top", "flips", "flips of the confident")


def suite_page(
    evaluation: SuiteEvaluation, earlier: Sequence[Earlier] = (), losses: Sensitivities | None = None
) -> str:
    """Return the page, with the smallest file first everywhere.

    earlier  evaluations on the same suite, whose files are shown beside, by size and divergence
    losses   of the base: what each tensor costs at each type, for a map of that
    raises   BadRequest for an earlier evaluation of other texts or base, and losses of another model
    """
    evaluation = evaluation.by_size()
    files, classes = evaluation.files, [*evaluation.by_class.values()]
    measured = measured_points(files, [figures[ALL].kld.value for figures in evaluation.figures])
    others = [
        point for number, each in enumerate(earlier, 1) for point in earlier_points(each, number, classes)
    ]
    floor = mean_floor(evaluation.noise.values()) if evaluation.noise else None
    sections = [
        *_heading(evaluation),
        *summary_section(measured, floor, evaluation.comparisons),
        *table_html(_HEADINGS, _overall(evaluation)),
        '<div class="charts">',
        size_figure((*measured, *others), earlier, floor),
        *_charts(evaluation),
        "</div>",
        *comparison_section(evaluation.comparisons),
        *_by_class(evaluation),
        *map_sections(files),
        *price_sections(files, losses),
        *passage_sections(evaluation.by_class),
    ]
    return page_html(page_title(evaluation.base_path, len(files)), sections)


def _heading(evaluation: SuiteEvaluation) -> Iterator[str]:
    texts = [each.text for each in evaluation.by_class.values()]
    n_measured, n_chunks = sum(each.n_tokens_measured for each in texts), sum(each.n_chunks for each in texts)
    suite = html_text(evaluation.suite.name) + (", a tenth of each" if evaluation.suite.quick else "")
    yield f"<h1>{html_text(page_title(evaluation.base_path, len(evaluation.files)))}</h1>"
    yield (
        f'<p class="note">{len(texts)} classes of texts, suite {suite}:'
        f" {n_measured:,} tokens measured, in {n_chunks} chunks. Over all, each class weighs the same. KLD is"
        " the Kullback-Leibler divergence from the base, in nats. Flips are tokens that the base gives more"
        " than 90 %, and that the file would not write. Behind \u00b1 stands a standard error over"
        " chunks.</p>"
    )


def _overall(evaluation: SuiteEvaluation) -> Iterator[Sequence[str]]:
    for file, figures in zip(evaluation.files, evaluation.figures, strict=True):
        found = figures[ALL]
        yield (
            file.path.name,
            size_text(file.n_bytes),
            f"{file.bits_per_weight:.2f}",
            f"{found.kld.value:.5f} \u00b1 {found.kld.error:.5f}",
            f"{found.p99_9:.4f}",
            f"{found.same_top.value:.2%}",
            f"{found.flips.value:.2%}",
            f"{found.flips_of_confident.value:.2%}",
        )


def _by_class(evaluation: SuiteEvaluation) -> Iterator[str]:
    """Yield tables of the divergences by class, with the noise floor beside them."""
    names = [*evaluation.by_class, ALL]
    yield "<h2>Mean divergence by class</h2>"
    noise = noise_by_class_rows(evaluation.noise) if evaluation.noise else []
    rows = [
        (file.path.name, *(f"{figures[name].kld.value:.5f}" for name in names))
        for file, figures in zip(evaluation.files, evaluation.figures, strict=True)
    ]
    yield from table_html(("", *names), [*rows, *noise])


def _charts(evaluation: SuiteEvaluation) -> Iterator[str]:
    divergences = _rows_of(evaluation, "mean KLD", kld_interval, "{:.5f}")
    about = "Mean KLD of each file with its 95 % interval over chunks, each by itself. Bars join the files."
    yield _class_figure("classes", "Divergence by class", f"{about} {floor_text(divergences)}", divergences)
    if evaluation.comparisons:
        yield _class_figure(
            "ratios", f"Against {printable(evaluation.comparisons[0].stock.name)}",
            "Mean KLD over that of the stock file, with the 95 % interval from paired chunks: left of 1 is"
            " better. Intervals by class are corrected for the number of classes. Hollow marks can't be told"
            " apart from it.",
            _ratios(evaluation),
        )  # fmt: skip
    yield _class_figure(
        "flips", "Flips by class",
        "Share of tokens that the base gives more than 90 % and that the file would not write. It is what a"
        " reader notices.",
        _rows_of(evaluation, "share of tokens flipped", flips_interval, "{:.3%}"),
    )  # fmt: skip


def _class_figure(name: str, title: str, caption: str, rows: ClassRows) -> str:
    def draw(prefix: str, canvas: Canvas) -> str:
        return class_chart(rows, prefix, canvas)

    return chart_html(name, title, caption, draw)


def _rows_of(
    evaluation: SuiteEvaluation, label: str, interval: Callable[[Sequence[TokenValues]], Interval], form: str
) -> ClassRows:
    """Return a figure of every file by class and over all, with its interval."""
    is_kld = interval is kld_interval
    floors = [each.kld for each in evaluation.noise.values()]
    marks = []
    for number, file in enumerate(evaluation.files):
        tokens = {name: each.models[number].tokens for name, each in evaluation.by_class.items()}
        rows = {name: [each] for name, each in tokens.items()} | {ALL: [*tokens.values()]}
        found = {name: interval(each) for name, each in rows.items()}
        marks.append([_mark(f"{file.path.name}, {name}", each, form) for name, each in found.items()])
    return ClassRows(
        names=[*evaluation.by_class, ALL],
        files=[(number, file.path.name) for number, file in enumerate(evaluation.files)],
        marks=marks,
        label=label,
        scale="log" if is_kld else "linear",
        floors=[*floors, mean_floor(evaluation.noise.values())] if is_kld and floors else None,
        has_total=True,
    )


def _ratios(evaluation: SuiteEvaluation) -> ClassRows:
    """Return the ratio of every file to the stock one, by class and over all."""
    comparisons = evaluation.comparisons
    paths = [file.path for file in evaluation.files]
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
    is_sure = found.verdict is not Verdict.NOT_TOLD_APART
    title = f"{file}, {found.name or ALL}"
    return replace(_mark(title, found.kld_ratio, "{:.3f}"), is_sure=is_sure, title=f"{title}: {found.words}")


def _mark(title: str, found: Interval, form: str) -> Mark:
    value, low, high = map(form.format, (found.value, found.low, found.high))
    return Mark(found.value, found.low, found.high, f"{printable(title)}: {value} ({low} to {high})")
