"""The bar: bytes or steps, on terminals only."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gguf_tools import progress
from gguf_tools.progress import Bar, Unit

LAYERS = Unit("layer", pattern="{n:.1f}/{total_fmt}{postfix}")


def test_steps_go_on_where_an_earlier_run_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("layers", LAYERS) as bar:
        advance = bar.start(8, done=3)
        advance(0.5)
        bar.remark(" perplexity 7.5")
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    assert last.startswith("3.5/8")
    assert "perplexity 7.5" in last


def test_any_thread_may_advance(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("copying") as bar, ThreadPoolExecutor(8) as threads:
        list(threads.map(bar.start(2000), [2] * 1000))
    assert "copying: 100%" in capsys.readouterr().err


def test_a_log_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("layers", LAYERS) as bar:
        bar.start(8)(1)
        bar.remark("quiet")
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Bar("layers", LAYERS) as bar:
        advance = bar.start(61, done=1)
        for _ in range(60):
            clock[0] += 25
            advance(1)
            bar.remark(" perplexity 7.5")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20  # every 75 seconds of 1500
    assert lines[0] == "layers: 7 %, 1:15 gone, 23:45 left perplexity 7.5"
    assert lines[-1] == "layers: 100 %, 25:00 gone, 0:00 left perplexity 7.5"


def test_a_quiet_bar_says_nothing_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda it=is_terminal: it)
        with Bar("layers", LAYERS, quiet=True) as bar:
            bar.start(8)(1)
            bar.remark("quiet")
    assert capsys.readouterr().err == ""


def test_sums_of_fractions_never_exceed_the_total(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("layers", LAYERS) as bar:
        advance = bar.start(1)
        for _ in range(12):
            advance(0.1)
    assert capsys.readouterr().err.rstrip().rpartition("\r")[2].startswith("1.0/1")
    assert not recwarn.list


def test_a_bar_that_never_starts_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("copying") as bar:
        bar.advance(1)
    assert capsys.readouterr().err == ""
