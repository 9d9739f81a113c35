"""Memory that is free is given back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from imatrix.forward.workers import give_back, give_back_surplus

BLOCK, COUNT = 64 << 10, 12_000


def resident() -> int:
    """Return the memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries decide for themselves")
def test_what_is_free_between_blocks_in_use_is_given_back() -> None:
    give_back()  # or blocks would take what other tests have freed, and the process would not grow
    give_back_surplus()
    before = resident()
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(COUNT)]
    assert resident() - before > 0.9 * BLOCK * COUNT
    kept = blocks[::50]
    del blocks
    assert resident() - before > 0.8 * BLOCK * COUNT, "the C library gave it back of itself"
    time.sleep(0.1)  # until it is looked at again
    give_back_surplus()
    assert resident() - before < 0.3 * BLOCK * COUNT
    assert all(block.all() for block in kept)
