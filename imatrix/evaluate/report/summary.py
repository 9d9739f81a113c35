"""Summary of an evaluation, in words: which files are near to the base, and which are better than stock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gguf_tools.text import html_text
from imatrix.evaluate.against import HEADINGS, FileComparison, comparison_rows
from imatrix.evaluate.report.html import table_html
from imatrix.evaluate.report.points import Point, pareto_front, short_names

_MOST_BEATEN, _NOTABLE, _EQUAL = 4, 0.005, 0.05
"""How many files get a sentence of their own; the shares of bytes and of divergence that are worth words."""


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
    yield from (f"<li>{html_text(each)}</li>" for each in sentences)
    yield "</ul>"


def _sentences(points: Sequence[Point], floor: float | None) -> Iterator[str]:
    nearest = min(points, key=lambda point: point.kld)
    if len(points) == 1:
        yield f"{nearest.name} has a mean KLD of {nearest.kld:.5f}."
    else:
        yield f"Of {len(points)} files, {nearest.name} is nearest to the base: mean KLD {nearest.kld:.5f}."
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
        yield f"The noise floor, what the base itself loses to rounding, is {floor:.5f}{said}."


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
    "Both files have read the same chunks. Intervals are over chunks, and the one over all holds the truth in"
    " 95 of 100 cases. Intervals and verdicts by class are corrected for the number of classes: all of a"
    " file's together hold in 95 of 100 cases. Flips are tokens that the base gives more than 90 %, and that"
    " the file would not write."
)
