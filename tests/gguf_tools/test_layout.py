"""Layouts against gguf-py's writer, and alignment."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_tools import FileLayout, GGUFWriter, TensorInfo, Value
from gguf_tools.errors import FormatError, ShapeError
from gguf_tools.format import ggml_types as types
from gguf_tools.format import keys
from gguf_tools.format.header import Endian
from tests.gguf_tools.sample_files import METADATA, TENSORS, finite_bytes

#: gguf-py has no way to write these.
NOT_IN_GGUF_PY = {"a.empty", "a.strings", "a.bools", "a.f32s", "a.i32s", "a.u8s"}


@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_file_has_the_bytes_that_gguf_py_writes(tmp_path: Path, endian: Endian, alignment: int) -> None:
    order = {"little": gguf.GGUFEndian.LITTLE, "big": gguf.GGUFEndian.BIG}[endian]
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "deepseek2", endianess=order)
    metadata = {key: value for key, value in METADATA.items() if key not in NOT_IN_GGUF_PY}
    metadata["tokens"] = Value.strings(["a", "é", "深"])
    metadata["numbers"] = Value.i32s([1, -2])
    metadata["floats"] = Value.f32s([0.5, 1.25])
    if alignment != 32:
        theirs.add_custom_alignment(alignment)
        architecture = metadata["general.architecture"]
        first = {"general.architecture": architecture, keys.ALIGNMENT: Value.u32(alignment)}
        metadata = first | metadata
    for key, value in metadata.items():
        if key in ("general.architecture", keys.ALIGNMENT):
            continue
        data = list(value.data) if isinstance(value.data, tuple) else value.data
        theirs.add_key_value(key, data, gguf.GGUFValueType(value.kind))
    contents = {}
    for info in TENSORS:
        raw = np.frombuffer(finite_bytes(info), np.uint8)
        contents[info.name] = raw.tobytes()
        blocks = raw.reshape(*info.shape[:-1], -1)
        type_ = gguf.GGMLQuantizationType(info.type.id)
        theirs.add_tensor(info.name, blocks, raw_dtype=type_, tensor_endianess=order)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()

    layout = FileLayout.of(metadata, TENSORS, endian=endian)
    with GGUFWriter(tmp_path / "ours.gguf", layout) as writer:
        for name, raw_bytes in contents.items():
            writer.write(layout.offset_of(name), raw_bytes)
        writer.publish()
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_data_follow_each_other_padded_to_the_alignment() -> None:
    tensors = [TensorInfo("a", (5,), types.F32), TensorInfo("b", (1, 32), types.Q8_0)]
    layout = FileLayout.of({}, tensors, alignment=64)
    assert layout.data_start % 64 == 0
    assert len(layout.header) == layout.data_start
    assert layout.offsets == (layout.data_start, layout.data_start + 64)
    assert layout.total_bytes == layout.data_start + 128
    assert layout.offset_of("b") == layout.offsets[1]
    assert layout.metadata == {keys.ALIGNMENT: Value.u32(64)}


def test_alignment_of_the_metadata_is_used_and_can_be_replaced() -> None:
    metadata = {keys.ALIGNMENT: Value.u32(256)}
    assert FileLayout.of(metadata, []).alignment == 256
    replaced = FileLayout.of(metadata, [], alignment=32)
    assert (replaced.alignment, replaced.metadata[keys.ALIGNMENT]) == (32, Value.u32(32))


def test_what_cannot_be_laid_out_is_named() -> None:
    with pytest.raises(FormatError, match="is 24, expected a power of two"):
        FileLayout.of({}, [], alignment=24)
    with pytest.raises(ShapeError, match=r"blk\.0\.x: row length 100 is not a multiple of 32"):
        FileLayout.of({}, [TensorInfo("blk.0.x", (2, 100), types.Q8_0)])
    with pytest.raises(FormatError, match="'t' appears twice"):
        FileLayout.of({}, [TensorInfo("t", (1,), types.F32)] * 2)
    with pytest.raises(FormatError, match="no tensor 'x'"):
        FileLayout.of({}, []).offset_of("x")


def test_tensor_sizes() -> None:
    info = TensorInfo("t", (3, 5, 64), types.Q8_0)
    assert (info.n_cols, info.n_rows, info.n_mats, info.n_elems) == (64, 15, 3, 960)
    assert (info.row_bytes, info.n_bytes) == (68, 1020)
    vector = TensorInfo("v", (7,), types.F32)
    assert (vector.n_cols, vector.n_rows, vector.n_mats, vector.n_bytes) == (7, 1, 1, 28)
