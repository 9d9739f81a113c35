"""A Dask worker that says that it has written, and has not: `dask worker --preload tests/attack/liar.py`.

LIES says which writes are lost: "all", "half" at random, or "from:N" those from the N-th on.
"""

from __future__ import annotations

import os
import random

from gguf_tools.system import files

LIES = os.environ.get("LIES", "all")
_rng = random.Random(LIES)
_write_at = files.write_at
_n_writes = 0


def _lie(fd: int, data: bytes | memoryview, offset: int) -> int:
    global _n_writes
    _n_writes += 1
    first = int(LIES.partition(":")[2] or 0)
    if LIES == "all" or (LIES == "half" and _rng.random() < 0.5) or (first and _n_writes >= first):
        return len(data)
    return _write_at(fd, data, offset)


files.write_at = _lie
