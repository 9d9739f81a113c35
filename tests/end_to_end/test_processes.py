"""Chunks in processes of their own: a worker opens paths, and the bytes are those of threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import convert
import imatrix
import quantize
from gguf_tools.errors import ExecutionError
from quantize.fill import outputs
from quantize.fill.chunks import ChunkTask, RowRange
from quantize.mla_layout import change_layout
from tests.end_to_end.conftest import GOLDEN
from tests.end_to_end.processes import ProcessExecutor

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"

Make = Callable[[Path], object]


@pytest.fixture
def same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Make], None]:
    """Check that something is made alike by threads and by processes."""

    def check(make: Make) -> None:
        make(tmp_path / "threads.gguf")
        with monkeypatch.context() as patch:
            patch.setattr(outputs, "ThreadExecutor", lambda n_threads: ProcessExecutor(2))
            make(tmp_path / "processes.gguf")
        assert (tmp_path / "processes.gguf").read_bytes() == (tmp_path / "threads.gguf").read_bytes()

    return check


@pytest.mark.slow
def test_a_gguf_file_with_importances(
    tiny_gguf: Callable[[str], Path], same_bytes: Callable[[Make], None]
) -> None:
    source, matrix = tiny_gguf("bf16"), imatrix.load(MATRIX)
    pruned = quantize.PlanOptions(prune_layers=(1,))
    same_bytes(lambda path: quantize.quantize(source, path, "Q4_K_M", importances=matrix, options=pruned))


def test_a_folder_in_one_pass(tiny_folder: Path, same_bytes: Callable[[Make], None]) -> None:
    matrix = imatrix.load(MATRIX)
    same_bytes(
        lambda path: convert.convert(tiny_folder, path, outtype="Q4_0", importances=matrix, mla="both")
    )


@pytest.mark.slow
def test_another_layout(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, same_bytes: Callable[[Make], None]
) -> None:
    quantize.quantize(tiny_gguf("bf16"), tmp_path / "q8_0.gguf", "Q8_0")
    same_bytes(lambda path: change_layout(tmp_path / "q8_0.gguf", path, "both"))


def test_an_older_file_is_reused(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, same_bytes: Callable[[Make], None]
) -> None:
    source, old = tiny_gguf("bf16"), tmp_path / "old.gguf"
    quantize.quantize(source, old, "Q4_0")

    def make(path: Path) -> None:
        written = quantize.quantize(source, path, "Q4_0", reuse=[old]).written
        assert written.reused[old]

    same_bytes(make)


def test_an_error_in_a_process_names_its_chunk() -> None:
    task = ChunkTask(RowRange("t", 3, 5), 0, 0, 8, 0)
    with pytest.raises(ExecutionError, match=r"t rows 3\.\.5: OSError: .*No space left") as caught:
        ProcessExecutor(1).run([task], FullDisk(), lambda number, digest: None)
    assert caught.value.task == task


class FullDisk:
    """A spec, and a worker that fails."""

    def open(self) -> FullDisk:
        return self

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, task: ChunkTask) -> int:
        raise OSError(28, "No space left on device")
