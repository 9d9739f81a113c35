"""Files against one that they are to beat: comparisons as values, as JSON, as a table, and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import AnyPath
from gguf_tools.text import MAX_WIDTH, table
from imatrix.evaluate.comparison import Comparison, Comparisons, Interval, Verdict, compare
from imatrix.evaluate.divergence import TokenValues


@dataclass(frozen=True)
class FileComparison:
    """A file against another one, `stock`."""

    path: Path
    stock: Path
    found: Comparisons

    @property
    def words(self) -> str:
        """Result of the comparison, in one or two sentences."""
        overall, classes = self.found.overall, self.found.by_class
        said = f"{self.path.name} {_SAID[overall.verdict]} {self.stock.name}"
        if overall.verdict is not Verdict.NO_DIFFERENCE and overall.is_below_floor:
            said += ", by less than the noise floor"
        said += f": its mean KLD is {_times(overall.kld_ratio)}."
        return said if len(classes) < 2 else f"{said} {_by_verdict(classes)}."

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data: shares as fractions, divergences in nats."""
        return {
            "path": str(self.path),
            "against": str(self.stock),
            "words": self.words,
            "all": _json(self.found.overall),
            "classes": {str(each.name): _json(each) for each in self.found.by_class},
        }


_SAID = {
    Verdict.BETTER: "is better than",
    Verdict.WORSE: "is worse than",
    Verdict.NO_DIFFERENCE: "shows no significant difference from",
}


def compare_files(
    paths: Sequence[Path],
    stock: int,
    by_class: Mapping[str, Sequence[TokenValues]],
    floors: Mapping[str, float] | None,
) -> tuple[FileComparison, ...]:
    """Compare every file with the one of number `stock`.

    by_class  class -> what was measured of each file on the same tokens
    floors    class -> the noise floor of its mean divergence, in nats; None: not measured
    """

    def found(number: int) -> Comparisons:
        pairs = {name: (tokens[number], tokens[stock]) for name, tokens in by_class.items()}
        return compare(pairs, floors)

    return tuple(
        FileComparison(path, paths[stock], found(number))
        for number, path in enumerate(paths)
        if number != stock
    )


def with_stock(quants: Sequence[AnyPath], stock: AnyPath | None) -> tuple[list[Path], int | None]:
    """Return the files to evaluate, and which of them the others are compared with.

    stock  is the last one, unless it is among `quants` already; None: no file
    raises BadRequest where nothing is left to compare
    """
    paths = list(map(Path, quants))
    if stock is None:
        return paths, None
    same = [number for number, path in enumerate(paths) if path.resolve() == Path(stock).resolve()]
    if len(same) == len(paths):
        raise BadRequest(f"{stock}: no other file to compare with it")
    return (paths, same[0]) if same else ([*paths, Path(stock)], len(paths))


HEADINGS = ("class", "KLD ratio (95 % interval)", "difference", "same top", "flips", "verdict")


def comparison_lines(comparisons: Sequence[FileComparison]) -> Iterator[str]:
    """Print each comparison in words, and as a table with a row for each class."""
    for each in comparisons:
        yield ""
        yield from wrap(each.words, MAX_WIDTH)
        yield from table([HEADINGS, *comparison_rows(each)], right=range(1, 5))


def comparison_rows(comparison: FileComparison) -> list[Sequence[str]]:
    """Return a row for each class, and one for all where there are several."""
    found = comparison.found
    rows = [_row(str(each.name), each) for each in found.by_class]
    return [*rows, _row("all", found.overall)] if len(rows) > 1 else rows


def _row(name: str, found: Comparison) -> Sequence[str]:
    return (
        name,
        _interval(found.kld_ratio),
        f"{found.kld_difference.value:+.6f}",
        f"{found.same_top.value:+.2%}",
        f"{found.flips.value:+.3%}",
        found.words,
    )


def _by_verdict(classes: Sequence[Comparison]) -> str:
    """Say on which classes the file is better, worse, or neither."""
    parts = []
    for verdict in Verdict:
        names = [str(each.name) for each in classes if each.verdict is verdict]
        if names:
            shown = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
            parts.append(f"{verdict.value} on {shown if len(names) < len(classes) else 'all classes'}")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def _times(found: Interval) -> str:
    """Say how large one figure is beside the other.

    >>> _times(Interval(0.9, 0.85, 0.954, 0.01))
    '0.900 times as large (95 % interval 0.850 to 0.954)'
    """
    interval = "too few chunks for an interval" if math.isnan(found.low) else f"95 % interval {_ends(found)}"
    return f"{_number(found.value)} times as large ({interval})"


def _interval(found: Interval) -> str:
    return f"{_number(found.value)} ({'too few chunks' if math.isnan(found.low) else _ends(found)})"


def _ends(found: Interval) -> str:
    return f"{_number(found.low)} to {_number(found.high)}"


def _number(value: float) -> str:
    """Show three digits that mean something."""
    return f"{value:#.3g}".rstrip(".")


def comparisons_json(comparisons: Sequence[FileComparison]) -> dict[str, Any]:
    """Return the fields of comparisons in an evaluation's JSON; none without comparisons."""
    return {"comparisons": [each.to_json() for each in comparisons]} if comparisons else {}


def _json(found: Comparison) -> dict[str, Any]:
    return {
        "n_chunks": found.n_chunks,
        "verdict": found.verdict.value,
        "p": found.p,
        "level": found.level,
        "noise_floor": found.floor,
        "is_below_noise_floor": found.is_below_floor,
        **{
            name: {"value": each.value, "low": each.low, "high": each.high}
            for name, each in (
                ("kld_ratio", found.kld_ratio),
                ("kld_difference", found.kld_difference),
                ("same_top_difference", found.same_top),
                ("flips_difference", found.flips),
            )
        },
    }
