"""Rows that one step has computed, kept in memory for the next, as far as a budget goes."""

from __future__ import annotations

from threading import Lock

import torch


class Kept:
    """Rows by the matrices that they go to and by chunk. What has no room is not kept, and computed again.

    n_bytes  of all rows, at most
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = self._left = n_bytes
        self._lock = Lock()
        self._rows: dict[tuple[tuple[str, ...], int], torch.Tensor] = {}

    def keep(self, names: tuple[str, ...], chunk: int, rows: torch.Tensor) -> None:
        """Keep rows if there is room."""
        with self._lock:
            if rows.nbytes <= self._left:
                self._left -= rows.nbytes
                self._rows[names, chunk] = rows

    def get(self, names: tuple[str, ...], chunk: int) -> torch.Tensor | None:
        """Return rows; None where they are not kept."""
        return self._rows.get((names, chunk))

    def take(self, names: tuple[str, ...], chunk: int) -> torch.Tensor | None:
        """Return rows, and keep them no longer; None where they are not kept."""
        with self._lock:
            rows = self._rows.pop((names, chunk), None)
            if rows is not None:
                self._left += rows.nbytes
            return rows

    def clear(self) -> None:
        """Forget all rows."""
        with self._lock:
            self._rows.clear()
            self._left = self._n_bytes
