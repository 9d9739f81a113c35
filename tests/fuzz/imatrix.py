"""Importance matrix files in both forms, which are loaded, described, checked and saved in both forms."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from imatrix.check import check
from imatrix.stats import describe, description_lines, entry_stats
from imatrix.store import load, not_held, save
from tests.fuzz import mutate, scratch
from tests.hostile.fields import head, number, strings, tensor, word


def _i32(value: int) -> bytes:
    return struct.pack("<i", value)


def _floats(*values: float) -> tuple[bytes, ...]:
    return tuple(struct.pack("<f", value) for value in values)


def _entry(name: bytes, n_calls: int, *values: float) -> tuple[bytes, ...]:
    return _i32(len(name)), name, _i32(n_calls), _i32(len(values)), *_floats(*values)


DAT = (
    _i32(2),
    *_entry(b"blk.0.attn_q.weight", 3, 1.0, 2.0, 0.5, 0.0),
    *_entry(b"blk.1.ffn_up_exps.weight", 2, 1.0, 2.0, 3.0, 4.0),
    _i32(7), _i32(5), b"a.txt",
)  # fmt: skip

GGUF = (
    *head(4, 4),
    *word("general.type", "imatrix"),
    *strings("imatrix.datasets", "a.txt", "b.txt"),
    *number("imatrix.chunk_count", 7),
    *number("imatrix.chunk_size", 512),
    *tensor("blk.0.attn_q.weight.in_sum2", (4,), 0, 0),
    *tensor("blk.0.attn_q.weight.counts", (1,), 0, 32),
    *tensor("blk.1.ffn_up_exps.weight.in_sum2", (2, 2), 0, 64),
    *tensor("blk.1.ffn_up_exps.weight.counts", (1, 2), 0, 96),
    bytes(17),
    *_floats(1.0, 2.0, 0.5, 0.0), bytes(16),
    *_floats(1024.0), bytes(28),
    *_floats(1.0, 2.0, 3.0, 4.0), bytes(16),
    *_floats(512.0, 0.0), bytes(24),
)  # fmt: skip


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    return mutate.segments(rng, rng.choice((DAT, GGUF)))


def warm_up() -> None:
    for valid in (DAT, GGUF):
        one_input(b"".join(valid))


def read(path: Path) -> None:
    """Load a file and look at it; raises ToolkitError if it is refused."""
    contents = load(path)
    describe(contents)
    list(description_lines(contents))
    entry_stats(contents)
    check(contents)
    not_held(contents, "dat")


def one_input(data: bytes) -> None:
    folder = scratch.folder("imatrix")
    path = folder / "strange.imatrix"
    path.write_bytes(data)
    read(path)
    contents = load(path)
    save(folder / "again.gguf", contents, force=True)
    save(folder / "again.dat", contents, force=True)
