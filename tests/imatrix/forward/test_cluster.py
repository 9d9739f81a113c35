"""Layers that workers of a scheduler compute: sums and states of one machine, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools.cluster import connect
from gguf_tools.errors import BadActivation, ClusterError, ExecutionError
from tests.imatrix.forward.deepseek4_models import v4_model
from tests.support.dask_cluster import workers_in_threads

torch = pytest.importorskip("torch")
pytest.importorskip("distributed")

from imatrix.forward import cluster  # noqa: E402
from imatrix.forward.hidden_states import FileStates  # noqa: E402
from imatrix.forward.observe import Accumulator  # noqa: E402
from imatrix.forward.open import open_model  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.forward.run import forward_pass  # noqa: E402
from imatrix.forward.work_folder import WorkFolder  # noqa: E402
from imatrix.texts.tokens import Text  # noqa: E402

MODEL = Path(__file__).parents[3] / "examples" / "tiny-deepseek-v3"
TOKENS = np.random.RandomState(3).randint(0, 500, (4, 24))


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Make "here:1" the address of two workers in this process."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with workers_in_threads() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setitem(connect._open, "here:1", cluster)
        yield
    torch.set_num_threads(n_threads)


def compute(folder: Path, options: ForwardOptions, model: Path = MODEL) -> dict[str, np.ndarray]:
    """Return what all layers keep, and the last states."""
    chunks = Text(TOKENS, TOKENS).chunks
    kept: dict[str, np.ndarray] = {}
    with (
        open_model(model) as source,
        WorkFolder(folder, {}) as work,
        forward_pass(source, chunks, options, work, lambda share: None) as forward,
    ):
        for layer in forward.layers(Accumulator):
            kept |= {f"{layer} {name}": array for name, array in work.arrays(layer).items()}
        kept["last"] = forward.last().read(0, TOKENS.size).numpy().copy()
        assert [path.name for path in work.folder.iterdir() if path.name.startswith("layer.")] == []
    return kept


@pytest.mark.parametrize(
    ("dtype", "memory_bytes", "all_experts"),
    [
        ("float32", 1 << 30, False),
        ("bfloat16", 0, True),
        pytest.param("float32", 0, False, marks=pytest.mark.slow),
        pytest.param("float32", 1 << 30, True, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1 << 30, False, marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, memory_bytes: int, all_experts: bool
) -> None:
    monkeypatch.setattr("imatrix.forward.sweep.PIECE_ROWS", 16)
    options = ForwardOptions(dtype=dtype, memory_bytes=memory_bytes, all_experts=all_experts)  # type: ignore[arg-type]
    threads = compute(tmp_path / "threads", options)
    workers = compute(tmp_path / "workers", replace(options, scheduler="here:1"))
    assert workers.keys() == threads.keys()
    assert len(threads) > 50
    for name, array in threads.items():
        np.testing.assert_array_equal(workers[name], array, err_msg=name)


def test_workers_get_names_that_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs in a folder of its own, and the command's outputs may have relative names."""
    monkeypatch.chdir(tmp_path)
    opened: list[Path] = []
    for kind in (FileStates, cluster._Digesting):
        init = kind.__init__

        def note(states: FileStates, path: Path, *more: Any, init: Any = init, **choices: Any) -> None:
            opened.append(path)
            init(states, path, *more, **choices)

        monkeypatch.setattr(kind, "__init__", note)
    compute(Path("workers"), ForwardOptions(scheduler="here:1", memory_bytes=0))
    assert {path for path in opened if path.name.startswith("layer.")}
    assert [path for path in opened if path.name.startswith("layer.") and not path.is_absolute()] == []


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_strands_and_tables_of_experts(memory_bytes: int, tmp_path: Path) -> None:
    """DeepSeek V4 has wider hidden states than what experts multiply, and goes by the ids of tokens."""
    model, options = v4_model(tmp_path / "model"), ForwardOptions(memory_bytes=memory_bytes)
    threads = compute(tmp_path / "threads", options, model)
    workers = compute(tmp_path / "workers", replace(options, scheduler="here:1"), model)
    assert workers.keys() == threads.keys()
    for name, array in threads.items():
        np.testing.assert_array_equal(workers[name], array, err_msg=name)


def test_a_run_goes_on_from_threads_to_workers(tmp_path: Path) -> None:
    options = ForwardOptions()
    expected = compute(tmp_path / "expected", options)
    chunks = Text(TOKENS, TOKENS).chunks
    with (
        open_model(MODEL) as source,
        WorkFolder(tmp_path / "out", {}) as work,
        forward_pass(source, chunks, options, work, lambda share: None) as forward,
    ):
        assert next(forward.layers(Accumulator)) == 0
    found = compute(tmp_path / "out", replace(options, scheduler="here:1"))
    np.testing.assert_array_equal(found["last"], expected["last"])


def test_errors_of_workers_say_what_those_of_threads_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*arguments: object) -> None:
        raise BadActivation("blk.1.ffn_down_exps.weight, expert 3: the hidden states have NaN or infinity")

    options = ForwardOptions(scheduler="here:1")
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "take_piece", overflow)
        with pytest.raises(BadActivation, match=r"^blk\.1\.ffn_down_exps.weight, expert 3: .*; the . layers"):
            compute(tmp_path / "out", options)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.LayersWorker, "_take_chunk", full)
        with pytest.raises(ExecutionError, match=r"^blk\.\d: OSError: .*No space left"):
            compute(tmp_path / "other", options)


@pytest.mark.parametrize("what", ["first", "middle", "outer"])
def test_what_a_worker_says_that_it_wrote_and_did_not_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    write = FileStates.write

    def lose(states: FileStates, start: int, rows: torch.Tensor) -> None:
        if not states.path.name.endswith(what):
            write(states, start, rows)

    monkeypatch.setattr(FileStates, "write", lose)
    with pytest.raises(ClusterError, match=rf"here:1: a worker says that it wrote rows to .*\.{what}, but"):
        compute(tmp_path / "out", ForwardOptions(scheduler="here:1"))
