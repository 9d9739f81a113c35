"""SHA-256 of files that come in pieces, in whatever order, and are not kept.

SHA-256 goes through a file from its first byte to its last. A piece that comes early is kept until its turn,
as long as all such pieces have room in a budget; then the file's hash is given up. Readers of dense models go
through a shard from front to back. Experts that are stacked are read one matrix of all of them after the
other, while a shard has one expert after the other, so shards of these are often given up.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

BUDGET_BYTES = 256 << 20
"""Bytes of all files of a model that may wait for their turn."""


class Budget:
    """Bytes that several files may keep together; safe to use from several threads."""

    def __init__(self, n_bytes: int = BUDGET_BYTES) -> None:
        self._left = n_bytes
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> bool:
        """Return whether so many bytes were left, and are taken now."""
        with self._lock:
            fits = n_bytes <= self._left
            self._left -= n_bytes * fits
        return fits

    def give_back(self, n_bytes: int) -> None:
        with self._lock:
            self._left += n_bytes


class InOrder:
    """The SHA-256 of a file as its pieces come; safe to use from several threads.

    n_bytes      of the file
    expected     its hash, in hex
    mismatch     called with the hash that was found, when all has come and it is another one; raises
    is_checked   all has come, and it was the file
    n_seen       bytes that have come, some perhaps twice
    """

    def __init__(self, n_bytes: int, expected: str, budget: Budget, mismatch: Callable[[str], None]) -> None:
        self.n_bytes, self.expected = n_bytes, expected
        self.is_checked = False
        self.n_seen = 0
        self._budget, self._mismatch = budget, mismatch
        self._hash = hashlib.sha256()
        self._position = 0
        self._early: dict[int, bytes] = {}
        self._is_given_up = False
        self._lock = threading.Lock()

    def take(self, offset: int, view: memoryview) -> None:
        """Take the bytes that stand at `offset`; raises what `mismatch` raises."""
        with self._lock:
            self.n_seen += len(view)
            if self._is_given_up or self.is_checked or offset + len(view) <= self._position:
                return
            if offset > self._position:
                self._keep(offset, view)
                return
            self._update(offset, view)
            while (first := min(self._early, default=self.n_bytes)) <= self._position and self._early:
                piece = self._early.pop(first)
                self._budget.give_back(len(piece))
                self._update(first, memoryview(piece))
            if self._position < self.n_bytes:
                return
            found = self._hash.hexdigest()
            self.is_checked = found == self.expected
            self._give_up()
        if not self.is_checked:
            self._mismatch(found)

    def _update(self, offset: int, view: memoryview) -> None:
        rest = view[self._position - offset :]
        self._hash.update(rest)
        self._position += len(rest)

    def _keep(self, offset: int, view: memoryview) -> None:
        if len(self._early.get(offset, b"")) >= len(view):
            return
        if not self._budget.take(len(view)):
            self._give_up()
            return
        self._budget.give_back(len(self._early.get(offset, b"")))
        self._early[offset] = bytes(view)

    def _give_up(self) -> None:
        self._budget.give_back(sum(map(len, self._early.values())))
        self._early.clear()
        self._is_given_up = True
