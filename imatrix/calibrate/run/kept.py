"""Rows that one step has computed, kept in memory for the next, as far as a budget goes."""

from __future__ import annotations

from threading import Lock

import torch


class Kept:
    """Rows by what they are and by chunk. What has no room is not kept, and is computed again.

    n_bytes  of all rows, at most
    """

    def __init__(self, n_bytes: int) -> None:
        self._left, self._lock = n_bytes, Lock()
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def keep(self, name: str, chunk: int, rows: torch.Tensor) -> None:
        """Keep rows if there is room."""
        with self._lock:
            if rows.nbytes <= self._left:
                self._left -= rows.nbytes
                self._rows[name, chunk] = rows

    def take(self, name: str, chunk: int) -> torch.Tensor | None:
        """Return rows, and keep them no longer; None where they are not kept."""
        with self._lock:
            rows = self._rows.pop((name, chunk), None)
            if rows is not None:
                self._left += rows.nbytes
            return rows
