"""The bar: bytes or steps, on terminals only."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

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


def test_any_thread_may_advance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("copying") as bar, ThreadPoolExecutor(8) as threads:
        list(threads.map(bar.start(2000), [2] * 1000))
    assert "copying: 100%" in capsys.readouterr().err


def test_a_log_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("layers", LAYERS) as bar:
        bar.start(8)(1)
        bar.remark("quiet")
    assert capsys.readouterr().err == ""


def test_a_bar_that_never_starts_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("copying") as bar:
        bar.advance(1)
    assert capsys.readouterr().err == ""
