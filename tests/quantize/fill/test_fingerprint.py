"""The fingerprint of an input: pieces of all of it, and its size."""

from __future__ import annotations

import os
from pathlib import Path

from gguf_tools.claim import first_difference
from gguf_tools.layout import FileLayout
from quantize.fill import fingerprint
from quantize.fill.encode import FillJob

EMPTY = {"out": FileLayout.of({}, ())}


def test_an_input_of_another_size_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "in.gguf"
    n_bytes = path.write_bytes(bytes(100_000))
    before = fingerprint.describe_run(EMPTY, FillJob({}, {}), [path])
    os.truncate(path, n_bytes - 1)
    after = fingerprint.describe_run(EMPTY, FillJob({}, {}), [path])
    place, old, new = first_difference(before, after) or ("", "", "")
    assert place == "source, in.gguf"
    assert (old.split(",")[0], new.split(",")[0]) == (f"{n_bytes} bytes", f"{n_bytes - 1} bytes")


def test_pieces_of_all_of_a_large_input_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "large"
    n_bytes = 3 << 30  # of zeros that take no space
    with open(path, "wb") as file:
        file.truncate(n_bytes)
    seen = {fingerprint.describe_run(EMPTY, FillJob({}, {}), [path])["source"]["large"]}
    places = [0, (1 << 20) - 1, *(n_bytes * piece // 16 - 1 for piece in range(1, 17))]
    for place in places:
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(fingerprint.describe_run(EMPTY, FillJob({}, {}), [path])["source"]["large"])
    assert len(seen) == 1 + len(places)
