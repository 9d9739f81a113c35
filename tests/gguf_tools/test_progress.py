"""Progress: bytes or work, on terminals, in logs, told to functions, and shown by bars of others."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tqdm import tqdm

import gguf_tools
from gguf_tools import progress
from gguf_tools.errors import BadArgument, Cancelled
from gguf_tools.progress import WORK, Bar, ProgressState, Shown, Unit, part_of, reporting

STEPS = Unit("step", pattern="{n:.1f}/{total_fmt}{postfix}")
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that is printed taken for a terminal's."""
    monkeypatch.setattr(progress, "has_terminal", lambda: True)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.rstrip().rpartition("\r")[2]


@pytest.mark.usefixtures("terminal")
def test_steps_go_on_where_an_earlier_run_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("layers", STEPS)
    advance = bar.start(8, done=3)
    advance(0.5)
    bar.remark("perplexity 7.5")
    bar.close()
    last = last_line(capsys)
    assert last.startswith("3.5/8")
    assert "perplexity 7.5" in last


@pytest.mark.usefixtures("terminal")
def test_any_thread_may_advance(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("copying") as bar, ThreadPoolExecutor(8) as threads:
        list(threads.map(bar.start(2000), [2] * 1000))
    assert "copying: 100%" in capsys.readouterr().err


def test_a_log_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("layers", STEPS) as bar:
        bar.start(8)(1)
        bar.remark("quiet")
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Bar("layers", STEPS) as bar:
        advance = bar.start(61, done=1)
        for _ in range(60):
            clock[0] += 25
            advance(1)
            bar.remark("perplexity 7.5")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20  # every 75 seconds of 1500
    assert lines[0] == "layers: 7 %, 1:15 elapsed, 23:45 left (perplexity 7.5)"
    assert lines[-1] == "layers: 100 %, 25:00 elapsed, 0:00 left (perplexity 7.5)"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_shown_that_nobody_asked_for(
    show: Shown, is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with Bar("layers", STEPS, show) as bar:
        bar.start(8)(1)
        bar.remark("quiet")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("terminal")
def test_sums_of_fractions_never_exceed_the_total(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    with Bar("layers", STEPS) as bar:
        advance = bar.start(1)
        for _ in range(12):
            advance(0.1)
    assert last_line(capsys).startswith("1.0/1")
    assert not recwarn.list


@pytest.mark.usefixtures("terminal")
def test_a_bar_that_never_starts_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("copying") as bar:
        bar.advance(1)
    assert capsys.readouterr().err == ""


def test_a_token_ends_work_between_pieces_and_shows_what_it_was_made_with() -> None:
    states: list[progress.ProgressState] = []
    token = progress.CancelToken(states.append)
    bar = Bar("layers", STEPS, token)
    bar.start(3)(1)
    token.cancel()
    with pytest.raises(Cancelled):
        bar.advance(1)
    assert [state.done for state in states] == [0, 1]
    with Bar("layers", STEPS, progress.CancelToken()) as bar:  # it shows nothing, and nobody cancels it
        bar.start(3)(1)


@pytest.mark.usefixtures("terminal")
def test_bars_end_full_unless_something_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("work", WORK) as bar:
        bar.start(3)(1)
    assert "work: 100%" in last_line(capsys)

    def fail() -> None:
        with Bar("work", WORK) as bar:
            bar.start(3)(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "work:  33%" in last_line(capsys)


@pytest.mark.parametrize("columns", [40, 50, 79, 100])
@pytest.mark.usefixtures("terminal")
def test_the_time_left_stays_on_narrow_terminals(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = os.terminal_size((columns, 40))
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda fallback=None: size)
    monkeypatch.setenv("COLUMNS", str(columns))
    with Bar("quantizing to Q4_K_M, Q5_K_M, IQ3_XXS, Q2_K and a few more", WORK) as bar:
        advance = bar.start(100)
        bar.remark("layer 3 of 12")
        advance(50)
    shown = [line for line in capsys.readouterr().err.split("\r") if line.strip()]
    assert columns > 80 or all(len(line.rstrip("\n")) <= columns for line in shown)
    assert all("<" in line for line in shown), "elapsed<left"
    assert ("layer 3 of 12" in shown[-1]) is (columns >= 80)


def half_of(show: Shown, unit: Unit = STEPS) -> None:
    bar = Bar("making", unit, show)
    advance = bar.start(10, done=2)
    advance(1)
    bar.remark("slowly")
    advance(2)
    bar.close()


def test_a_function_is_told() -> None:
    states: list[ProgressState] = []
    half_of(states.append)
    assert states[0] == ProgressState("making", 2, 10, "step")
    assert [state.done for state in states] == [2, 3, 3, 5]
    assert states[-1] == ProgressState("making", 5, 10, "step", "slowly")
    assert states[-1].share == 0.5


def test_a_bar_of_tqdm_is_moved() -> None:
    with tqdm(file=io.StringIO()) as bar:
        half_of(bar)
        assert (bar.n, bar.total, bar.desc) == (5, 10, "making: ")
        half_of(bar)
        assert (bar.n, bar.total) == (5, 10), "another piece of work begins anew"


def test_a_class_of_tqdm_makes_bars() -> None:
    made: list[tqdm] = []

    class Ours(tqdm):
        def __init__(self, **options: object) -> None:
            super().__init__(**options, file=io.StringIO())
            made.append(self)

    half_of(Ours)
    assert [(bar.n, bar.total) for bar in made] == [(5, 10)]


def test_bars_of_rich_get_a_task() -> None:
    rich = pytest.importorskip("rich.progress")
    bars = rich.Progress()
    half_of(bars)
    (task,) = bars.tasks
    assert (task.completed, task.total, task.description) == (5, 10, "making slowly")


def test_what_cannot_show_is_refused() -> None:
    with pytest.raises(BadArgument, match="progress=3: expected True, a function, or a bar of tqdm or rich"):
        half_of(3)  # type: ignore[arg-type]


def test_parts_move_one_bar() -> None:
    states: list[ProgressState] = []
    with Bar("all", WORK, states.append) as bar:
        bar.start(10)
        with part_of(bar, 4) as show, Bar("first", show=show) as first:
            first.start(100)(50)
        with part_of(bar, 6) as show:
            half_of(show)
    assert states[1].done == 0
    assert 2.0 in [state.done for state in states]
    assert 7.0 in [state.done for state in states], "4, and half of 6"
    assert states[-1].share == 1
    assert [state.done for state in states] == sorted(state.done for state in states)


def test_a_progress_is_told_itself() -> None:
    with reporting(progress.NO_REPORT, "layers") as told:
        assert told is progress.NO_REPORT


def prepared(folder: Path) -> Path:
    return gguf_tools.convert(EXAMPLE, folder / "in.gguf", outtype="bf16").paths[0]


def merged(folder: Path, show: Shown) -> None:
    parts = gguf_tools.split(prepared(folder), folder / "part", max_tensors=20)
    gguf_tools.merge(parts[0], folder / "out.gguf", progress=show)


def named(folder: Path, show: Shown) -> None:
    edit = gguf_tools.edit
    changes = [edit.parse_assignment("general.name=Lite")]
    edit.edit_model(
        prepared(folder), lambda metadata, names: edit.set_values(metadata, changes),
        output=folder / "out.gguf", progress=show,
    )  # fmt: skip


LONG: dict[str, Callable[[Path, Shown], object]] = {
    "split": lambda folder, show: gguf_tools.split(prepared(folder), folder / "part", progress=show),
    "merge": merged,
    "edit": named,
    "audit": lambda folder, show: gguf_tools.audit(prepared(folder), EXAMPLE, progress=show),
    "convert": lambda folder, show: gguf_tools.convert(
        EXAMPLE, folder / "out.gguf", outtype="bf16", progress=show
    ),
    "quantize": lambda folder, show: gguf_tools.quantize(EXAMPLE, folder / "out.gguf", "Q8_0", progress=show),
}


@pytest.mark.parametrize("name", LONG)
def test_functions_tell_how_far_they_are(name: str, tmp_path: Path) -> None:
    states: list[ProgressState] = []
    LONG[name](tmp_path, states.append)
    assert states[0].done == 0
    assert states[-1].share == 1
    assert {state.unit for state in states} == {"B"}


def computing(folder: Path, text: Path) -> dict[str, Callable[[Shown], object]]:
    model, cut = EXAMPLE, {"chunk_size": 64, "n_chunks": 2}
    return {
        "imatrix": lambda show: gguf_tools.imatrix.collect(model, text, progress=show, **cut),
        "sensitivity": lambda show: gguf_tools.sensitivity(
            model, text, folder / "losses.json", progress=show, types=("Q4_0",), rows=8, **cut
        ),
        "evaluate": lambda show: gguf_tools.evaluate(model, text, [model], progress=show, **cut),
        "calibrate": lambda show: gguf_tools.calibrate(
            model, folder / "out.gguf", "Q4_0", text, gguf_tools.RunOptions(progress=show),
            method="one-sided", embedding=False, **cut,
        ),
        "cook": lambda show: gguf_tools.cook(
            model, text, "Q8_0,F16", folder / "cooked", progress=show, cut=gguf_tools.Cut(64, n_chunks=2)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["imatrix", "sensitivity", "evaluate", "calibrate", "cook"])
def test_functions_that_compute_have_one_bar_that_ends_full(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    states: list[ProgressState] = []
    computing(tmp_path, EXAMPLE / "calibration.txt")[name](states.append)
    assert len({(state.label, state.total) for state in states}) == 1
    assert {state.unit for state in states} == {"work"}
    shares = [state.share for state in states]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == pytest.approx(1)
    assert len([share for share in shares if 0.1 < share < 0.9]) > 3, "it moves on the way"
