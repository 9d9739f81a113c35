"""Reading: our reader against two others, views and copies of rows, files that change or are none."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_tools import GGUFFile, TensorInfo, Value
from gguf_tools.errors import FormatError, ShapeError, TruncatedError, UnreadableInput
from gguf_tools.format import ggml_types as types
from gguf_tools.format.header import Endian
from tests.gguf_tools.sample_files import METADATA, TENSORS, write_file
from tests.support import oracle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_file(path)
    return path


@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_what_was_written_is_read(tmp_path: Path, version: int, endian: Endian, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    data = write_file(path, alignment=alignment, endian=endian, version=version)
    with GGUFFile(path) as file:
        assert (file.version, file.endian, file.alignment) == (version, endian, alignment)
        assert tuple(file.tensors.values()) == TENSORS
        assert {key: file.metadata[key] for key in METADATA} == METADATA
        for name, expected in data.items():
            assert file.raw(name).tobytes() == expected
            assert file.data_offset(name) % alignment == 0
        assert file.size_bytes == path.stat().st_size


@pytest.mark.parametrize("endian", ["little", "big"])
def test_gguf_py_reads_the_same(tmp_path: Path, endian: Endian) -> None:
    path = tmp_path / "model.gguf"
    metadata = {key: value for key, value in METADATA.items() if key != "a.strings"} | {
        "a.strings": Value.strings(["", "a", "ü"])
    }
    write_file(path, metadata, endian=endian)
    theirs = gguf.GGUFReader(path)
    with GGUFFile(path) as ours:
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert list(fields) == list(ours.metadata)
        for name, field in fields.items():
            expected = ours.get(name)
            if name == "a.empty":  # gguf-py returns None for an empty array
                continue
            found = field.contents()
            assert found == (list(expected) if isinstance(expected, tuple) else expected), name
        assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert tensor.shape.tolist() == list(info.shape[::-1])
            assert tensor.tensor_type == info.type.id
            assert tensor.data_offset == ours.data_offset(info.name)
            assert tensor.n_bytes == info.n_bytes


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_llama_cpp_reads_the_same(path: Path) -> None:
    theirs = oracle.read_gguf(path)
    with GGUFFile(path) as ours:
        assert (theirs.version, theirs.alignment, theirs.data_offset) == (3, 32, ours.data_start)
        plain = {key: ours.get(key) for key in ours.metadata}
        assert theirs.metadata == {
            key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()
        }
        assert list(theirs.tensors) == list(ours.tensors)
        for name, facts in theirs.tensors.items():
            info = ours.tensors[name]
            assert facts.shape == info.shape[::-1]
            assert (facts.type_id, facts.n_bytes) == (info.type.id, info.n_bytes)
            assert facts.offset + ours.data_start == ours.data_offset(name)


def test_rows_are_counted_over_all_matrices(path: Path) -> None:
    name = "blk.0.ffn_down_exps.weight"
    with GGUFFile(path) as file:
        whole = file.raw(name).reshape(6, 68)
        for start, stop in [(0, 6), (2, 5), (6, 6)]:
            for rows in (file.raw_rows(name, start, stop), file.read_rows(name, start, stop)):
                assert rows.dtype == np.uint8
                np.testing.assert_array_equal(rows.reshape(-1, 68), whole[start:stop])
        np.testing.assert_array_equal(file.read_bytes(name, 5, 9), file.raw(name)[5:9])
        assert len(file.read_bytes(name, 400, 9999)) == 8


def test_views_are_read_only_and_outlive_the_file(path: Path) -> None:
    with GGUFFile(path) as file:
        view = file.raw("token_embd.weight")
        expected = view.copy()
    assert not view.flags.writeable
    np.testing.assert_array_equal(view, expected)
    with pytest.raises(ValueError, match="is closed"):
        file.raw("token_embd.weight")


def test_rows_that_are_not_there_are_refused(path: Path) -> None:
    with GGUFFile(path) as file:
        with pytest.raises(ShapeError, match="has 3 rows, not 2 to 4"):
            file.raw_rows("token_embd.weight", 2, 4)
        with pytest.raises(FormatError, match="no tensor 'nope'"):
            file.raw("nope")


def test_interleaved_rows_are_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, {}, (TensorInfo("t", (8, 32), types.Q5_0_R4),))
    with GGUFFile(path) as file:
        assert len(file.raw_rows("t", 4, 8)) == 4 * 22
        with pytest.raises(ShapeError, match="rows come in groups of 4; rows 2 to 8 cut one"):
            file.raw_rows("t", 2, 8)


def test_metadata_are_plain_data(path: Path) -> None:
    with GGUFFile(path) as file:
        assert file.get("general.architecture") == "deepseek2"
        assert file.get("a.i32s") == (-1, 0, 1)
        assert file.get("nope") is None
        assert file.get("nope", 7) == 7


def test_file_that_shrinks_while_open_is_an_error(path: Path) -> None:
    with GGUFFile(path) as file:
        os.truncate(path, file.data_offset("blk.1.four_d.weight") + 10)
        with pytest.raises(TruncatedError, match=r"tensor 'blk\.1\.four_d\.weight' .* has become shorter"):
            file.read_rows("blk.1.four_d.weight", 0, 6)


def test_truncated_file_names_the_tensor(path: Path) -> None:
    with GGUFFile(path) as file:
        start = file.data_offset("blk.1.four_d.weight")
    os.truncate(path, start + 1)
    with pytest.raises(TruncatedError, match=r"tensor 'blk\.1\.four_d\.weight' lies at bytes"):
        GGUFFile(path)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(TruncatedError, match="the file is empty"):
        GGUFFile(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "nope")
    with pytest.raises(UnreadableInput, match="is a folder, expected a file"):
        GGUFFile(tmp_path)
    with pytest.raises(FormatError, match="not a regular file"):
        GGUFFile("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        GGUFFile(tmp_path / "pipe")


def test_a_refused_file_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(b"GGUF")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(TruncatedError):
            GGUFFile(path)
    assert len(os.listdir("/proc/self/fd")) == before
