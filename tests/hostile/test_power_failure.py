"""A power failure costs a minute's work or a layer's, and no file is synced more often than once a minute."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np

import convert
import gguf_tools
import quantize
from gguf_tools.files import journal, owned_folder
from imatrix.calibrate.run import context
from imatrix.forward.options import ForwardOptions
from imatrix.forward.work_folder import EMBEDDING, WorkFolder
from imatrix.texts.tokens import Cut
from quantize.plan.overrides import parse_overrides
from tests.support.trained_model import calibration_text, trained_model

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="the names of open files are in /proc"
)

MINUTE = 60


@dataclass
class Disk:
    """What is on the disk itself, and when it came there.

    now     seconds
    synced  of each file, its bytes when it was synced last
    times   of each file and folder, when it was synced
    """

    now: float = 0
    synced: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def monotonic(self) -> float:
        return self.now

    def sync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.times[str(path)].append(self.now)
        if path.is_file():
            self.synced[str(path)] = path.read_bytes()

    def after_failure(self, folder: Path, copy: Path) -> None:
        """Make a copy of a folder as a power failure may leave it: with zeros for all that was not synced."""
        shutil.copytree(folder, copy)
        for path in filter(Path.is_file, copy.rglob("*")):
            now, sure = path.read_bytes(), self.synced.get(str(folder / path.relative_to(copy)), b"")
            kept = sure if now.startswith(sure) else b""
            path.write_bytes(kept + bytes(len(now) - len(kept)))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    for module in (owned_folder, journal, context):
        monkeypatch.setattr(module, "time", disk)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, disk.sync)
    return disk


@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize("seconds", [1, 25, 59, 61, 200])
def test_a_power_failure_costs_a_minute_or_a_layer(
    seconds: float, keep_all: bool, disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = {EMBEDDING - 1: 0.0}

    def fail_and_resume(n_failures: int) -> None:
        place = tmp_path / f"failed-{n_failures}"
        disk.after_failure(tmp_path / "out.work", place / "out.work")
        with WorkFolder(place / "out", {}, keep_all=keep_all) as again:
            assert disk.now - finished[again.done] < max(MINUTE, seconds) + seconds
            for layer in range(EMBEDDING if keep_all else again.done, again.done + 1):
                if layer >= EMBEDDING:
                    assert again.hidden_path(layer).read_text() == f"after {layer}"
            assert all(again.arrays(layer)["sums"] == layer for layer in range(again.done + 1))

    with WorkFolder(tmp_path / "out", {}, keep_all=keep_all) as folder:
        for layer in range(EMBEDDING, 150 if seconds == 1 else 12):
            disk.now += seconds
            folder.hidden_path(layer).write_text(f"after {layer}")
            if seconds > 1 or layer % 29 == 0:
                fail_and_resume(2 * layer)
            arrays = {"sums": np.array(layer)} if layer > EMBEDDING else {}
            folder.finish_layer(layer, arrays, [folder.hidden_path(layer)])
            finished[layer] = disk.now
            if seconds > 1 or layer % 29 == 0:
                fail_and_resume(2 * layer + 1)
    times = [each for path, each in disk.times.items() if path.startswith(str(tmp_path / "out.work"))]
    assert any(len(each) > 1 for each in times)
    for each in times:
        assert all(later - earlier >= MINUTE for earlier, later in pairwise(each))


def test_two_power_failures_in_a_row_leave_what_the_first_has_left(disk: Disk, tmp_path: Path) -> None:
    """A run that was killed has not synced what it leaves, and the next one relies on it."""
    with WorkFolder(tmp_path / "out", {}) as folder:
        for layer in range(EMBEDDING, 3):
            folder.hidden_path(layer).write_text(f"after {layer}")
            folder.finish_layer(layer, {"sums": np.array(layer)}, [folder.hidden_path(layer)])
    with WorkFolder(tmp_path / "out", {}) as folder:
        for layer in range(3, 6):
            folder.hidden_path(layer).write_text(f"after {layer}")
            folder.finish_layer(layer, {"sums": np.array(layer)}, [folder.hidden_path(layer)])
    disk.after_failure(tmp_path / "out.work", tmp_path / "failed" / "out.work")
    with WorkFolder(tmp_path / "failed" / "out", {}) as folder:
        assert folder.done == 2
        assert folder.hidden_path(2).read_text() == "after 2"


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [0, 4 << 30])
def test_in_a_minute_a_calibrated_run_syncs_its_marks_and_what_it_publishes(
    memory_bytes: int, disk: Disk, tmp_path: Path
) -> None:
    convert.convert(trained_model(tmp_path), tmp_path / "base.gguf", outtype="f32")
    (tmp_path / "text.txt").write_bytes(calibration_text()[-4000:])
    forward = ForwardOptions(n_threads=1, memory_bytes=memory_bytes)
    calibration = gguf_tools.Calibration(tmp_path / "text.txt", Cut(32, n_chunks=2), forward=forward)
    types = quantize.PlanOptions(overrides=parse_overrides(("attn_output=q4_0", "weight=f16")))
    options = quantize.QuantizeOptions(types=types, calibration=calibration)
    disk.times.clear()
    quantize.quantize(tmp_path / "base.gguf", tmp_path / "out", "Q4_0", options, n_threads=1)
    work = {path: len(times) for path, times in disk.times.items() if ".work" in path}
    parts = [str(tmp_path / "out.work"), *(f"{tmp_path}/out.work/{name}.work" for name in PARTS)]
    assert work == {path: 1 for part in parts for path in (part, f"{part}/run.json")}


PARTS = "forward", "backward", "draft"
