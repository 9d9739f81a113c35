"""Memory that is free is given back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from imatrix.forward import workers
from imatrix.forward.workers import give_back, give_back_surplus

BLOCK, COUNT = 64 << 10, 12_000


def resident() -> int:
    """Return the memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries decide for themselves")
def test_what_is_free_between_blocks_in_use_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SURPLUS", workers._Surplus())
    give_back()  # or blocks would take what other tests have freed, and the process would not grow
    give_back_surplus()
    before = resident()
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(COUNT)]
    assert resident() - before > 0.9 * BLOCK * COUNT
    kept = blocks[::50]
    del blocks
    assert resident() - before > 0.8 * BLOCK * COUNT, "the C library gave it back of itself"
    workers._SURPLUS.next_look = 0
    give_back_surplus()
    assert resident() - before < 0.3 * BLOCK * COUNT
    assert all(block.all() for block in kept)


def test_looks_at_what_is_free_take_little_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the C library has many free pieces to count, one takes a dozen milliseconds."""
    clock, looks = [0.0], []

    def look() -> int:
        clock[0] += 0.012
        looks.append(clock[0])
        return 0

    monkeypatch.setattr(workers, "_held_bytes", look)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    surplus = workers._Surplus()
    while clock[0] < 10:
        surplus.give_back()
        clock[0] += 0.001
    assert 10 < len(looks) < 10 * 0.03 / 0.012
