"""`gguf-tools cook` on the trained model: whole runs, killed ones, and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import gguf_tools.commands.main
from convert import convert
from gguf_tools.commands.attestation import Attestation
from gguf_tools.files.named_files import sha256_of
from imatrix.store import load
from tests.support.hub_server import HubServer
from tests.support.published_models import write as write_published
from tests.support.trained_model import EXAMPLE, calibration_text

pytest.importorskip("torch")

ROOT = Path(__file__).parents[4]
N_KILLS = 6


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to cook in, with a text to calibrate and one to evaluate on."""
    content = calibration_text()
    (tmp_path / "cal.txt").write_bytes(content[:20_000])
    (tmp_path / "held.txt").write_bytes(content[-20_000:])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(types: str, *more: str) -> list[str]:
    return ["cook", str(EXAMPLE), "-f", "cal.txt", "-c", "64", "--chunks", "4", "--types", types, *more]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.is_file()}


def sums_agree(folder: Path) -> bool:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = contents(folder)
    del found["SHA256SUMS"], found["README.md"]  # a card is for its readers to edit
    return listed == found


def test_a_small_run_and_more_types_later(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files are those of the single commands, and a second run makes only what it asks for more."""
    assert gguf_tools.commands.main.main(words("Q8_0", "-o", "out", "-q")) == 0
    assert sorted(contents(texts / "out")) == [
        "README.md", "SHA256SUMS", "attestation.json", "tiny-deepseek-v3-Q8_0.gguf",
        "tiny-deepseek-v3.imatrix.gguf",
    ]  # fmt: skip
    assert sums_agree(texts / "out")
    made = texts / "out" / "tiny-deepseek-v3-Q8_0.gguf"
    first = made.stat()
    matrix = texts / "out" / "tiny-deepseek-v3.imatrix.gguf"
    convert(EXAMPLE, texts / "alone.gguf", outtype="Q8_0", importances=matrix)
    assert made.read_bytes() == (texts / "alone.gguf").read_bytes()
    capsys.readouterr()
    assert gguf_tools.commands.main.main(words("Q8_0,F16", "-o", "out")) == 0
    err = capsys.readouterr().err
    assert "[1/6] there already\n[2-3/6] F16\n[4/6] attestation\n" in err
    said = Attestation.read(texts / "out" / "attestation.json")
    assert not list(said.findings(made, [EXAMPLE, texts / "cal.txt", matrix]))
    assert set(said.subjects) == {made.name, "tiny-deepseek-v3-F16.gguf"}
    now = made.stat()
    assert (now.st_ino, now.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert sums_agree(texts / "out")
    assert (texts / "out" / "README.md").read_text().count("| [tiny-deepseek-v3-") == 2


def test_a_plan_writes_nothing(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in texts.rglob("*"))
    more = ("-o", "new/out", "--dry-run", "--evaluate", "held.txt")
    assert gguf_tools.commands.main.main(words("Q8_0,3.4bpw", *more)) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines[1:-1]]
    files = ["Q8_0", "3.4bpw"]
    assert names == ["importances", "losses", *files, "divergence", "attestation", "card", "checksums"]
    assert " 11.90 MiB  " in lines[3]
    assert lines[-1].startswith("8 of 8 steps are left: less than a minute with ")
    assert sorted(path.name for path in texts.rglob("*")) == before


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["-o", str(EXAMPLE)], "is the model's own folder"),
        (["-o", "cal.txt"], "is a file, expected a folder"),
        (["-o", "out", "--evaluate", "none.txt"], "none.txt: can't be read"),
        (["-o", "out", "--name", "a/b"], "expected the beginning of a file's name"),
        (["-o", "out", "--base-model", "tiny"], "expected OWNER/NAME"),
    ],
)
def test_refusals_come_first(
    more: list[str], part: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gguf_tools.commands.main.main(words("Q8_0", *more)) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), part in err) == (1, True)
    assert not (texts / "out").exists()


@pytest.mark.parametrize(
    ("content", "more", "part"),
    [
        (b"a few words", (), "tokens, expected a chunk of 64 or more"),
        (b"\xff\xfe", (), "held.txt: not UTF-8 at byte 0"),
        (b"a few words", ("-c", "2"), "a context of 2 tokens, expected 4 or more"),
    ],
)
def test_a_text_to_evaluate_on_is_looked_at_first(
    content: bytes, more: tuple[str, ...], part: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "held.txt").write_bytes(content)
    assert (
        gguf_tools.commands.main.main(words("Q8_0", "-o", "out", "-q", "--evaluate", "held.txt", *more)) != 0
    )
    assert part in capsys.readouterr().err
    assert not (texts / "out" / "tiny-deepseek-v3.imatrix.gguf").exists()


def test_a_model_for_embeddings_has_no_divergence(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_published("qwen3-embedding", texts / "model")
    asked = ["cook", str(base), "-f", "cal.txt", "-c", "64", "--chunks", "4", "--types", "Q8_0", "-o", "out"]
    assert gguf_tools.commands.main.main([*asked, "--evaluate", "held.txt"]) == 1
    assert "model: is for embeddings, and --evaluate tells the divergence" in capsys.readouterr().err
    assert not list((texts / "out").glob("*.gguf"))
    assert gguf_tools.commands.main.main([*asked, "-q"]) == 0


def test_a_folder_of_texts_serves_the_whole_run(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = calibration_text()
    (texts / "mix").mkdir()
    for name, start in (("a", 0), ("b", 9000)):
        (texts / "mix" / f"{name}.txt").write_bytes(content[start : start + 3000])
    cook = [word if word != "cal.txt" else "mix" for word in words("F16", "-o", "out", "-q")]
    assert gguf_tools.commands.main.main(cook) == 0
    assert load(texts / "out" / "tiny-deepseek-v3.imatrix.gguf").chunk_count == 4
    capsys.readouterr()
    (texts / "mix" / "b.txt").write_bytes(content[20_000:23_000])
    assert gguf_tools.commands.main.main(cook) == 1
    assert "was begun with another text: " in capsys.readouterr().err
    assert gguf_tools.commands.main.main([*cook[:-3], "-o", "new", "-q", "--evaluate", "mix"]) == 1
    assert "mix: can't be read" in capsys.readouterr().err


def test_another_text_is_refused(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q")) == 0
    before = contents(texts / "out")
    (texts / "cal.txt").write_bytes(calibration_text()[30_000:50_000])
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q")) == 1
    assert "imatrix.gguf: was begun with another text: " in (err := capsys.readouterr().err)
    assert f"{texts / 'cal.txt'} has changed since; name another folder" in err
    assert contents(texts / "out") == before


def test_another_model_is_refused_in_words(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q", "--name", "lite")) == 0
    before = contents(texts / "out")
    other = EXAMPLE.with_name("small-llama")
    again = ["cook", str(other), *words("Q8_0", "-o", "out", "-q", "--calibrate")[2:]]
    assert gguf_tools.commands.main.main(again) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f" out: holds what was made of {EXAMPLE}, and this run is for {other}; name another" in line
    assert contents(texts / "out") == before


def test_ctrl_c_says_what_is_kept(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gguf_tools.commands.cook.steps.write_card", stop)
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q")) == 130
    said = capsys.readouterr().err
    assert said.endswith("interrupted; 3 of 5 steps are done and kept: the same command resumes from there\n")


def test_only_force_replaces_files_of_others(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts / "out").mkdir()
    matrix = texts / "out" / "tiny-deepseek-v3.imatrix.gguf"
    others = [texts / "out" / name for name in ("README.md", "SHA256SUMS", "tiny-deepseek-v3-F16.gguf")]
    for stranger in (*others, matrix):
        stranger.write_text("mine")
        assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q")) == 1
        err = capsys.readouterr().err
        assert (err.count("\n"), f"{stranger.relative_to(texts)}: " in err) == (1, True)
        assert ("--name" if stranger == matrix else "--force") in err
        assert list(contents(texts / "out")) == [stranger.name]
        assert stranger.read_text() == "mine"
        stranger.unlink()
    matrix.write_text("mine")
    for replacing in ("--force", "--restart"):
        assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q", replacing)) == 1
        assert matrix.read_text() == "mine", "days of work, perhaps, and nobody named it"
    matrix.unlink()
    for stranger in others:
        stranger.write_text("mine")
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q", "--restart")) == 1
    assert b"mine" in others[-1].read_bytes()
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q", "--force")) == 0
    assert sums_agree(texts / "out")
    assert b"mine" not in [stranger.read_bytes() for stranger in others]


def test_a_disk_that_is_too_small(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1 << 20))
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q")) == 1
    assert "1 file of 22." in capsys.readouterr().err


def test_starting_over_removes_nothing_of_others(texts: Path) -> None:
    """What lies in `.cook`, or behind a link there, is somebody else's unless it carries our mark."""
    others = texts / "others"
    (others / "base.work").mkdir(parents=True)
    (others / "base.work" / "mine.txt").write_text("mine")
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q")) == 0
    (texts / "out" / ".cook" / "evaluation").symlink_to(others)
    (texts / "out" / ".cook" / "notes").mkdir()
    assert gguf_tools.commands.main.main(words("F16", "-o", "out", "-q", "--restart")) == 0
    assert (others / "base.work" / "mine.txt").read_text() == "mine"
    assert (texts / "out" / ".cook" / "notes").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--calibrate",)], ids=["stock", "calibrated"])
def test_killed_at_random_moments(more: tuple[str, ...], texts: Path) -> None:
    """Runs that are killed and called again, and one that is not, leave the same files."""
    measured = ("--evaluate", "held.txt", "--evaluate-chunks", "4")
    line = words("Q2_K,IQ3_XXS,3.6bpw", "-o", "out", *measured, *more)
    times = {}
    for name in ("whole", "killed"):
        place = texts / name
        place.mkdir()
        for text in ("cal.txt", "held.txt"):
            (place / text).write_bytes((texts / text).read_bytes())
        random.seed(20)
        for _ in range(N_KILLS if name == "killed" else 0):
            run = start(line, place)
            with suppress(subprocess.TimeoutExpired):
                run.wait(random.uniform(3, 3 + times["whole"] / 3))
            run.send_signal(signal.SIGKILL)
            run.wait()
        began = time.monotonic()
        run = start(line, place)
        assert run.wait() == 0
        times[name] = time.monotonic() - began
    whole, killed = contents(texts / "whole" / "out"), contents(texts / "killed" / "out")
    assert killed == whole
    assert sums_agree(texts / "killed" / "out")
    assert sorted(path.name for path in (texts / "killed" / "out" / ".cook").iterdir()) == [
        "lock", "record.json",
    ]  # fmt: skip
    report = json.loads((texts / "killed" / "out" / "tiny-deepseek-v3.evaluation.json").read_text())
    assert len(report["models"]) == 3


def start(line: list[str], place: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gguf_tools", *line, "-q"]
    return subprocess.Popen(command, cwd=place, env=environment)


def test_a_plan_of_a_model_on_the_hub_fetches_no_weights(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubServer({"owner/tiny-deepseek-v3": EXAMPLE}) as hub, hub.client(texts / "cache"):
        line = ["owner/tiny-deepseek-v3", *words("Q8_0", "-o", "out", "--dry-run")[2:]]
        assert gguf_tools.commands.main.main(["cook", *line]) == 0
    assert "tiny-deepseek-v3-Q8_0.gguf" in capsys.readouterr().out
    assert 0 < sum("model.safetensors" in request for request in hub.asked("GET /cdn/")) < 5
