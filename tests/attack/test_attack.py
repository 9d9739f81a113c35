"""A handful of trials of each kind, and what the campaign makes of commands that misbehave."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack import campaign, children, kinds, trials
from tests.attack.children import UNDISTURBED
from tests.attack.commands import COMMANDS, Command
from tests.attack.kinds import KINDS
from tests.attack.trials import FAILED, LINE, NOT_REACHED, SAME, Bench, Result

QUICK = [one for one in COMMANDS if one.name in ("convert-parts", "merge", "set-parts")]
"""Commands that need little time."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("material"), tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("kind", ["kill", "interrupt", "fault", "limit", "twice", "changed-input"])
def test_a_few_trials(bench: Bench, kind: str) -> None:
    results = [
        trials.one_trial(bench, kind, KINDS[kind], command, number, seed=1)
        for command in QUICK
        for number in range(2)
    ]
    assert [result for result in results if result.outcome == FAILED] == []
    if children.has_strace() or kind != "fault":
        assert any(result.outcome != NOT_REACHED for result in results)


def test_a_campaign_has_trials_of_every_kind_for_every_command() -> None:
    plans = campaign.plan(1200, 0, [], 2, None)
    found = {(kind, command) for one in plans for kind, command, _ in one.numbered}
    assert found == {(kind, command.name) for kind in KINDS for command in COMMANDS}
    assert sum(len(one.numbered) for one in plans) == pytest.approx(1200, rel=0.1)
    assert {kind for one in plans for kind, _ in one.special} == campaign.SPECIAL_TRIALS.keys()


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["kill:imatrix:3"], {("kill", "imatrix", 3)}),
        (["kill:imatrix:3", "twice:set:0"], {("kill", "imatrix", 3), ("twice", "set", 0)}),
        (["worker:quantize:3"], set()),
    ],
)
def test_one_trial_can_be_repeated(only: list[str], expected: set[tuple[str, str, int]]) -> None:
    (one,) = campaign.plan(1200, 0, only, 1, None)
    assert set(one.numbered) == expected
    assert [list(numbers) for _, numbers in one.special] == ([[3]] if not expected else [])


def test_names_of_nothing_are_noticed() -> None:
    assert campaign.unknown(["kill", "set", "kill:set:1", "fault:sat", "nonsense"]) == ["fault:sat"]


# ---- commands that misbehave


def well_behaved() -> int | None:
    descriptor = os.open("o.txt.partial", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, b"done")
    os.close(descriptor)
    os.rename("o.txt.partial", "o.txt")
    return None


def refuses_what_is_there() -> int | None:
    try:
        return well_behaved()
    except OSError as error:
        print(f"misbehaving: error: {error.strerror}", file=sys.stderr)
        return 1


def has_run() -> bool:
    """Whether this is not the first run in this folder."""
    if Path("../has-run").exists():
        return True
    Path("../has-run").touch()
    return False


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def harms() -> None:
    if not has_run():
        Path("mine.txt").write_text("overwritten")
        dies()
    well_behaved()


def publishes_early() -> None:
    if not has_run():
        Path("o.txt").write_text("do")
        dies()
    well_behaved()


def leaves_something() -> None:
    if not has_run():
        Path("o.txt.1").write_text("do")
        dies()
    well_behaved()


def cannot_resume() -> int | None:
    if not has_run():
        dies()
    print("misbehaving: error: I have been here before", file=sys.stderr)
    return 1


def fails_with_a_traceback() -> None:
    if not has_run():
        dies()
    raise RuntimeError("of no use to anybody")


def gives_other_bytes() -> None:
    if not has_run():
        dies()
    Path("o.txt").write_text("something else")


def resumes() -> None:
    if not has_run():
        dies()
    well_behaved()


def writes_through_links() -> None:
    Path("o.txt.partial").write_text("done")
    Path("o.txt.partial").replace("o.txt")


def ignores_errors() -> None:
    try:
        well_behaved()
    except OSError:
        Path("o.txt.partial").rename("o.txt")


def trial_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, body: Callable[[], int | None], number: int = 0
) -> Result:
    """Disturb a command that does well undisturbed, and is `body` in the trial."""

    def pretend(main: Callable[[], int | None]) -> None:
        for module in (children, trials.material):
            monkeypatch.setattr(module, "main_of", lambda name: lambda words: main() or 0)

    pretend(well_behaved)
    command = Command("misbehaving", "misbehaving")
    reference = bench.measure(command)
    monkeypatch.setattr(Bench, "reference", lambda *_: reference)
    pretend(body)
    return trials.one_trial(bench, kind, KINDS[kind], command, number, seed=1)


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (harms, "mine.txt was "),
        (publishes_early, "o.txt was published with other bytes"),
        (leaves_something, "left behind: o.txt.1"),
        (cannot_resume, "can't be resumed: misbehaving: error: I have been here before"),
        (fails_with_a_traceback, "a traceback: "),
        (gives_other_bytes, "o.txt was published with other bytes"),
        (resumes, ""),
    ],
)
def test_kills_show_what_a_command_does_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, body: Callable[[], int | None], seen: str
) -> None:
    monkeypatch.setattr(kinds, "_some_kill", lambda trial: (UNDISTURBED, "it kills itself"))
    result = trial_of(bench, monkeypatch, "kill", body)
    assert result.outcome == (FAILED if seen else SAME), result.what
    assert seen in result.what


needs_strace = pytest.mark.skipif(not children.has_strace(), reason="strace is not there")


@needs_strace
def test_files_of_others_show_what_a_command_does_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "PATIENCE_SECONDS", 2.0)  # for those who open a pipe

    def ends(body: Callable[[], int | None]) -> set[str]:
        return {trial_of(bench, monkeypatch, "beside", body, number).outcome for number in range(5)}

    assert FAILED in ends(writes_through_links)
    assert ends(refuses_what_is_there) <= {SAME, LINE}


@needs_strace
def test_failing_calls_show_what_a_command_does_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_some_fault", lambda trial: ("write", "write:error=ENOSPC:when=1"))
    result = trial_of(bench, monkeypatch, "fault", ignores_errors)
    assert result.outcome == FAILED
    assert "o.txt was published with other bytes" in result.what
    assert "ENOSPC" in result.what
