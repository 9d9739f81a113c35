"""A disk without room is told before a layer is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import gguf_tools
import imatrix.forward.run
from gguf_tools import OutputError
from tests.support.trained_model import EXAMPLE


@pytest.mark.parametrize("name", ["imatrix", "evaluate", "sensitivity"])
def test_a_full_disk_is_told_before_a_layer_is_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: object, **__: object) -> None:
        raise AssertionError("a layer was computed")

    monkeypatch.setattr(imatrix.forward.run, "run_layer", computed)
    monkeypatch.setattr("gguf_tools.system.files.free_bytes", lambda folder: 4096)
    text, cut = EXAMPLE / "calibration.txt", gguf_tools.Cut(64, n_chunks=2)
    runs = {
        "imatrix": lambda: gguf_tools.imatrix.collect(EXAMPLE, text, tmp_path / "out", cut=cut),
        "evaluate": lambda: gguf_tools.evaluate(EXAMPLE, text, [EXAMPLE], cut=cut),
        "sensitivity": lambda: gguf_tools.sensitivity(EXAMPLE, text, tmp_path / "out", cut=cut),
    }
    with pytest.raises(OutputError, match=r"need .* and the disk has 4\.00 KiB left; use fewer chunks"):
        runs[name]()
