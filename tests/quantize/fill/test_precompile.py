"""Kernels are compiled before the first chunk: all that it needs, by several processes, and never in vain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from gguf_tools.format.ggml_types import BF16, F32, Q4_0, Q8_0, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.fill import outputs, precompile
from quantize.fill.encode import RowSources
from quantize.fill.filling import FillJob
from quantize.fill.outputs import write_outputs
from quantize.fill.precompile import Encoding, compile_all
from quantize.importances.entries import Importance, ResolvedImportance
from quantize.prepare import lay_out
from quantize.run_options import RunOptions
from tests.support import samples

REPOSITORY = Path(__file__).parents[3]

NOTHING_MORE = """
import sys
import numpy as np
from quantize.formats import get_format
from quantize.fill.precompile import Encoding
from quantize.fill.sources import FLOAT_DTYPES
from quantize.importances.weighting import ColumnWeights
from gguf_tools.format.ggml_types import F32, by_name

def signatures():
    modules = [module for name, module in sys.modules.items() if name.startswith("quantize.formats")]
    kernels = {f"{m.__name__}.{n}": f for m in modules for n, f in vars(m).items() if hasattr(f, "_cache")}
    return {name: list(kernel.signatures) for name, kernel in kernels.items() if kernel.signatures}

source = sys.argv[1]
rows = np.random.default_rng(0).standard_normal((40, 512), np.float32)
for words in sys.argv[2:]:
    target, is_weighted = words.split(":")
    if by_name(source) in FLOAT_DTYPES:
        stored = rows.astype(FLOAT_DTYPES[by_name(source)])
    else:
        data = get_format(source).encode(rows, None)
    Encoding(source, target, bool(is_weighted)).compile()
    before = signatures()
    if by_name(source) not in FLOAT_DTYPES:
        stored = get_format(source).decode(data, 512)
    get_format(target).encode(stored, ColumnWeights(np.ones(512, np.float32)) if is_weighted else None)
    if not before or signatures() != before:
        print(target, is_weighted, before, signatures())
"""


class Rows:
    """A source tensor of random rows."""

    by_rows = True
    type = F32

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.name = name
        self.shape = shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return samples.rows("normal", self.shape)[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("source", ["BF16", "F32", "Q8_0"])
def test_nothing_is_left_to_compile(source: str) -> None:
    targets = ("F16:", "Q4_0:", "Q4_0:yes", "Q6_K:", "Q6_K:yes", "IQ4_NL:yes", "MXFP4:")
    command = [sys.executable, "-c", NOTHING_MORE, source, *targets]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout == ""


@pytest.mark.slow
def test_another_process_leaves_kernels_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "_PATIENCE_SECONDS", 0)
    waiting = iter([Encoding("BF16", "Q8_0", False), Encoding("F32", "TQ2_0", False)])
    precompile._help(waiting, Event())
    assert {path.name.split(".")[0] for path in tmp_path.rglob("*.nbi")} == {"q8_0", "few_bits", "finite"}
    assert next(waiting, None) is None


def test_another_process_runs_nothing_of_the_folder_that_the_user_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subprocess.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(precompile, "_PATIENCE_SECONDS", 0)
    waiting = iter([Encoding("F32", "Q8_0", False)])
    precompile._help(waiting, Event())
    assert not (tmp_path / "it ran").exists()
    assert next(waiting, None) is None


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[Encoding]:
    """Return what this process is asked to compile, which it doesn't do."""
    asked: list[Encoding] = []
    monkeypatch.setattr(precompile, "_compile", asked.append)
    return asked


ENCODINGS = [Encoding("F32", name, False) for name in ("Q4_0", "Q8_0", "Q4_0", "Q6_K")]


def test_each_is_compiled_once_and_alone_if_it_is_quick(
    compiled_here: list[Encoding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    compile_all(ENCODINGS, n_threads=8)
    assert compiled_here == [ENCODINGS[0], ENCODINGS[1], ENCODINGS[3]]


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_a_process_that_is_of_no_help_does_no_harm(
    compiled_here: list[Encoding], executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(sys, "executable", executable)
    compile_all(ENCODINGS, n_threads=3)
    assert set(compiled_here) <= set(ENCODINGS)


def test_an_error_leaves_no_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(encoding: Encoding) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(precompile, "_compile", fail)
    with pytest.raises(KeyboardInterrupt):
        compile_all(ENCODINGS, n_threads=2)


def test_a_block_that_has_no_place_is_left_to_its_tensor() -> None:
    compile_all([Encoding("F32", "IQ2_XXS", False)], n_threads=1)  # needs importances


def test_a_run_asks_for_what_it_will_encode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"a": Q4_0, "b": Q8_0, "c": F32, "d": BF16, "e": by_name("Q4_1")}
    infos = [TensorInfo(name, (4, 64), type_) for name, type_ in types.items()]
    weights = Importance(np.ones((1, 64), np.float32), np.ones(1, np.float32))
    sources = RowSources(
        {name: Rows(name, (4, 64)) for name in types},
        {name: ResolvedImportance(name, weights, 4, 0, "") for name in ("a", "b")},
    )
    asked: list[Encoding] = []
    monkeypatch.setattr(outputs, "compile_all", lambda encodings, *how: asked.extend(encodings))
    job = FillJob(lay_out(tmp_path / "new.gguf", {}, [infos]), sources)
    write_outputs([job], RunOptions(n_threads=1))
    assert asked == [
        Encoding("F32", "Q4_0", True),
        Encoding("F32", "Q8_0", False),
        Encoding("F32", "BF16", False),
        Encoding("F32", "Q4_1", False),
    ]
