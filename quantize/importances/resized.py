"""An entry of importances with longer or shorter rows: zeros at their end, or without them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantize.importances.entries import ImportanceEntry


@dataclass(frozen=True)
class ResizedImportance(ImportanceEntry):
    """An entry whose rows have been given another length.

    stored      the entry as it is; its rows may stand end to end
    counts      of it
    n_cols      columns of its matrices as they are
    n_new_cols  columns as they shall be
    """

    stored: ImportanceEntry
    counts: npt.NDArray[np.float32]
    n_cols: int
    n_new_cols: int

    @classmethod
    def of(cls, stored: ImportanceEntry, n_cols: int, n_new_cols: int) -> ResizedImportance:
        return cls(stored, stored.counts, n_cols, n_new_cols)

    @property
    def shape(self) -> tuple[int, int]:
        n_rows, n_values = self.stored.shape
        return n_rows, n_values // self.n_cols * self.n_new_cols

    def read(self) -> npt.NDArray[np.float32]:
        rows = self.stored.read().reshape(-1, self.n_cols)
        kept = min(self.n_cols, self.n_new_cols)
        resized = np.zeros((len(rows), self.n_new_cols), np.float32)
        resized[:, :kept] = rows[:, :kept]
        return resized.reshape(self.shape)

    def row(self, index: int) -> ResizedImportance:
        return ResizedImportance.of(self.stored.row(index), self.n_cols, self.n_new_cols)

    def in_rows(self, counts: npt.NDArray[np.float32]) -> ResizedImportance:
        return ResizedImportance.of(self.stored.in_rows(counts), self.n_cols, self.n_new_cols)
