"""What an evaluation says, in words: which files are near to the base, and which are better than stock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gguf_tools.text import printable
from quality.against import HEADINGS, FileComparison, comparison_rows
from quality.report.html import table_html
from quality.report.points import Point, pareto_front


def summary_section(
    points: Sequence[Point], floor: float | None, comparisons: Sequence[FileComparison]
) -> Iterator[str]:
    """Yield some sentences on the files of an evaluation.

    points       the files that were measured
    floor        divergence that is noise; None: not measured
    comparisons  with the stock file
    """
    sentences = [*_sentences(points, floor), *(each.words for each in comparisons)]
    yield '<ul class="summary">'
    yield from (f"<li>{escape(printable(each))}</li>" for each in sentences)
    yield "</ul>"


def _sentences(points: Sequence[Point], floor: float | None) -> Iterator[str]:
    nearest = min(points, key=lambda point: point.kld)
    if len(points) == 1:
        yield f"{nearest.name} has a mean KLD of {nearest.kld:.5f}."
    else:
        yield f"Of {len(points)} files, {nearest.name} is nearest to the base: mean KLD {nearest.kld:.5f}."
        front = pareto_front(points)
        beaten = [point.name for point in points if point not in front]
        if beaten:
            yield f"Another file is no larger and was measured nearer to the base than {', '.join(beaten)}."
    if floor is not None:
        below = [point.name for point in points if point.kld < floor]
        said = f"; below it: {', '.join(below)}" if below else ""
        yield f"The noise floor, what the base itself loses to rounding, is {floor:.5f}{said}."


def comparison_section(comparisons: Sequence[FileComparison]) -> Iterator[str]:
    """Yield a table for every comparison with the stock file; nothing without one."""
    if comparisons:
        yield f"<h2>Each file against {escape(printable(comparisons[0].stock.name))}</h2>"
        yield f'<p class="note">{escape(_HOW)}</p>'
    for number, each in enumerate(comparisons):
        words = f"{each.path.name}: {each.found.overall.words}"
        yield f"<details{' open' if number == 0 else ''}><summary>{escape(printable(words))}</summary>"
        yield from table_html(HEADINGS, comparison_rows(each))
        yield "</details>"


_HOW = (
    "Both files have read the same chunks. The interval is over chunks, and holds the truth in 95 of 100"
    " cases. Verdicts by class are corrected for the number of classes. Flips are tokens that the base gives"
    " more than 90 %, and that the file would not write."
)
