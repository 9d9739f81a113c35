"""Hidden states are saved by time, and a run goes on after any layer that was saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("torch")

from imatrix.calibrate.run import context
from imatrix.calibrate.run.context import StateSaver
from imatrix.forward.work_folder import EMBEDDING, WorkFolder


@dataclass
class _Stream:
    """Writes the layer's number where its states go."""

    folder: WorkFolder
    is_in_memory: bool

    def save(self, layer: int) -> Path:
        path = self.folder.hidden_path(layer)
        path.write_text(str(layer))
        return path


@dataclass
class _Model:
    stream: _Stream


@dataclass
class _Clock:
    now: float = 0
    saved: list[int] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now


def run(output: Path, clock: _Clock, layers: range, seconds: float, *, in_memory: bool = True) -> None:
    """Run layers that take so many seconds each, and note which were saved."""
    with WorkFolder(output, {}, may_skip=True) as folder:
        if folder.done < EMBEDDING:
            folder.finish_layer(EMBEDDING, {}, [_Stream(folder, True).save(EMBEDDING)])
        saver = StateSaver(folder, [_Model(_Stream(folder, in_memory))])  # type: ignore[list-item]
        for layer in layers:
            clock.now += seconds
            saver.after(layer)
            if folder.done == layer:
                clock.saved.append(layer)


@pytest.mark.parametrize(
    ("seconds", "in_memory", "expected"),
    [
        (25, True, [2, 5, 8, 11]),
        (14, True, [4, 9]),
        (59, True, [1, 3, 5, 7, 9, 11]),
        (100, True, list(range(12))),
        (1, True, []),
        (1, False, list(range(12))),
    ],
)
def test_states_are_saved_once_a_minute_and_files_always(
    seconds: float, in_memory: bool, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(context, "time", clock)
    run(tmp_path / "out", clock, range(12), seconds, in_memory=in_memory)
    assert clock.saved == expected
    last = expected[-1] if expected else EMBEDDING
    with WorkFolder(tmp_path / "out", {}, may_skip=True) as folder:
        assert folder.done == last
        assert folder.hidden_path(last).read_text() == str(last)


def test_where_the_latest_states_are_damaged_those_before_them_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = _Clock()
    monkeypatch.setattr(context, "time", clock)
    run(tmp_path / "out", clock, range(7), 25)
    assert clock.saved == [2, 5]
    (tmp_path / "out.work" / "hidden.1").write_text("torn")
    run(tmp_path / "out", clock, range(3, 6), 100)
    assert "computing layers after 2 again" in caplog.text
    assert clock.saved == [2, 5, 3, 4, 5]


def test_a_run_that_needs_every_layer_goes_on_after_the_last_without_a_gap(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", {}) as folder:
        for layer in (EMBEDDING, 0, 1, 3):
            folder.finish_layer(layer, {})
    with WorkFolder(tmp_path / "out", {}) as folder:
        assert folder.done == 1
