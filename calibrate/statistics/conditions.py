"""What rows are encoded under: the statistics of their inputs, factored, and the correction for drift."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from calibrate.rounding.factor import Factor
from calibrate.statistics.drift_correction import corrected, correction
from calibrate.statistics.inputs import Held
from calibrate.statistics.moments import Statistics
from calibrate.statistics.shrinkage import Trust
from forward.workers import Workers
from gguf_tools.errors import BadActivation, BadMoments
from quantize.formats.base import Floats32


@dataclass(frozen=True)
class Conditions:
    """The conditions of some rows.

    statistics  of their inputs
    factor      of the second moments; None where these can't be used
    correction  T, float32 (n_cols, n_cols): rounding aims at W + a W T. None: no correction
    held        held-out rows, on which encodings are compared; None: there are none
    """

    statistics: Statistics
    factor: Factor | None
    correction: Floats32 | None
    held: Held | None

    @classmethod
    def nothing(cls, n_cols: int) -> Self:
        """Return empty conditions, for rows whose inputs were never observed."""
        return cls(Statistics.nothing(n_cols), None, None, None)

    def aim(self, rows: Floats32) -> Floats32:
        """Return what rounding aims at: rows with the correction, float32 (n_rows, n_cols)."""
        return rows if self.correction is None else corrected(rows, self.correction, self.held)


def conditions_of(
    inputs: Iterable[tuple[Statistics, Held | None]], name: str, workers: Workers, trust: Trust
) -> Iterator[Conditions]:
    """Yield the conditions that follow from statistics, each with its held-out rows.

    name    of a matrix, for messages
    raises  BadActivation for NaN or infinity in the matrix's input
    """

    def factor_of(each: tuple[Statistics, Held | None]) -> tuple[Statistics, Held | None, Factor | None]:
        statistics, held = each
        if not statistics.is_finite:
            raise BadActivation(f"{name}: its input has NaN or infinity")
        if not statistics.n_rows:
            return statistics, held, None
        try:
            return statistics, held, Factor.of(statistics.own, trust.input_damp)
        except BadMoments:
            return statistics, held, None

    for statistics, held, factor in workers.each(factor_of, inputs):
        change = None if factor is None else correction(statistics, factor, workers)
        yield Conditions(statistics, factor, change, held)
