"""Work folders that a crash of the machine has damaged: the next run gives the same bytes, and says so.

A run of each command is stopped in the middle. Then one file of its work folders after another is damaged,
and the same command goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gguf_tools

pytest.importorskip("torch")

import convert
import imatrix
import quantize
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import FileRecord, work_path
from gguf_tools.text import json_text
from imatrix.calibrate.run import context
from imatrix.forward.options import ForwardOptions
from imatrix.forward.work_folder import EMBEDDING
from imatrix.texts.tokens import Cut
from quantize.plan.overrides import parse_overrides
from tests.support.trained_model import calibration_text, trained_model

CUT = Cut(32, n_chunks=2)
IN_FILES = ForwardOptions(n_threads=1, memory_bytes=0)
IN_MEMORY = ForwardOptions(n_threads=1)


BEGUN = {"layer": EMBEDDING - 1, "latest": []}
"""What a record says first: it counts for nothing here."""


class Killed(BaseException):
    pass


@dataclass(frozen=True)
class Models:
    """What the commands read."""

    folder: Path
    base: Path
    quant: Path
    text: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    place = tmp_path_factory.mktemp("models")
    folder = trained_model(place)
    convert.convert(folder, place / "base.gguf", outtype="f32")
    quantize.quantize(place / "base.gguf", place / "quant.gguf", "Q8_0")
    (place / "text.txt").write_bytes(calibration_text()[-4000:])
    return Models(folder, place / "base.gguf", place / "quant.gguf", place / "text.txt")


def collect(models: Models, place: Path, forward: ForwardOptions) -> Path:
    imatrix.collect(models.folder, models.text, place / "out", cut=CUT, forward=forward, perplexity=False)
    return place / "out"


def evaluate(models: Models, place: Path, keep: Path | None = None) -> Path:
    options = gguf_tools.EvaluateOptions(CUT, IN_MEMORY, work=place / "work", keep=keep)
    found = gguf_tools.evaluate(models.base, models.text, [models.quant], options)
    (place / "out").write_text(json_text(found.to_json()))
    return place / "out"


def gradients(models: Models, place: Path) -> Path:
    """Both passes of `sensitivity` and `--calibrate`, and what the second one needs of them."""
    from imatrix.calibrate.statistics.gradients import GradientOptions, collect_gradients
    from imatrix.forward.open import open_model
    from imatrix.texts.mixture import read_text

    with open_model(models.base) as source:
        text = read_text(models.text, source.vocab(), source.network.vocab_size, CUT)
        with collect_gradients(source, text, place / "out", GradientOptions(IN_MEMORY)) as found:
            layers = [found.layer(number).arrays for number in range(found.n_layers)]
            of_layers = [each for layer in layers for each in layer.values()]
            arrays = [found.embedding(), found.folder.arrays(EMBEDDING)["squares"], *of_layers]
            (place / "out").write_bytes(b"".join(each.tobytes() for each in arrays))
    forget(work_path(place / "out"))
    return place / "out"


def make_calibrated(models: Models, place: Path) -> Path:
    """A calibration of one tensor, which follows the model."""
    calibration = gguf_tools.Calibration(
        models.text, CUT, method="one-sided", embedding=False, forward=IN_MEMORY
    )
    overrides = parse_overrides(("attn_output=q4_0", "weight=f16"))
    types = quantize.PlanOptions(overrides=overrides)
    options = quantize.QuantizeOptions(types=types, calibration=calibration)
    quantize.quantize(models.base, place / "out", "Q4_0", options, n_threads=1)
    return place / "out"


@dataclass(frozen=True)
class Command:
    """A command that is stopped.

    at      the first of its records that it does not live to write
    files   in its work folders then
    unused  those of them that the next run does not need
    """

    run: Callable[[Models, Path], Path]
    at: int
    files: tuple[str, ...]
    unused: frozenset[str] = frozenset()


def in_folder(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}.work/{name}" for name in ("record", "run.json", *names))


IMATRIX = in_folder("out", "hidden.0", "hidden.1", "sums.00000.npz", "sums.00001.npz")
STALE = frozenset({"out.work/hidden.1", "out.work/sums.00001.npz", "out.work/middle"})
THERE = in_folder("out.work/forward", *(f"hidden.{layer:05d}" for layer in range(3)))
KEPT = tuple(f"kept/{name}" for name in ("record", "states.00000", "states.00001", "routes.00001.npz"))
WORK = (*in_folder("work/base", "hidden.0", "hidden.1", "sums.00001.npz"),
        *in_folder("work/model-1", "hidden.0", "hidden.1", "sums.00000.npz"))  # fmt: skip

IN_STEP = frozenset({"work/base.work/hidden.0", "work/model-1.work/hidden.1"})
BACK = in_folder("out.work/backward", "hidden.0", "hidden.1", "embedding.npz", "sums.00000.npz")

COMMANDS = {
    "imatrix": Command(lambda models, place: collect(models, place, IN_MEMORY), 2, IMATRIX, STALE),
    "imatrix in files": Command(
        lambda models, place: collect(models, place, IN_FILES), 2,
        ("out.work/hidden.0", "out.work/middle"), STALE,
    ),
    "evaluate": Command(evaluate, 5, WORK, IN_STEP),
    "evaluate --keep": Command(
        lambda models, place: evaluate(models, place, place / "kept"), 7, ("work/base.work/hidden.1", *KEPT),
        IN_STEP,
    ),
    "gradients there": Command(gradients, 3, THERE),
    "gradients back": Command(
        gradients, 6, (THERE[-1], *BACK),
        frozenset({"out.work/backward.work/hidden.1"}),
    ),
    "calibrate": Command(
        make_calibrated, 2,
        in_folder("out", "hidden.0", "hidden.1", "student.0", "student.1", "records.jsonl"),
        frozenset({"out.work/hidden.1", "out.work/student.1"}),
    ),
}  # fmt: skip


def empty(data: bytes) -> bytes:
    return b""


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def removed(data: bytes) -> None:
    return None


KINDS = (zeroed, cut, removed, flipped, empty)


def cases() -> Iterator[object]:
    """Yield a file of each command with one kind of damage, and all with all kinds for long runs."""
    for number, (name, command) in enumerate(COMMANDS.items()):
        always = command.files[number % len(command.files)], KINDS[(number + 2) % len(KINDS)]
        for file in command.files:
            for kind in KINDS:
                marks = [] if (file, kind) == always else [pytest.mark.slow]
                yield pytest.param(name, file, kind, marks=marks, id=f"{name}-{file}-{kind.__name__}")


Stopped = Callable[[str], tuple[Path, bytes]]


@pytest.fixture(autouse=True)
def always_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calibrated runs save the states after every layer."""
    monkeypatch.setattr(context, "SAVE_SECONDS", 0)


@pytest.fixture(scope="module")
def stopped(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Return the folder that a command has left when it was stopped, and what a whole run writes."""
    known: dict[str, tuple[Path, bytes]] = {}

    def stop(name: str) -> tuple[Path, bytes]:
        if name not in known:
            command = COMMANDS[name]
            place, left = tmp_path_factory.mktemp("stopped"), [command.at]
            with pytest.MonkeyPatch.context() as patched:
                add = FileRecord.add

                def killed(self: FileRecord, what: object, names: Iterable[str]) -> None:
                    if not left[0]:
                        raise Killed
                    left[0] -= what != BEGUN
                    add(self, what, names)

                patched.setattr(FileRecord, "add", killed)
                patched.setattr(context, "SAVE_SECONDS", 0)
                with pytest.raises(Killed):
                    command.run(models, place)
            known[name] = place, command.run(models, tmp_path_factory.mktemp("whole")).read_bytes()
        return known[name]

    return stop


@pytest.mark.parametrize(("name", "file", "kind"), cases())
def test_what_a_crash_has_damaged_is_computed_again(
    name: str, file: str, kind: Callable[[bytes], bytes | None], models: Models, stopped: Stopped,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    command = COMMANDS[name]
    left, expected = stopped(name)
    place = tmp_path / "place"
    shutil.copytree(left, place)
    path = place / file
    data = kind(path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    caplog.clear()
    assert command.run(models, place).read_bytes() == expected
    said = "not as it was written" in caplog.text
    if not (path.name.startswith("record") and kind is cut):  # as if a run had been killed earlier
        assert said == (file not in command.unused)
    assert sorted(each.name for each in place.iterdir()) in (["out"], ["kept", "out"])


@pytest.mark.parametrize("name", COMMANDS)
def test_without_damage_nothing_is_computed_again(
    name: str, models: Models, stopped: Stopped, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left, expected = stopped(name)
    shutil.copytree(left, tmp_path / "place")
    caplog.clear()
    assert COMMANDS[name].run(models, tmp_path / "place").read_bytes() == expected
    assert "not as it was written" not in caplog.text
