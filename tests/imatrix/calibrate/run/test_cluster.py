"""Strips that workers of a scheduler encode: the bytes of threads."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import convert
import gguf_tools
import quantize
from gguf_tools.cluster import connect
from gguf_tools.commands.quantize import main
from gguf_tools.errors import ExecutionError
from quantize.fill import session
from tests.support.dask_cluster import dask_cluster, workers_in_threads
from tests.support.decoder_models import decoder_model
from tests.support.trained_model import calibration_text

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("distributed")

from imatrix.calibrate.run import cluster  # noqa: E402
from imatrix.calibrate.work import Meter  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 576},
    "qwen3moe": {"moe_intermediate_size": 64, "num_experts": 4},
}
"""Sizes that differ from those of `decoder_model`; 576 rows are three strips."""

PLAIN: dict[str, Any] = {"sequential": False, "method": "one-sided", "embedding": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a dense model and one with experts, some of which see few tokens."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_bytes(calibration_text()[:6000])
    for name, sizes in SIZES.items():
        decoder_model(name, folder / name, hidden_size=128, num_hidden_layers=2, **sizes)
        convert.convert(folder / name, folder / f"{name}.gguf", outtype="f32")
    return folder


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Make "here:1" the address of two workers in this process."""
    with workers_in_threads() as started, pytest.MonkeyPatch.context() as patch:
        patch.setitem(connect._open, "here:1", started)
        yield


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[..., bytes]:
    """Return what a model becomes without workers."""
    made: dict[tuple[str, bool], bytes] = {}

    def make(name: str, *, plain: bool = False) -> bytes:
        if (name, plain) not in made:
            made[name, plain] = calibrated(folder, name, folder / "alone.gguf", plain=plain, force=True)
        return made[name, plain]

    return make


def calibrated(folder: Path, name: str, output: Path, *, plain: bool = False, **choices: Any) -> bytes:
    """Calibrate a model to Q4_0, with all there is or in the plain way, and return its bytes."""
    calibration = gguf_tools.Calibration(folder / "text.txt", Cut(64, n_chunks=4), **(PLAIN if plain else {}))
    options = quantize.QuantizeOptions(calibration=calibration)
    quantize.quantize(folder / f"{name}.gguf", output, "Q4_0", options, n_threads=2, **choices)
    return output.read_bytes()


@pytest.mark.parametrize(
    ("name", "plain"),
    [("qwen3moe", False), ("qwen3", True), pytest.param("qwen3", False, marks=pytest.mark.slow)],
)
def test_bytes_are_those_of_threads(
    folder: Path, alone: Callable[..., bytes], tmp_path: Path, name: str, plain: bool
) -> None:
    output = tmp_path / "out.gguf"
    assert calibrated(folder, name, output, plain=plain, scheduler="here:1") == alone(name, plain=plain)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.slow
def test_an_interrupted_run_goes_from_workers_to_threads_and_back(
    folder: Path, alone: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, left, real = tmp_path / "out.gguf", [0], session.Session.done

    def done(self: session.Session, number: int, digest: int) -> None:
        real(self, number, digest)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "done", done)
        for scheduler, left[0] in (("here:1", 15), (None, 3)):
            with pytest.raises(KeyboardInterrupt):
                calibrated(folder, "qwen3moe", output, scheduler=scheduler)
            assert (tmp_path / "out.gguf.work").exists()
            assert list(tmp_path.rglob("strips*")) == []
    assert calibrated(folder, "qwen3moe", output, scheduler="here:1") == alone("qwen3moe")


def test_a_worker_that_does_not_see_what_it_needs_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_store", lambda *_: None)
    with pytest.raises(ExecutionError, match=r"^/.*\.work/strips\.[0-9a-f]+\.0: can't be read \(No such"):
        calibrated(folder, "qwen3", tmp_path / "out.gguf", plain=True, scheduler="here:1")


@pytest.mark.slow
def test_a_dry_run_tells_what_workers_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--calibrate", folder / "text.txt", "-c", "64", "--scheduler", "10.0.0.1:8786"]
    assert main([str(word) for word in (*words, folder / "qwen3.gguf", tmp_path / "out.gguf", "Q4_0")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "10.0.0.1:8786" in line)
    assert line.startswith("          without the workers of 10.0.0.1:8786; rounding, ")


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_workers_that_are_killed(
    folder: Path, alone: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    n_computed, computed = 0, Meter.computed

    with dask_cluster(tmp_path / "dask", 2, "--no-nanny") as processes:

        def kill(meter: Meter, seconds: float) -> None:
            nonlocal n_computed
            computed(meter, seconds)
            n_computed += 1
            if n_computed % 40 == 20:
                worker = processes.workers.pop(0)
                worker.send_signal(signal.SIGKILL)
                worker.wait()
                processes.start_worker("--no-nanny")

        monkeypatch.setattr(Meter, "computed", kill)
        output = tmp_path / "out.gguf"
        assert calibrated(folder, name, output, scheduler=processes.address) == alone(name)
    assert n_computed > 60


@pytest.mark.slow
def test_processes_of_this_machine(folder: Path, alone: Callable[..., bytes], tmp_path: Path) -> None:
    assert calibrated(folder, "qwen3moe", tmp_path / "out.gguf", scheduler="local:2") == alone("qwen3moe")
