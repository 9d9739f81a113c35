"""Commands that are killed, interrupted or fail, and the same commands again: no work is lost, nothing
half-done is left, and the bytes are those of an undisturbed run.

tests/quantize/fill/test_outputs.py does the same with kills before every call of the system.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.quantize
import gguf_tools.files.partial_file
import quantize.fill.filling
from tests.end_to_end.conftest import GOLDEN
from tests.support.killing import WatchedOutputs, in_child, without_syncs  # noqa: F401

ROOT = Path(__file__).parents[2]
MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
N_CHUNKS = 160

COMMANDS = {
    "quantize": "quantize --imatrix MATRIX IN OUT IQ2_XXS THREADS",
    "keep split": "quantize --imatrix MATRIX --keep-split SPLIT OUT Q2_K THREADS",
    "one pass": "convert FOLDER --outfile OUT --outtype Q4_K_M --imatrix MATRIX --threads THREADS --force",
    "parts": "convert FOLDER --outfile OUT --outtype q8_0 --split-max-tensors 15 --threads THREADS --force",
}


@dataclass(frozen=True)
class Made:
    """The trained model as a user has it.

    folder  with the model's folder and GGUF files of it
    wanted  what an undisturbed run of each command writes: name -> bytes
    """

    folder: Path
    wanted: dict[str, dict[str, bytes]]

    def words(self, command: str, out: Path, n_threads: int) -> list[str]:
        """Return the command line of one of COMMANDS, or of another written like them."""
        places = {
            "IN": self.folder / "in.gguf",
            "SPLIT": self.folder / "split-00001-of-00003.gguf",
            "FOLDER": self.folder / "model",
            "MATRIX": MATRIX,
            "OUT": out / "out.gguf",
            "THREADS": n_threads,
        }
        return [str(places.get(word, word)) for word in COMMANDS.get(command, command).split()]

    def run(self, command: str, out: Path, n_threads: int = 1) -> int:
        """Run a command in this process; returns its exit code."""
        name, *words = self.words(command, out, n_threads)
        return (
            gguf_tools.commands.quantize.main if name == "quantize" else gguf_tools.commands.convert.main
        )(words)


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_folder, folder / "model")
    convert.convert(folder / "model", folder / "in.gguf", outtype="bf16")
    convert.convert(folder / "model", folder / "split.gguf", outtype="bf16", split_max_tensors=20)
    wanted: dict[str, dict[str, bytes]] = {}
    undisturbed = Made(folder, wanted)
    for command in COMMANDS:
        out = tmp_path_factory.mktemp("wanted")
        assert undisturbed.run(command, out) == 0
        wanted[command] = {path.name: path.read_bytes() for path in out.iterdir()}
    return undisturbed


@pytest.fixture
def own(made: Made, tmp_path: Path) -> Made:
    """The same with inputs for a test to damage."""
    return Made(shutil.copytree(made.folder, tmp_path / "own"), made.wanted)


def outputs(made: Made, command: str, folder: Path) -> WatchedOutputs:
    return WatchedOutputs(folder, made.wanted[command])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command said on standard error, after checking that it is one line and no traceback."""
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    return said


@contextlib.contextmanager
def at_chunk(n: int, happening: Callable[[], object]) -> Iterator[None]:
    """Let something happen in the middle of chunk number `n` that this process encodes, counted from 0."""
    encode = quantize.fill.filling.encode_strips
    count = iter(range(10**9))

    def encode_strips(*args: object) -> Iterator[object]:
        if next(count) == n:
            happening()
        yield from encode(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize.fill.filling, "encode_strips", encode_strips)
        yield


def n_done_of(said: str) -> int:
    """Return how many chunks a message says are kept."""
    words = said.split(f" of {N_CHUNKS} chunks are done and kept")
    assert len(words) == 2, said
    return int(words[0].split()[-1])


# ---- killed at a random moment


def kill_at_random(made: Made, tmp_path: Path, n_kills: int, seed: int) -> dict[str, int]:
    """Kill runs of every command until there have been so many kills; return what happened."""
    rng = random.Random(seed)
    counter = tmp_path / "counter"  # a byte for each chunk that any process has begun to encode
    happened = {"kills": 0, "runs": 0, "trials": 0, "encoded": 0, "again": 0}
    seconds = dict.fromkeys(COMMANDS, 0.5)
    while happened["kills"] < n_kills:
        command = list(COMMANDS)[happened["trials"] % len(COMMANDS)]
        happened["trials"] += 1
        trial = outputs(made, command, tmp_path / "trial")
        counter.write_bytes(b"")
        n_begun = 0  # chunks that may have been in the hands of a thread when it was killed
        for session in range(6):
            n_threads = rng.choice((1, 2))

            def work(command: str = command, folder: Path = trial.folder, n_threads: int = n_threads) -> None:
                with counted(counter), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    assert made.run(command, folder, n_threads) == 0

            started = time.monotonic()
            with trial.watched():
                kill_after = rng.uniform(0, seconds[command]) if session < 5 else None
                code = in_child(work, kill_after=kill_after)
            happened["runs"] += 1
            if code == 0:
                seconds[command] = max(0.05, min(seconds[command], 1.2 * (time.monotonic() - started)))
                break
            assert code == -signal.SIGKILL
            happened["kills"] += 1
            n_begun += n_threads
            if trial.is_complete():
                break
        trial.check_all_are_there()
        n_encoded = counter.stat().st_size
        assert n_encoded <= N_CHUNKS + n_begun, f"{n_encoded} chunks were encoded"
        happened["encoded"] += n_encoded
        happened["again"] += n_encoded - N_CHUNKS
        shutil.rmtree(trial.folder)
    return happened


@contextlib.contextmanager
def counted(counter: Path) -> Iterator[None]:
    """Append a byte to a file for each chunk that is encoded in this block."""
    fd = os.open(counter, os.O_WRONLY | os.O_APPEND)
    encode = quantize.fill.filling.encode_strips

    def encode_strips(*args: object) -> Iterator[object]:
        os.write(fd, b"x")
        yield from encode(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize.fill.filling, "encode_strips", encode_strips)
        yield
    os.close(fd)


@pytest.mark.slow
def test_killed_at_random_moments(made: Made, tmp_path: Path) -> None:
    happened = kill_at_random(made, tmp_path, 20, seed=0)
    assert happened["kills"] >= 20


@pytest.mark.slow
def test_killed_at_many_random_moments(made: Made, tmp_path: Path) -> None:
    print(json.dumps(kill_at_random(made, tmp_path, 500, seed=1)))


# ---- interrupted, terminated


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Take ctrl-C as a terminal has it: a shell starts what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(
    made: Made, command: str, folder: Path, chunk: int, signal_name: str
) -> subprocess.CompletedProcess[str]:
    """Run a real command that gets a signal in the middle of a chunk."""
    code = f"""
import os, signal, sys, quantize.fill.filling
encode, count = quantize.fill.filling.encode_strips, iter(range(10**9))
def encode_strips(*args):
    if next(count) == {chunk}:
        os.kill(os.getpid(), signal.{signal_name})
    yield from encode(*args)
quantize.fill.filling.encode_strips = encode_strips
import gguf_tools.commands.{"quantize" if "quantize" in COMMANDS[command] else "convert"} as cli
sys.exit(cli.main(sys.argv[1:]))
"""
    words = made.words(command, folder, 2)[1:]
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", ["quantize", "parts"])
def test_ctrl_c(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    trial = outputs(made, command, tmp_path / "trial")
    with trial.watched():
        done = start(made, command, trial.folder, 60, "SIGINT")
    assert done.returncode == 130
    assert done.stderr.count("\n") == 1
    name = "quantize" if command == "quantize" else "convert-hf-to-gguf"
    assert done.stderr.startswith(f"{name}: interrupted; ")
    assert done.stderr.endswith(
        f" of {N_CHUNKS} chunks are done and kept: the same command resumes from there\n"
    )
    n_done = n_done_of(done.stderr)
    assert n_done >= 59
    with trial.watched():
        assert made.run(command, trial.folder) == 0
    said = capsys.readouterr().out
    assert f"resumed an interrupted run: {n_done} of {N_CHUNKS} chunks were done\n" in said
    trial.check_all_are_there()


def test_a_batch_system_s_sigterm_is_like_a_kill(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = outputs(made, "one pass", tmp_path / "trial")
    with trial.watched():
        done = start(made, "one pass", trial.folder, 100, "SIGTERM")
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    with trial.watched():
        assert made.run("one pass", trial.folder) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed")]
    assert int(line.split()[4]) >= 99
    trial.check_all_are_there()


# ---- failures


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_chunk_that_fails(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, n_threads: int
) -> None:
    trial = outputs(made, command, tmp_path / "trial")

    def fail() -> None:
        raise MemoryError("no more of it")

    with at_chunk(90, fail), trial.watched():
        assert made.run(command, trial.folder, n_threads) == 1
    said = one_line(capsys)
    assert " rows " in said
    assert ": MemoryError: no more of it; " in said
    n_done = n_done_of(said)
    assert n_done == 90 if n_threads == 1 else n_done >= 89
    with trial.watched():
        assert made.run(command, trial.folder, 3 - n_threads) == 0
    assert f"resumed an interrupted run: {n_done} of {N_CHUNKS}" in capsys.readouterr().out
    trial.check_all_are_there()


@pytest.mark.parametrize("command", ["quantize", "one pass"])
def test_a_second_run_is_refused_and_the_first_is_undisturbed(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    trial = outputs(made, command, tmp_path / "trial")
    said: list[str] = []

    def meanwhile() -> None:
        name, *words = made.words(command, trial.folder, 1)
        for more in ([], ["--restart"]):
            done = subprocess.run(
                [sys.executable, "-m", "gguf_tools", name, *more, *words],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 1
            said.append(done.stderr)

    with at_chunk(50, meanwhile), trial.watched():
        assert made.run(command, trial.folder) == 0
    assert said == [said[0], said[0]]
    assert said[0].endswith("/out.gguf.journal: another process is writing this output\n")
    assert said[0].count("\n") == 1
    trial.check_all_are_there()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ("quantize --imatrix MATRIX IN OUT IQ2_S THREADS", "type of token_embd.weight was "),
        ("quantize --imatrix MATRIX --exclude-weights attn_q_a IN OUT IQ2_XXS THREADS --tensor-type"
         " attn_q_a=Q2_K", "type of blk.0.attn_q_a.weight was IQ2_XXS, and is Q2_K"),
        ("quantize --imatrix MATRIX --override-kv general.name=str:Other IN OUT IQ2_XXS THREADS",
         "metadata general.name was 'Model' (STRING), and is 'Other' (STRING)"),
        ("quantize --imatrix MATRIX --prune-layers 1 IN OUT IQ2_XXS THREADS", "type of "),
        ("quantize --imatrix MATRIX FOLDER OUT IQ2_XXS THREADS", "source model.safetensors was absent, and"),
    ],
)  # fmt: skip
def test_another_run_is_refused_and_the_interrupted_one_can_go_on(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str, difference: str
) -> None:
    trial = outputs(made, "quantize", tmp_path / "trial")

    def work() -> None:
        with at_chunk(70, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            made.run("quantize", trial.folder)

    assert in_child(work) == -signal.SIGKILL
    with trial.watched():
        assert made.run(other, trial.folder) == 1
    said = one_line(capsys)
    assert f"out.gguf.journal keeps an interrupted run that this one can't resume: {difference}" in said
    assert said.endswith("; --restart starts over, or give the output another name\n")
    with trial.watched():
        assert made.run("quantize", trial.folder) == 0
    assert "resumed an interrupted run: 70 of" in capsys.readouterr().out
    trial.check_all_are_there()


def test_restart_forgets_what_another_run_has_left(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = outputs(made, "quantize", tmp_path / "trial")

    def work() -> None:
        with at_chunk(70, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            made.run(COMMANDS["quantize"].replace("IQ2_XXS", "Q4_0"), trial.folder)

    assert in_child(work) == -signal.SIGKILL
    assert made.run("quantize", trial.folder) == 1
    assert made.run(COMMANDS["quantize"] + " --restart", trial.folder) == 0
    assert "resumed" not in capsys.readouterr().out
    trial.check_all_are_there()


# ---- a disk that is full


@contextlib.contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """Mount a file system of so many bytes; gives what makes it larger."""

    def mount(*words: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mount is not permitted: {done.stderr.strip()}")

    folder.mkdir()
    if os.geteuid():
        pytest.skip("mount needs root")
    mount("-o", f"size={n_bytes}", "tmpfs", str(folder))
    try:
        yield lambda size: mount("-o", f"remount,size={size}", "tmpfs", str(folder))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", ["quantize", "keep split"])
def test_a_full_disk_shows_before_the_work(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with small_disk(tmp_path / "disk", 3 << 20) as grow:
        trial = outputs(made, command, tmp_path / "disk" / "trial")
        with trial.watched():
            assert made.run(command, trial.folder) == 1
        said = one_line(capsys)
        assert "out" in said
        assert " bytes are free" in said or "No space left on device" in said or " are free" in said
        assert "kept" not in said
        assert trial.leftovers() == []
        grow(30 << 20)
        with trial.watched():
            assert made.run(command, trial.folder) == 0
        trial.check_all_are_there()


def test_a_disk_that_fills_up_meanwhile(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system that can't give a file its space beforehand."""
    monkeypatch.setattr(gguf_tools.files.partial_file, "_fallocate", lambda fd, n_bytes: False)
    with small_disk(tmp_path / "disk", 16 << 20) as grow:
        trial = outputs(made, "quantize", tmp_path / "disk" / "trial")

        def fill() -> None:
            with contextlib.suppress(OSError), open(tmp_path / "disk" / "filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        with at_chunk(30, fill), trial.watched():
            assert made.run("quantize", trial.folder) == 1
        said = one_line(capsys)
        assert ": can't be written: No space left on device; " in said
        n_done = n_done_of(said)
        assert n_done >= 30
        grow(32 << 20)
        with trial.watched():
            assert made.run("quantize", trial.folder) == 0
        assert f"resumed an interrupted run: {n_done} of" in capsys.readouterr().out
        trial.check_all_are_there()


@pytest.mark.parametrize("command", ["quantize", "one pass"])
@pytest.mark.parametrize("call", ["pwrite", "write"])
def test_a_write_that_fails(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, call: str
) -> None:
    """`pwrite` writes the output, `write` the journal."""
    trial = outputs(made, command, tmp_path / "trial")
    original = getattr(os, call)

    def full(fd: int, data: bytes, *offset: int) -> int:
        if ".gguf." not in os.readlink(f"/proc/self/fd/{fd}"):
            return int(original(fd, data, *offset))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.MonkeyPatch.context() as patch,
        at_chunk(80, lambda: patch.setattr(os, call, full)),
        trial.watched(),
    ):
        assert made.run(command, trial.folder) == 1
    said = one_line(capsys)
    suffix = "partial" if call == "pwrite" else "journal"
    assert f"out.gguf.{suffix}: can't be written: No space left on device; 80 of" in said
    with trial.watched():
        assert made.run(command, trial.folder) == 0
    assert "resumed an interrupted run: 80 of" in capsys.readouterr().out
    trial.check_all_are_there()


def test_files_that_may_not_grow_so_large(made: Made, tmp_path: Path) -> None:
    trial = outputs(made, "one pass", tmp_path / "trial")
    said = tmp_path / "said"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with open(said, "w") as file, contextlib.redirect_stderr(file):
            assert made.run("one pass", trial.folder) == 1

    with trial.watched():
        assert in_child(work) == 0
    assert "out.gguf.partial: can't take " in said.read_text()
    assert said.read_text().endswith(" bytes: File too large\n")
    assert trial.leftovers() == []


# ---- a folder that can't be written any more


@pytest.mark.parametrize("call", ["rename", "open"])
def test_permission_that_is_lost(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    trial = outputs(made, "quantize", tmp_path / "trial")
    original = getattr(os, call)

    def denied(path: object, *args: object, **kwargs: object) -> object:
        if str(path).startswith(str(trial.folder)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *args, **kwargs)

    with at_chunk(30, lambda: os.kill(os.getpid(), signal.SIGINT)), trial.watched():
        assert made.run("quantize", trial.folder) == 130
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, trial.watched():
        patch.setattr(os, call, denied)
        assert made.run("quantize", trial.folder) == 1
    said = one_line(capsys)
    assert f"{trial.folder}/out.gguf" in said
    assert "Permission denied" in said
    with trial.watched():
        assert made.run("quantize", trial.folder) == 0
    assert f"resumed an interrupted run: {N_CHUNKS if call == 'rename' else 30} of" in capsys.readouterr().out
    trial.check_all_are_there()


# ---- a source that goes away


def source_of(own: Made, command: str) -> Path:
    return own.folder / ("in.gguf" if command == "quantize" else "model/model.safetensors")


@pytest.mark.parametrize("command", ["quantize", "one pass"])
def test_a_source_that_is_cut_meanwhile(
    own: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    # What was made since the last look at the source, a minute ago at most, counts as lost.
    monkeypatch.setattr("gguf_tools.files.journal.SYNC_SECONDS", 0.0)
    source = source_of(own, command)
    data = source.read_bytes()
    trial = outputs(own, command, tmp_path / "trial")
    with at_chunk(40, lambda: os.truncate(source, 100)), trial.watched():
        assert own.run(command, trial.folder) == 1
    said = one_line(capsys)
    assert str(source) in said
    assert ".weight" in said
    assert n_done_of(said) == 40
    with trial.watched():
        assert own.run(command, trial.folder) == 1  # still cut
    assert str(source) in one_line(capsys)
    source.write_bytes(data)  # at a later time
    with trial.watched():
        assert own.run(command, trial.folder) == 0
    assert "resumed an interrupted run: 40 of" in capsys.readouterr().out
    trial.check_all_are_there()


@pytest.mark.parametrize("command", ["quantize", "one pass"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_is_deleted_or_replaced_meanwhile_is_still_open(
    own: Made, tmp_path: Path, command: str, replaced: bool
) -> None:
    source = source_of(own, command)
    trial = outputs(own, command, tmp_path / "trial")

    def vanish() -> None:
        source.unlink()
        if replaced:
            source.write_bytes(b"another model")

    with at_chunk(40, vanish), trial.watched():
        assert own.run(command, trial.folder) == 0
    trial.check_all_are_there()


@pytest.mark.parametrize("command", ["quantize", "one pass"])
def test_a_source_that_has_become_another_is_refused(
    own: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    source = source_of(own, command)
    data = source.read_bytes()
    trial = outputs(own, command, tmp_path / "trial")
    with at_chunk(40, lambda: os.kill(os.getpid(), signal.SIGINT)), trial.watched():
        assert own.run(command, trial.folder) == 130
    capsys.readouterr()
    source.unlink()
    assert own.run(command, trial.folder) == 1
    assert "out.gguf" not in one_line(capsys)
    source.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with trial.watched():
        assert own.run(command, trial.folder) == 1
    assert f"this one can't resume: source {source.name}, tensors, " in one_line(capsys)
    source.write_bytes(data)
    with trial.watched():
        assert own.run(command, trial.folder) == 0
    # On a busy machine the signal may arrive while the next chunk is made.
    assert re.search("resumed an interrupted run: 4[01] of", capsys.readouterr().out)
    trial.check_all_are_there()
