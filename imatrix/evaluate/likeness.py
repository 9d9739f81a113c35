"""How alike two models' vectors of texts are, where a model is for embeddings: by passages, not by tokens.

Two figures are told. The cosine of the angle between a passage's vectors by the base and by the model is 1
where they agree. What people use vectors for is the order of neighbours: of the ten passages that are nearest
to one by the base, over all classes, Recall@10 is the share that are among the ten nearest by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadRequest
from imatrix.evaluate.comparison import Interval, mean_interval
from imatrix.evaluate.divergence import Ints, Values

NEIGHBOURS = 10
"""Number of the nearest passages that are compared."""

_FEWEST = 5 * NEIGHBOURS
"""Passages without which most others are among the nearest by chance."""

LIKENESS_HEADINGS = ("cosine (95 % interval)", "lowest", "Recall@10 (95 % interval)")
"""Columns of tables, of which `Likeness.cells` makes a row."""


@dataclass(frozen=True, eq=False)
class PassageValues:
    """Values of each passage; all arrays are (n_passages,).

    chunk   its number
    cosine  of its vectors by the base and by the model
    recall  share of its nearest passages by the base that are nearest by the model, too
    """

    chunk: Ints
    cosine: Values
    recall: Values

    @classmethod
    def of(cls, base: npt.NDArray[np.float64], model: npt.NDArray[np.float64]) -> Self:
        """Compare vectors of length one, (n_passages, n_cols) each.

        raises  BadRequest for fewer passages than Recall@10 needs
        """
        if len(base) < _FEWEST:
            raise BadRequest(
                f"{len(base)} passages, and Recall@{NEIGHBOURS} needs {_FEWEST} or more: use more text, or"
                " shorter passages (-c)"
            )
        shared = [np.isin(*pair).mean() for pair in zip(_nearest(base), _nearest(model), strict=True)]
        return cls(np.arange(len(base)), (base * model).sum(1), np.array(shared))

    def of_chunks(self, chunks: range) -> Self:
        """Return those of some chunks that follow each other, which are numbered from 0 again."""
        part = slice(chunks.start, chunks.stop)
        return replace(self, chunk=np.arange(len(chunks)), cosine=self.cosine[part], recall=self.recall[part])


def _nearest(vectors: npt.NDArray[np.float64]) -> Ints:
    """Return the numbers of the nearest others of each vector, (n_passages, NEIGHBOURS)."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    found: Ints = np.argsort(-cosines, 1, kind="stable")[:, :NEIGHBOURS]
    return found


@dataclass(frozen=True)
class Likeness:
    """How like its base's the vectors of a model are; intervals are over passages.

    lowest  cosine of the passage that the model is farthest off on
    """

    cosine: Interval
    lowest: float
    recall: Interval

    @classmethod
    def over(cls, classes: Sequence[PassageValues]) -> Self:
        """Compute the figures of one class, or over several, which weigh the same."""

        def mean(of: Callable[[PassageValues], Values]) -> Interval:
            found = mean_interval([(each.chunk, of(each)) for each in classes])
            return replace(found, high=min(1.0, found.high))

        lowest = min(float(each.cosine.min()) for each in classes)
        return cls(mean(lambda each: each.cosine), lowest, mean(lambda each: each.recall))

    @property
    def distance(self) -> float:
        """Distance of the mean cosine from 1; 0 or more, whatever rounding does."""
        return max(0.0, 1 - self.cosine.value)

    def row(self) -> dict[str, float]:
        """Return the figures by the names that they have in tables and in JSON."""
        return {
            **_named("cosine", self.cosine),
            "cosine_lowest": self.lowest,
            **_named("recall_at_10", self.recall),
        }

    def cells(self) -> tuple[str, ...]:
        """Return the cells under LIKENESS_HEADINGS."""
        cosine, recall = self.cosine, self.recall
        return (
            f"{cosine.value:.6f} ({cosine.low:.6f} to {cosine.high:.6f})",
            f"{self.lowest:.6f}",
            f"{recall.value:.2%} ({recall.low:.2%} to {recall.high:.2%})",
        )


def _named(name: str, found: Interval) -> dict[str, Any]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
