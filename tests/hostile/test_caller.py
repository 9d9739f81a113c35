"""The caller's process is as it was after each function of the API, also after an error, and from threads."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gguf_tools as gt  # noqa: E402
from gguf_tools.cluster.connect import _SILENCE  # noqa: E402
from gguf_tools.errors import ToolkitError  # noqa: E402
from gguf_tools.hub.client import quiet_client  # noqa: E402
from gguf_tools.system import settings  # noqa: E402
from imatrix.forward.device import fast_products  # noqa: E402
from imatrix.forward.workers import threads_for, torch_threads  # noqa: E402
from tests.support.adapters import pair_of, write_adapter  # noqa: E402
from tests.support.checkpoints import micro_checkpoint  # noqa: E402
from tests.support.tokenizer_files import copy_tokenizer  # noqa: E402
from tests.support.trained_model import calibration_text  # noqa: E402

SHORT: dict[str, Any] = {"chunk_size": 32, "n_chunks": 1, "n_threads": 1}
ANY = {**SHORT, "any_text": True}

CALLS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda here, out: gt.convert(here / "m", out / "o.gguf", outtype="q8_0"),
    "convert_adapter": lambda here, out: gt.convert_adapter(here / "adapter", here / "m", out / "a.gguf"),
    "quantize": lambda here, out: gt.quantize(here / "m.gguf", out / "o.gguf", "Q8_0", n_threads=2),
    "quantize_many": lambda here, out: gt.quantize_many(
        here / "m.gguf", out / "{FTYPE}.gguf", ["Q8_0", "F16"]
    ),
    "calibrate": lambda here, out: gt.calibrate(here / "m.gguf", out / "o.gguf", "Q8_0", here / "t", **ANY),
    "evaluate": lambda here, out: gt.evaluate(here / "m.gguf", here / "t", [here / "q.gguf"], **SHORT),
    "evaluate_suite": lambda here, out: gt.evaluate_suite(
        here / "m.gguf", here / "suite", [here / "q.gguf"], n_threads=1
    ),
    "sensitivity": lambda here, out: gt.sensitivity(
        here / "m.gguf", here / "t", out / "o.json", types=("Q8_0",), **ANY
    ),
    "refine": lambda here, out: gt.refine(
        here / "q.gguf", here / "m.gguf", here / "t", out / "o.gguf", minutes=0.01, **ANY
    ),
    "imatrix.collect": lambda here, out: gt.imatrix.collect(here / "m.gguf", here / "t", out / "i", **ANY),
    "imatrix.load": lambda here, out: gt.imatrix.load(here / "q.gguf"),
    "imatrix.save": lambda here, out: gt.imatrix.save(
        out / "i.dat", gt.imatrix.ImportanceFile({}, (), 1, 32)
    ),
    "audit": lambda here, out: gt.audit(here / "q.gguf", here / "m.gguf", n_threads=1),
    "rederive": lambda here, out: gt.rederive(here / "q.gguf", here / "m.gguf", n_threads=1),
    "cook": lambda here, out: gt.cook(
        here / "m", here / "t", "Q8_0", out / "c", cut=gt.Cut(32, 1), forward=gt.ForwardOptions(n_threads=1)
    ),
    "lint": lambda here, out: gt.lint("Q4_K_M", here / "m.gguf"),
    "show": lambda here, out: gt.show(here / "q.gguf"),
    "diff": lambda here, out: gt.diff(here / "q.gguf", here / "m.gguf", values=True),
    "verify": lambda here, out: gt.verify(here / "q.gguf", against=here / "m"),
    "scan": lambda here, out: gt.scan(here / "q.gguf", data=True),
    "card": lambda here, out: gt.card(here / "q.gguf", output=out / "README.md"),
    "write_texts": lambda here, out: gt.write_texts(out / "texts"),
    "upload": lambda here, out: gt.upload(here / "q.gguf", "me/none"),
    "split": lambda here, out: gt.split(here / "m.gguf", out / "part", max_tensors=20),
    "merge": lambda here, out: gt.merge(gt.split(here / "m.gguf", out / "p")[0], out / "o.gguf"),
    "open_gguf": lambda here, out: gt.open_gguf(here / "q.gguf").close(),
    "open_checkpoint": lambda here, out: gt.open_checkpoint(here / "m").close(),
    "read_values": lambda here, out: gt.read_values(gt.open_gguf(here / "q.gguf"), "output.weight"),
    "read_suite": lambda here, out: gt.read_suite(here / "suite"),
    "parse_overrides": lambda here, out: gt.parse_overrides(["ffn_down=Q6_K"]),
    "encode": lambda here, out: gt.encode(np.zeros((1, 256), np.float32), "Q8_0"),
    "decode": lambda here, out: gt.decode(np.zeros((1, 34), np.uint8), "Q8_0"),
    "edit.edit_model": lambda here, out: gt.edit.edit_model(
        here / "q.gguf",
        lambda metadata, names: gt.edit.remove_keys(metadata, ["general.name"]),
        output=out / "o.gguf",
    ),
}
"""Functions of the API; `here` has a model, a text and a suite, `out` is empty. Some end in an error."""

PURE = {
    "edit.parse_assignment", "edit.recover", "edit.remove_keys", "edit.rename_keys", "edit.rename_tensors",
    "edit.set_values",
}  # fmt: skip
"""Functions that only handle headers."""

QUICK = {"quantize", "evaluate", "imatrix.collect", "upload", "card"}


def test_all_functions_are_called() -> None:
    public = {
        f"{prefix}{name}"
        for prefix, module in (("", gt), ("edit.", gt.edit), ("imatrix.", gt.imatrix))
        for name in module.__all__
        if isinstance(getattr(module, name), types.FunctionType)
    }
    assert public == CALLS.keys() | PURE


def state() -> dict[str, Any]:
    """What others in the process rely on. Loggers and warnings that libraries bring along do not count."""
    loggers = [
        logging.root,
        *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "level")),
    ]
    os.umask(umask := os.umask(0))
    with ThreadPoolExecutor(1) as pool:
        of_new_threads = pool.submit(torch.get_num_threads).result()
    return {
        "torch threads": (torch.get_num_threads(), of_new_threads),
        "torch": (
            torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        ),
        "random": (
            torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state()),  # noqa: NPY002
        ),
        "numpy": (np.geterr(), settings._blas("get")()),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "timers": signal.getitimer(signal.ITIMER_REAL),
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)],
        "warnings": [each for each in warnings.filters if each[2].__module__ == "builtins"],
        "streams": (sys.stdout, sys.stderr, sys.stdin, sys.excepthook, threading.excepthook, sys.displayhook),
        "python": (
            sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits(), gc.isenabled(),
            gc.get_threshold(), faulthandler.is_enabled(), list(sys.path), tempfile.tempdir,
        ),
        "loggers": {
            each.name: (each.level, list(each.handlers), list(each.filters), each.propagate, each.disabled)
            for each in loggers
        },
    }  # fmt: skip


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    after["loggers"] = {name: each for name, each in after["loggers"].items() if name in before["loggers"]}
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model in three forms, a text and a suite."""
    parent = tmp_path_factory.mktemp("caller")
    copy_tokenizer("tiny", micro_checkpoint(parent / "m", "v3", vocab_size=4096, num_hidden_layers=2))
    gt.convert(parent / "m", parent / "m.gguf", outtype="f32")
    gt.quantize(parent / "m.gguf", parent / "q.gguf", "Q8_0")
    write_adapter(parent / "adapter", pair_of(parent / "m", "model.layers.0.self_attn.o_proj"))
    (parent / "t").write_bytes(calibration_text()[:3000])
    (parent / "suite").mkdir()
    (parent / "suite" / "letters.txt").write_bytes(calibration_text()[:6000])
    return parent


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Have torch take another number of threads than the calls do."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)


every_function = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CALLS]
)


@every_function
@pytest.mark.usefixtures("two_threads", "offline")
def test_nothing_of_the_caller_is_changed(here: Path, tmp_path: Path, name: str) -> None:
    with suppress(ToolkitError):
        CALLS[name](here, tmp_path)  # what imports set up is there afterwards
    before = state()
    (tmp_path / "second").mkdir()
    with suppress(ToolkitError):
        CALLS[name](here, tmp_path / "second")
    assert not changes(before, state())


@every_function
@pytest.mark.usefixtures("two_threads", "offline")
def test_nothing_is_changed_by_a_call_that_fails(here: Path, tmp_path: Path, name: str) -> None:
    """The files are damaged, or the caller's own function is: what is open when it happens is closed."""
    broken = tmp_path / "broken"
    shutil.copytree(here, broken)
    for path in (broken / "m.gguf", broken / "q.gguf", broken / "m" / "model.safetensors"):
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 1000)
    (broken / "t").write_bytes(b"\xff\xfe")
    before = state()
    with suppress(ToolkitError, OSError):
        CALLS[name](broken, tmp_path)
    assert not changes(before, state())


class Stop(Exception):
    pass


def stop(progress: gt.ProgressState) -> None:
    if progress.done > progress.total / 2:
        raise Stop


INTERRUPTED: dict[str, Callable[[Path, Path, Any], object]] = {
    "evaluate": lambda here, out, progress: gt.evaluate(
        here / "m.gguf", here / "t", [here / "q.gguf"], progress=progress, **SHORT
    ),
    "imatrix.collect": lambda here, out, progress: gt.imatrix.collect(
        here / "m.gguf", here / "t", out / "i", progress=progress, **ANY
    ),
    "sensitivity": lambda here, out, progress: gt.sensitivity(
        here / "m.gguf", here / "t", out / "o.json", types=("Q8_0",), progress=progress, **ANY
    ),
    "refine": lambda here, out, progress: gt.refine(
        here / "q.gguf", here / "m.gguf", here / "t", out / "o.gguf", minutes=0.01, progress=progress, **ANY
    ),
    "convert": lambda here, out, progress: gt.convert(
        here / "m", out / "o.gguf", "q8_0", progress=progress
    ),
    "quantize": lambda here, out, progress: gt.quantize(
        here / "m.gguf", out / "o.gguf", "Q8_0", progress=progress
    ),
    "calibrate": lambda here, out, progress: gt.quantize(
        here / "m.gguf", out / "o.gguf", "Q8_0", progress=progress,
        calibration=gt.Calibration(
            here / "t", cut=gt.Cut(32, 1), forward=gt.ForwardOptions(n_threads=1), any_text=True
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "evaluate" else pytest.mark.slow) for name in INTERRUPTED]
)
@pytest.mark.usefixtures("two_threads")
def test_nothing_is_changed_by_an_interrupted_call(here: Path, tmp_path: Path, name: str) -> None:
    before = state()
    with pytest.raises(Stop):
        INTERRUPTED[name](here, tmp_path, stop)
    assert not changes(before, state())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "quantize" else pytest.mark.slow) for name in INTERRUPTED]
)
def test_a_token_ends_a_call_and_the_next_one_goes_on(here: Path, tmp_path: Path, name: str) -> None:
    token = gt.CancelToken(lambda state: state.done > state.total / 2 and token.cancel())
    for out in (tmp_path / "whole", tmp_path / "cut"):
        out.mkdir()
    with pytest.raises(gt.Cancelled, match="the same call resumes from there"):
        INTERRUPTED[name](here, tmp_path / "cut", token)
    left = {path.name for path in (tmp_path / "cut").iterdir()}
    assert left or name == "evaluate"
    for out in (tmp_path / "whole", tmp_path / "cut"):
        INTERRUPTED[name](here, out, None)
    whole, cut = (
        {path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("whole", "cut")
    )
    assert whole.keys() == cut.keys()
    assert whole == cut or name == "refine"  # whose steps are timed


@pytest.mark.parametrize(
    "names",
    [
        ("evaluate", "evaluate", "imatrix.collect"),
        pytest.param(("calibrate", "evaluate", "sensitivity"), marks=pytest.mark.slow),
        pytest.param(("refine", "imatrix.collect", "evaluate"), marks=pytest.mark.slow),
        pytest.param(("upload", "upload", "upload"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("two_threads", "offline")
def test_three_threads_at_once(here: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    before = state()
    together = threading.Barrier(len(names))

    def call(place: int) -> int:
        out = tmp_path / str(place)
        out.mkdir()
        together.wait()
        with suppress(ToolkitError):
            CALLS[names[place]](here, out)
        return int(torch.get_num_threads())

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(call, range(len(names)))) == [2] * len(names)
    assert not changes(before, state())


@pytest.mark.usefixtures("two_threads")
def test_contexts_that_overlap_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins before and ends after another one."""
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    before = state()
    makers: list[Callable[[], Any]] = [
        lambda: torch_threads(1), lambda: threads_for(1, torch.device("cpu")), lambda: fast_products("cpu"),
        lambda: _SILENCE, lambda: quiet_client(bars=False), lambda: quiet_client(bars=True),
    ]  # fmt: skip
    for make in makers:
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            a, b = make(), make()
            first.submit(a.__enter__).result()
            second.submit(b.__enter__).result()
            first.submit(a.__exit__, None, None, None).result()
            second.submit(b.__exit__, None, None, None).result()
            assert [pool.submit(torch.get_num_threads).result() for pool in (first, second)] == [2, 2]
        assert not changes(before, state())


def test_threads_nest() -> None:
    torch.set_num_threads(4)
    with torch_threads(2):
        with torch_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with torch_threads(None):
            assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4
