"""The fingerprint of an input: its size, and digests of samples of its bytes."""

from __future__ import annotations

import os
from pathlib import Path

from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.run_lock import first_difference
from gguf_tools.format.shards import FileLayout
from quantize.fill import provenance
from quantize.fill.encode import RowSources
from quantize.fill.filling import FillJob, Output

EMPTY = FillJob((Output(Path("out"), FileLayout.of({}, ())),), RowSources({}, {}))


def test_an_input_of_another_size_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "in.gguf"
    n_bytes = path.write_bytes(bytes(100_000))
    before = provenance.describe_run(EMPTY, InputWatch([path]))
    os.truncate(path, n_bytes - 1)
    after = provenance.describe_run(EMPTY, InputWatch([path]))
    difference = first_difference(before, after)
    assert difference == ("source, in.gguf, bytes", n_bytes, n_bytes - 1)
