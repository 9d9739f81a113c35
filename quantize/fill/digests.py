"""Digests of rows, and the version of what is made of them: encoding, fingerprint, provenance share both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

BYTES_VERSION = 1
"""Version of the encoded bytes. It goes up when the same plan and source would give other bytes: then no run
resumes an old partial, nor takes tensors of an older file (see provenance.py)."""

UNKNOWN = 0
"""Digest of a chunk that nobody has digested, and number of a tensor without provenance."""


class RowsDigest:
    """The digest of the rows of a chunk, which may come in several pieces, in their order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, rows: npt.NDArray[Any]) -> None:
        """Take in the next rows, C-contiguous, of any dtype."""
        self._state.update(rows.reshape(-1).view(np.uint8).data)

    def value(self) -> int:
        """Return the digest so far, uint64, never UNKNOWN."""
        return self._state.intdigest() or 1
