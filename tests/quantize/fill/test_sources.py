"""Rows of a GGUF file as a quantizer reads them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gguf_tools.errors import QuantError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import FileLayout, open_gguf
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.sources import GGUFTensor
from tests.quantize.codecs import decode, encode
from tests.support import samples

SHAPE = (2, 3, 64)
ROWS = samples.rows("normal", (6, 64))


def write_file(folder: Path, type_name: str, data: np.ndarray, endian: str = "little") -> Path:
    """Write one tensor `t` of SHAPE."""
    path = folder / "one.gguf"
    layout = FileLayout.of({}, [TensorInfo("t", SHAPE, by_name(type_name))], endian=endian)
    with GGUFWriter(path, layout) as writer:
        raw = data.reshape(-1).view(np.uint8)
        writer.write(layout.offset_of("t"), swap_bytes(by_name(type_name), raw) if endian == "big" else raw)
        writer.publish()
    return path


@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)]
)
def test_float_rows_come_in_their_own_dtype(tmp_path: Path, type_name: str, dtype: type, endian: str) -> None:
    stored = ROWS.astype(dtype)
    with open_gguf(write_file(tmp_path, type_name, stored, endian)) as file:
        tensor = GGUFTensor(file, "t")
        assert (tensor.name, tensor.shape, tensor.type.name) == ("t", SHAPE, type_name)
        rows = tensor.read_rows(2, 5)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(rows, stored[2:5])
        assert bytes(tensor.raw_rows(2, 5)) == stored[2:5].tobytes()


@pytest.mark.parametrize("endian", ["little", "big"])
def test_quantized_rows_are_decoded(tmp_path: Path, endian: str) -> None:
    blocks = encode("Q5_1", ROWS, None)
    with open_gguf(write_file(tmp_path, "Q5_1", blocks, endian)) as file:
        tensor = GGUFTensor(file, "t")
        np.testing.assert_array_equal(tensor.read_rows(1, 6), decode("Q5_1", blocks[1:6]))
        assert bytes(tensor.raw_rows(1, 6)) == blocks[1:6].tobytes()


def test_type_without_a_codec_is_named(tmp_path: Path) -> None:
    data = np.zeros(6 * 64 * 4, np.uint8)
    with (
        open_gguf(write_file(tmp_path, "I32", data)) as file,
        pytest.raises(QuantError, match="t: can't be decoded: I32"),
    ):
        GGUFTensor(file, "t").read_rows(0, 1)
