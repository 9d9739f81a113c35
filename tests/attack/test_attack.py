"""A handful of trials of each kind, and what the campaign makes of commands that misbehave."""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack import campaign, children, kinds, material, odd_numbers, places, secrets, strangers, trials
from tests.attack.children import UNDISTURBED
from tests.attack.commands import COMMANDS, ELSEWHERE, READERS, Command
from tests.attack.kinds import KINDS
from tests.attack.specials import SPECIALS
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
    assert found == {(kind, command.name) for kind in KINDS for command in COMMANDS} | {
        (kind, command.name) for kind in campaign.OF_READERS for command in READERS
    }
    assert sum(len(one.numbered) for one in plans) == pytest.approx(1200, rel=0.1)
    assert (
        {kind for one in plans for kind, _ in one.special}
        == campaign.SPECIAL_TRIALS.keys()
        == SPECIALS.keys()
    )
    numbers = [
        number for one in plans for kind, wanted in one.special if kind == "hostile" for number in wanted
    ]
    assert sorted(numbers) == list(range(360))


def test_every_command_is_in_the_campaign() -> None:
    """One that is new has a line among COMMANDS if it writes, among READERS if it does not."""
    attacked = {odd_numbers.program_of(command) for command in COMMANDS}
    assert odd_numbers.registry().keys() - attacked - ELSEWHERE.keys() == {
        "gguf-tools checkpoint", "gguf-tools completion", "gguf-tools diff", "gguf-tools hash",
        "gguf-tools rederive", "gguf-tools scan", "gguf-tools show", "gguf-tools verify", "imatrix check",
        "imatrix show", "imatrix stats", "quantize lint",
    }  # fmt: skip
    attacked |= {odd_numbers.program_of(command) for command in READERS}
    assert odd_numbers.registry().keys() <= attacked
    assert set(ELSEWHERE.values()) <= KINDS.keys() | SPECIALS.keys()


WRITES = re.compile(r"--(output|outfile|json|html|keep|work|plot|curve|card|save-.*|kl-divergence-base)")
"""Options whose value names what is written; a flag --json prints."""

NEED_MORE = {"imatrix stats --plot", "quantize --curve"}
"""Those that need matplotlib."""


def test_every_option_that_writes_is_in_the_campaign() -> None:
    typed = {
        f"{odd_numbers.program_of(command)} {word}"
        for command in COMMANDS
        for word in command.words
        if word[0] == "-"
    }
    missing = {
        f"{name} {action.option_strings[-1]}"
        for name, parser in odd_numbers.registry().items()
        for action in parser._actions
        if any(WRITES.fullmatch(option) for option in action.option_strings)
        and (action.nargs != 0 or "--card" in action.option_strings)
        and action.help != argparse.SUPPRESS
        and not typed & {f"{name} {option}" for option in action.option_strings}
    }
    assert missing == NEED_MORE


def test_every_option_that_takes_a_number_gets_odd_ones() -> None:
    options = {option for _, option in odd_numbers.numeric_options()}
    assert {
        "--ctx-size",
        "--rate",
        "--minutes",
        "--size",
        "--memory",
        "--timeout",
        "--seed",
        "--threads",
    } <= options


@pytest.mark.parametrize("reader", strangers.READERS, ids=lambda reader: reader.name)
def test_what_is_hostile_depends_on_the_seed_alone(
    reader: strangers.Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("a", "b"):
        for file, text in GOOD.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        told = [reader.plant(tmp_path / name, random.Random(f"3 {seed}")) for seed in range(4)][-1:]
        made.append((told, places.tree(tmp_path / name)))
    assert made[0] == made[1]
    (what, _), tree = made[0][0][0], made[0][1]
    assert what
    for file, text in GOOD.items():
        (tmp_path / "good" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "good" / file).write_text(text)
    assert tree != places.tree(tmp_path / "good")


GOOD = {
    "suite/suite.yaml": material.SUITE,
    "suite/plain.jinja": material.TEMPLATE,
    "suite/chats.jsonl": material.CHATS,
    "texts/suite.yaml": material.SUITE,
    "texts/plain.jinja": material.TEMPLATE,
    "texts/chats.jsonl": material.CHATS,
    "recipe.yaml": material.RECIPE,
    "text.txt": "a text",
    **dict.fromkeys(
        (
            "losses.json",
            "report.json",
            "model/config.json",
            "model/tokenizer.json",
            "model/tokenizer_config.json",
        ),
        '{"a": [1, {"b": 2}]}',
    ),
}
"""What hostile files are made of."""


@pytest.mark.parametrize(
    ("got", "seen"),
    [
        ({"lite.gguf": b"{}"}, ""),
        ({".env": b"{}"}, "leaked .env"),
        ({"a/.git/config": b"{}"}, "leaked a/.git/config"),
        ({"server.pem": b"{}"}, "leaked server.pem"),
        ({"notes.txt": secrets._WORD}, "leaked notes.txt"),
        ({"asked.txt": secrets._WORD}, ""),
        ({".gitattributes": b"{}"}, ""),
    ],
)
def test_what_a_hub_should_not_have_got_is_seen(tmp_path: Path, got: dict[str, bytes], seen: str) -> None:
    paths = {name: tmp_path / str(number) for number, name in enumerate(got)}
    for name, data in got.items():
        paths[name].write_bytes(data)
    assert secrets._wrong(paths, {"asked.txt"}, asks_for_dotted=True) == seen


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


def prints_without_looking() -> None:
    sys.stdout.write("done\n")
    sys.stdout.flush()
    well_behaved()


def prints_escapes() -> None:
    print("wrote \x1b[31mo.txt")
    well_behaved()


MainOf = Callable[[str], Callable[[list[str]], int]]


def trial_of(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    body: Callable[[], int | None] = well_behaved,
    number: int = 0,
    main_of: MainOf | None = None,
) -> Result:
    """Disturb a command that does well undisturbed, and is `body` in the trial, or what `main_of` returns."""

    def pretend(main_of: MainOf) -> None:
        for module in (children, trials.material):
            monkeypatch.setattr(module, "main_of", main_of)

    pretend(lambda _: lambda _: well_behaved() or 0)
    command = Command("misbehaving", "misbehaving")
    reference = bench.measure(command)
    monkeypatch.setattr(Bench, "reference", lambda *_: reference)
    pretend(main_of or (lambda _: lambda _: body() or 0))
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


def test_streams_show_what_a_command_does_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(body: Callable[[], int | None]) -> set[str]:
        return {trial_of(bench, monkeypatch, "streams", body, number).outcome for number in range(3)}

    assert FAILED in ends(prints_without_looking)
    assert ends(well_behaved) == {SAME}


def test_names_that_steer_a_terminal_are_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stdout has '\\x1b' in" in trial_of(bench, monkeypatch, "names", prints_escapes).what
    assert trial_of(bench, monkeypatch, "names", well_behaved).outcome == SAME


def removes_partials() -> None:
    for path in Path().glob("*.partial"):
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(("cleans", "seen"), [(removes_partials, "clean removed "), (lambda: None, "")])
def test_clean_beside_a_run_shows_what_it_removes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cleans: Callable[[], None], seen: str
) -> None:
    def main_of(name: str) -> Callable[[list[str]], int]:
        return lambda _: (cleans if name == "gguf-tools" else well_behaved)() or 0

    result = trial_of(bench, monkeypatch, "cleaned", main_of=main_of)
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
