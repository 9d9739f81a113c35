"""Inputs that are changed under a run, or between a kill and the same command given again.

A file made of two states of its source would look whole. So such a run ends in one line before anything gets
a name, and what it had made of the changed source is not resumed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from convert.checkpoint.safetensors_file import SafetensorsFile
from gguf_tools import ChangedInput, CheckpointError, FileLayout, GGUFWriter, TensorInfo, Value
from gguf_tools.edit.rewrite import write_files
from gguf_tools.edit.split import split_files
from gguf_tools.errors import OutputError
from gguf_tools.files import journal as journal_module
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import open_gguf
from gguf_tools.progress import NoReport, ProgressState
from imatrix.store import save
from quantize.fill.session import Session
from quantize.importances.entries import Importance, ImportanceFile
from quantize.repack import repack
from tests.support.checkpoints import micro_checkpoint, shard
from tests.support.tokenizer_files import copy_tokenizer

NAMES = [f"blk.{i}.ffn_{part}.weight" for i in range(3) for part in ("gate", "up", "down")]
SHAPE = (64, 256)


def write_source(path: Path, seed: int = 0) -> Path:
    """Write a model of nine matrices of random numbers."""
    rng = np.random.default_rng(seed)
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(3)}
    layout = FileLayout.of(metadata, [TensorInfo(name, SHAPE, F32) for name in NAMES])
    with GGUFWriter(path, layout) as writer:
        for offset in layout.offsets:
            writer.write(offset, rng.standard_normal(SHAPE, np.float32))
        writer.publish()
    return path


def change(path: Path, where: float = 0.95) -> None:
    """Overwrite a file in place with zeros from some share of it on, and put its time of change back."""
    status = path.stat()
    with open(path, "r+b") as file:
        start = file.seek(int(where * status.st_size))
        file.write(bytes(status.st_size - start))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class Killed(Exception):
    """Ends a run."""


@contextmanager
def without_last_words() -> Iterator[None]:
    """Let runs end in this block as if by a signal that can't be caught."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "keep", lambda *_: None)
        with pytest.raises(Killed):
            yield


def after_chunks(count: int, act: Callable[[], object]) -> Callable[[ProgressState], None]:
    """Return a progress that acts when so many chunks are done."""
    n_done = -1  # the first call says that none is

    def progress(state: ProgressState) -> None:
        nonlocal n_done
        n_done += 1
        if n_done == count:
            act()

    return progress


def download_again(path: Path) -> None:
    """Put the same bytes into another file of the same name."""
    copy = shutil.copy(path, path.with_name("again"))
    path.unlink()
    Path(copy).rename(path)


def kill() -> None:
    raise Killed


def make(source: Path, output: Path, **choices: Any) -> Any:
    return quantize.quantize(source, output, "Q8_0", n_threads=1, **choices)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.gguf")


@pytest.fixture
def right(source: Path, tmp_path: Path) -> bytes:
    """The bytes that an undisturbed run gives."""
    make(source, tmp_path / "right.gguf")
    return (tmp_path / "right.gguf").read_bytes()


def test_a_source_changed_after_a_kill_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    with pytest.raises(Killed):
        make(source, output, progress=after_chunks(4, kill))
    change(source)
    with pytest.raises(OutputError, match=r"source in\.gguf, tensors, blk\.2\.ffn_down\.weight .*restart"):
        make(source, output)
    assert not output.exists()
    make(source, output, restart=True)
    make(source, tmp_path / "other.gguf")
    assert output.read_bytes() == (tmp_path / "other.gguf").read_bytes()


def test_another_source_is_refused_whatever_is_done_of_the_first(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make(source, tmp_path / "out.gguf", progress=after_chunks(4, kill))
    other = write_source(tmp_path / "other.gguf", seed=1)
    with pytest.raises(OutputError, match=r"source other\.gguf was absent"):
        make(other, tmp_path / "out.gguf")
    assert make(source, tmp_path / "out.gguf").written.n_resumed == 4


def test_a_source_downloaded_again_is_resumed(source: Path, right: bytes, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    with pytest.raises(Killed):
        make(source, output, progress=after_chunks(4, kill))
    download_again(source)
    assert make(source, output).written.n_resumed == 4
    assert output.read_bytes() == right


def test_what_was_made_before_a_kill_and_after_the_last_look_is_made_again(
    source: Path, right: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "out.gguf"
    with without_last_words():
        make(source, output, progress=after_chunks(4, kill))
    download_again(source)
    assert not make(source, output).written.n_resumed
    assert output.read_bytes() == right


def test_a_source_that_nobody_touched_is_resumed_after_a_kill(
    source: Path, right: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "out.gguf"
    with without_last_words():
        make(source, output, progress=after_chunks(4, kill))
    assert make(source, output).written.n_resumed == 4
    assert output.read_bytes() == right


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_source_changed_under_a_run_gives_no_file(
    source: Path, right: bytes, tmp_path: Path, at: int
) -> None:
    output, good = tmp_path / "out.gguf", source.read_bytes()
    with pytest.raises(
        Exception, match=r"in\.gguf: was changed while it was read \(blk\.2\.ffn_down\.weight"
    ):
        make(source, output, progress=after_chunks(at, lambda: change(source)))
    assert not output.exists()
    source.write_bytes(good)
    make(source, output)
    assert output.read_bytes() == right


def test_chunks_of_a_source_that_was_changed_and_put_back_are_made_again(
    source: Path, right: bytes, tmp_path: Path
) -> None:
    output, good = tmp_path / "out.gguf", source.read_bytes()

    def zero() -> None:
        change(source, 0.1)

    acts = after_chunks(2, zero), after_chunks(6, kill)

    def two_acts(state: ProgressState) -> None:
        for act in acts:
            act(state)

    with without_last_words():
        make(source, output, progress=two_acts)
    source.write_bytes(good)
    make(source, output)
    assert output.read_bytes() == right


def test_checked_chunks_of_a_failed_run_are_resumed(
    source: Path, right: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 0.0)
    output, good = tmp_path / "out.gguf", source.read_bytes()
    with pytest.raises(Exception, match="was changed while it was read"):
        make(source, output, progress=after_chunks(5, lambda: change(source)))
    source.write_bytes(good)
    assert make(source, output).written.n_resumed == 5
    assert output.read_bytes() == right


@pytest.mark.parametrize("ending", ["gguf", "dat"])
def test_importances_that_are_overwritten_under_a_run_give_no_file(
    source: Path, tmp_path: Path, ending: str
) -> None:
    rng = np.random.default_rng(0)
    ones = np.ones(1, np.float32)
    entries = {name: Importance(rng.random((1, SHAPE[1]), np.float32), ones) for name in NAMES}
    matrix = tmp_path / f"imatrix.{ending}"
    save(matrix, ImportanceFile(entries))
    options = quantize.QuantizeOptions(importances=matrix)
    with pytest.raises(ChangedInput, match=rf"imatrix\.{ending}: was changed while it was read"):
        quantize.quantize(
            source, tmp_path / "out.gguf", "Q4_0", options,
            n_threads=1, progress=after_chunks(3, lambda: change(matrix)),
        )  # fmt: skip
    assert not (tmp_path / "out.gguf").exists()


def test_a_source_that_is_replaced_by_the_same_bytes_does_no_harm(
    source: Path, right: bytes, tmp_path: Path
) -> None:
    copy = shutil.copy(source, tmp_path / "copy")
    make(source, tmp_path / "out.gguf", progress=after_chunks(3, lambda: os.replace(copy, source)))
    assert (tmp_path / "out.gguf").read_bytes() == right


def test_a_source_that_is_deleted_is_still_open(source: Path, right: bytes, tmp_path: Path) -> None:
    make(source, tmp_path / "out.gguf", progress=after_chunks(3, source.unlink))
    assert (tmp_path / "out.gguf").read_bytes() == right


def test_several_files_of_one_source_are_all_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="was changed while it was read"):
        quantize.quantize_many(
            source, tmp_path / "o-{ftype}.gguf", ["Q8_0", "Q4_0"], n_threads=1,
            progress=after_chunks(3, lambda: change(source)),
        )  # fmt: skip
    assert not list(tmp_path.glob("o-*.gguf"))


def test_repack_refuses_too(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "q8.gguf")
    with pytest.raises(Exception, match=r"q8\.gguf: was changed while it was read"):
        repack(
            tmp_path / "q8.gguf", tmp_path / "r.gguf", n_threads=1,
            progress=after_chunks(3, lambda: change(tmp_path / "q8.gguf")),
        )  # fmt: skip
    assert not (tmp_path / "r.gguf").exists()


@dataclass(frozen=True)
class Changing(NoReport):
    """Changes a file as soon as something has been written."""

    path: Path

    def advance(self, amount: float) -> None:
        change(self.path)


def test_edits_refuse_too(source: Path, tmp_path: Path) -> None:
    with open_gguf(source) as opened:
        files = split_files(opened, tmp_path / "part", max_tensors=3)
        with pytest.raises(ChangedInput, match=r"in\.gguf: was changed while it was read"):
            write_files(files, [source], Changing(source))
    assert not list(tmp_path.glob("part*"))


# ---- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = micro_checkpoint(tmp_path / "model", "v3", vocab_size=4096)
    shard(model, 2)
    copy_tokenizer("tiny", model)
    return model


def test_a_shard_changed_under_a_conversion_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    output, last = tmp_path / "out.gguf", folder / "model-00002-of-00002.safetensors"
    good = last.read_bytes()
    with SafetensorsFile(last) as file:
        places = file.places().items()
    name = next(name for name, (offset, n_bytes) in places if offset + n_bytes > 0.95 * len(good))
    with pytest.raises(Exception, match=rf"{last.name}: was changed while it was read \({name}"):
        convert.convert(
            folder, output, outtype="bf16", n_threads=1,
            progress=after_chunks(3, lambda: change(last)),
        )  # fmt: skip
    assert not output.exists()
    last.write_bytes(good)
    convert.convert(folder, output, outtype="bf16", n_threads=1)


def test_a_pickle_that_is_truncated_under_a_conversion_is_one_line(folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors*")):
        if path.suffix == ".safetensors":
            state |= load_file(path)
        path.unlink()
    pickled = folder / "pytorch_model.bin"
    torch.save(state, pickled)
    assert pickled.stat().st_size > 1 << 16
    with pytest.raises(Exception, match=r"pytorch_model\.bin: .* the file ends at byte .*truncated"):
        convert.convert(
            folder, tmp_path / "out.gguf", outtype="bf16", n_threads=1, allow_pickle=True,
            progress=after_chunks(3, lambda: os.truncate(pickled, 5000)),
        )  # fmt: skip
    torch.save(state, pickled)
    with pytest.raises(Exception, match=r"pytorch_model\.bin: was changed while it was read"):
        convert.convert(
            folder, tmp_path / "out.gguf", outtype="bf16", n_threads=1, allow_pickle=True,
            progress=after_chunks(20, lambda: change(pickled, 0.5)),
        )  # fmt: skip


def test_a_pickle_whose_numbers_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import zipfile

    path = tmp_path / "pytorch_model.bin"
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a.weight": torch.ones(64, 64)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data[:100] if "/data/" in name else data)
    with pytest.raises(CheckpointError, match=r"a\.weight: its 16384 bytes are not in the file"):
        convert.open_checkpoint(tmp_path, allow_pickle=True)
