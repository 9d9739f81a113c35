"""Diagnosis of a tensor's fault: hypotheses tried on its bad rows until one explains them.

All bad rows are tried together. What no hypothesis explains is tried once more, matrix by matrix, where the
tensor is a stack: each may have its own fault. What is left is told by where it is and how large.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convert.audit.base import AuditBase
from convert.audit.expected import CALIBRATED, SLOPE_FLOOR, read_rows
from convert.audit.hypotheses import Candidate, Suspect, candidates
from convert.audit.judge import Pair
from convert.audit.measure import Indices, RowSums, Sums, rows_of_a_matrix
from convert.audit.search import BLOCK, Fit, fits
from convert.audit.transforms import in_other_byte_order
from gguf_tools.text import first_of, number_ranges

MOST_ROWS = 128
MOST_WEIGHTS = 1 << 20
"""How much of the bad rows a hypothesis is tried on: no more rows than this, nor more weights."""

MOST_MATRICES = 64
"""Matrices of a stack that are explained one by one; the others are told as bad."""

ACCEPTED = 1.7
"""Largest error of rows that a hypothesis explains, in units of what the type makes."""

ACCEPTED_FLOATS = 0.01
"""The same for types of floats: another converter may have computed the values in 16 bits."""

IMPROVED = 0.65
"""Largest share of the error that a hypothesis leaves, to be believed."""

IMPROVED_BY_FACTORS = 0.9
MOST_CHARS = 60
"""Length of a list of rows or matrices in a sentence."""

STRANGE = 0.2
"""Cosine below which rows have nothing to do with the base's."""


@dataclass(frozen=True)
class Diagnosis:
    """Fault of some rows of a tensor.

    kind      a short name for programs
    text      in words that follow the tensor's name
    where     which part of the tensor, in words; "" for all of it
    relative  error of these rows against the base's as they are
    left      the error against what the hypothesis says; None where there is none
    holds     name of the tensor of the base that is there in its place, "" for none
    moves     matrix -> the matrix of the base that it holds
    otherwise what a calibration may have done instead, see SACRIFICED and SHRUNK; "" for nothing
    """

    kind: str
    text: str
    where: str
    relative: float
    left: float | None = None
    holds: str = ""
    moves: Mapping[int, int] = field(default_factory=dict)
    otherwise: str = ""


SACRIFICED = 1 / 500
"""Largest share of a matrix' rows that a calibration leaves far from the base's. The predictions depend on an
outlier channel of the hidden states at a few tokens only, and its row is encoded for these: in calibrated
files of SmolLM2-135M row 507 of the downs of layers 11 and 28 has relative errors of 75 and 165 %."""

_SACRIFICED = "encoded for the few tokens at which the predictions depend on this output"

SHRUNK = "shrunk by a calibration, which makes up for large errors of earlier tensors"
"""Words of weights that are off by more than a calibration's usual moves, and have a slope above 1. In a
random Kimi K3 of 8 layers at Q4_K_M, whose inputs were 94 % off, an attn_output had an error of 31.6 % and a
slope of 1.09, and less error in its output than stock's. Weights of another revision, so far apart, have a
slope below 0.95."""


class Patience:
    """How many tensors are still to be explained when no explanation is found for them.

    A file of another model has none for any tensor, and each search takes seconds. Safe to use from threads.
    """

    def __init__(self, n_tensors: int = 32) -> None:
        self._left = n_tensors
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def lose(self) -> None:
        with self._lock:
            self._left -= 1


def diagnose(
    pair: Pair, measured: RowSums, bad: Indices, base: AuditBase, patience: Patience | None = None
) -> list[Diagnosis]:
    """Say what is wrong with the rows `bad` of a tensor."""
    case = _Case(pair, measured, base, patience or Patience())
    diagnoses = []
    is_zero = (measured.sums.found == 0) & (measured.sums.wanted > 0) & (measured.nonfinite == 0)
    zeros = np.intersect1d(bad, measured.rows[is_zero])
    if len(zeros):
        diagnoses.append(Diagnosis("zeros", "all weights are zero", case.where(zeros), 1.0))
    rest = np.setdiff1d(bad, zeros)
    if not len(rest):
        return diagnoses
    is_few = len(rest) <= SACRIFICED * len(measured.rows)
    if pair.rise == CALIBRATED and is_few and not measured.nonfinite.any():
        return [*diagnoses, replace(case.unexplained(rest), otherwise=_SACRIFICED)]
    together = case.explain(rest)
    matrices = np.unique(rest // rows_of_a_matrix(pair.info))
    if together is not None:
        return [*diagnoses, *(_in_other_order([together], matrices) if together.moves else [together])]
    if pair.info.n_mats > 1:
        return [*diagnoses, *case.by_matrix(rest, matrices)]
    return [*diagnoses, case.unexplained(rest)]


@dataclass(frozen=True)
class _Case:
    """A tensor with bad rows."""

    pair: Pair
    measured: RowSums
    base: AuditBase
    patience: Patience

    def by_matrix(self, bad: Indices, matrices: Indices) -> Iterator[Diagnosis]:
        """Explain each bad matrix of a stack by itself; those without an explanation are told together."""
        n_rows = rows_of_a_matrix(self.pair.info)
        found: list[Diagnosis] = []
        left: list[Indices] = []
        for number, matrix in enumerate(matrices):
            rows = bad[bad // n_rows == matrix]
            one = self.explain(rows) if number < MOST_MATRICES else None
            if one is None:
                left.append(rows)
            else:
                found.append(one)
        yield from _in_other_order(found, matrices)
        yield from _alike(each for each in found if not each.moves)
        if left:
            yield self.unexplained(np.concatenate(left))

    def explain(self, bad: Indices) -> Diagnosis | None:
        """Find the hypothesis that explains bad rows best; None if none does, or patience is over."""
        if self.patience.is_over:
            return None
        info = self.pair.info
        most = max(1, min(MOST_ROWS, MOST_WEIGHTS // max(1, info.n_cols)))
        rows = bad[np.unique(np.linspace(0, len(bad) - 1, min(most, len(bad))).astype(np.int64))]
        found = np.nan_to_num(read_rows(self.pair.stored, rows), posinf=0, neginf=0)
        wanted = read_rows(self.pair.base, rows)
        as_it_is = Sums.of(wanted, found).over()
        best: tuple[float, Candidate] | None = None
        for candidate in candidates(Suspect(self.pair, self.base, rows, found)):
            error = float(Sums.of(candidate.rows(rows), found).over().relative)
            if self._believes(error, as_it_is) and (best is None or error < 0.98 * best[0]):
                best = error, candidate
        error_as_is, where = float(as_it_is.relative), self.where(bad)
        if best is not None:
            error, by = best
            return Diagnosis(by.kind, by.text, where, error_as_is, error, by.holds, by.moves)
        other = in_other_byte_order(self.pair.stored, rows, info.type)
        if other is not None and self._believes(float(Sums.of(wanted, other).over().relative), as_it_is):
            return Diagnosis("byte-order", "its bytes are in the other order", where, error_as_is)
        fit = self._fit(bad)
        if fit is not None:
            return Diagnosis(fit.kind, fit.text, where, error_as_is, fit.relative)
        return None

    def _believes(self, error: float, as_it_is: Sums) -> bool:
        return error <= self._accepted and error <= IMPROVED * float(as_it_is.relative)

    @property
    def _accepted(self) -> float:
        made = ACCEPTED * self.pair.expected.made
        return max(made, ACCEPTED_FLOATS) if self.pair.is_float else made

    def _fit(self, bad: Indices) -> Fit | None:
        """Fit factors to neighbouring rows that begin with a bad one; the coarsest that will do."""
        n_rows = rows_of_a_matrix(self.pair.info)
        matrix = int(bad[0]) // n_rows
        first = matrix * n_rows + (int(bad[0]) - matrix * n_rows) // BLOCK * BLOCK
        rows = np.arange(first, min(first + BLOCK, (matrix + 1) * n_rows))
        wanted, found = read_rows(self.pair.base, rows), read_rows(self.pair.stored, rows)
        found = np.nan_to_num(found, posinf=0, neginf=0)
        as_it_is = float(Sums.of(wanted, found).over().relative)
        good: list[Fit] = []
        for fit in fits(wanted, found):
            if fit.relative <= self._accepted and fit.relative <= IMPROVED_BY_FACTORS * as_it_is:
                good.append(fit)
        least = min((fit.relative for fit in good), default=math.inf)
        return next((fit for fit in good if fit.relative <= 1.02 * least + 1e-6), None)

    def unexplained(self, bad: Indices) -> Diagnosis:
        """Tell bad rows without an explanation by their error, and by how they resemble the base's."""
        self.patience.lose()
        measured = self.measured.pick(np.isin(self.measured.rows, bad))
        sums, where = measured.sums.over(), self.where(bad)
        cosine, error, type_ = float(sums.cosine), float(sums.relative), self.pair.info.type.name
        made = self.pair.expected.made
        n_odd, n_blocks = int(measured.odd.sum()), len(bad) * measured.n_blocks
        if cosine < STRANGE:
            text = "it has nothing to do with the base's: other weights, or damaged"
            return Diagnosis("stranger", text, where, error)
        in_most_rows = (measured.odd > 0).mean() > 0.8
        if in_most_rows and (n_odd < 0.5 * n_blocks or where.startswith("row")):
            blocks = f"{n_odd:,} of {n_blocks:,} blocks of {self.pair.info.n_cols // measured.n_blocks}"
            text = f"damaged: {blocks} weights are not the base's (relative error {_percent(error)})"
            return Diagnosis("damaged", text, where, error)
        apart = math.sqrt(max(0.0, error**2 - made**2))
        if self.pair.is_float:
            text = f"weights of another revision, {_percent(apart)} apart; {type_} keeps weights as they are"
            return Diagnosis("revision", text, where, error)
        text = (
            f"relative error {_percent(error)}, {type_} makes {_percent(made)}: weights of another revision"
            f" (about {_percent(apart)} apart), or encoded from a file that was encoded before"
        )
        leans = float(sums.slope) > self.pair.expected.slope + SLOPE_FLOOR
        is_shrunk = self.pair.rise == CALIBRATED and leans
        return Diagnosis("revision", text, where, error, otherwise=SHRUNK if is_shrunk else "")

    def where(self, rows: Indices) -> str:
        """Say which part of a tensor rows are: "" for all that were read, experts, or rows."""
        if len(rows) >= 0.9 * len(self.measured.rows):
            return ""
        n_rows = rows_of_a_matrix(self.pair.info)
        words = ("expert", "experts") if "_exps" in self.pair.info.name else ("matrix", "matrices")
        matrices, counts = np.unique(rows // n_rows, return_counts=True)
        read = np.bincount(self.measured.matrices, minlength=int(matrices[-1]) + 1)
        if self.pair.info.n_mats > 1 and (counts >= 0.5 * read[matrices]).all():
            return _plural(*words, matrices)
        if self.pair.info.n_mats > 1 and len(matrices) == 1:
            inside = f"{_plural('row', 'rows', rows % n_rows)}"
            return f"{words[0]} {matrices[0]}, {inside}"
        return _plural("row", "rows", rows)


def _plural(one: str, several: str, numbers: Indices) -> str:
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    ranges = number_ranges(numbers.tolist())
    if len(ranges) > MOST_CHARS:
        ranges = f"{ranges[:MOST_CHARS].rpartition(',')[0]}, ... {len(numbers):,} in all"
    return f"{several} {ranges}"


def _in_other_order(found: Sequence[Diagnosis], bad: Indices) -> Iterator[Diagnosis]:
    """Tell all matrices that hold another one's weights in one sentence, by what happened to them."""
    moves = {own: other for each in found for own, other in each.moves.items()}
    if not moves:
        return
    errors = [each.relative for each in found if each.moves]
    left = max((each.left or 0.0) for each in found if each.moves)
    repeated = {own: other for own, other in moves.items() if other not in moves and other not in bad}
    parts = []
    for own, other in moves.items():
        if own in repeated:
            parts.append(f"{own} repeats {other}")
        elif moves.get(other) == own:
            parts += [f"{own} and {other} are swapped"] * (own < other)
        else:
            parts.append(f"{own} holds {other}")
    kind = "expert-repeated" if len(repeated) == len(moves) else "expert-misplaced"
    text = "an expert is repeated" if kind == "expert-repeated" else "experts are in each other's places"
    yield Diagnosis(kind, f"{text}: {first_of(parts, 6)}", "", max(errors), left, moves=moves)


def _alike(found: Iterator[Diagnosis]) -> Iterator[Diagnosis]:
    """Tell matrices with the same fault together."""
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for each in found:
        key = (each.kind, "" if each.kind in _WITH_FACTORS else each.text)
        groups.setdefault(key, []).append(each)
    for group in groups.values():
        first = group[0]
        if len(group) == 1:
            yield first
            continue
        where = ", ".join(each.where for each in group[:8]) + (" ..." if len(group) > 8 else "")
        yield Diagnosis(
            first.kind, first.text, where, max(each.relative for each in group),
            max(each.left or 0.0 for each in group), first.holds,
        )  # fmt: skip


_WITH_FACTORS = frozenset({"scaled", "scales-missing", "row-scales", "column-scales"})


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
