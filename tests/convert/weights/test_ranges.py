"""Ranges of a stored tensor that are no rows: columns and elements, against slices of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert.checkpoint.safetensors_file import SHORT_STRIDE_BYTES, STRIDED_BLOCK_BYTES, SafetensorsFile
from gguf_tools.errors import CheckpointError
from tests.support.checkpoints import write_safetensors

SHAPES = {
    "one block": (5, 7),
    "many blocks": (3 * STRIDED_BLOCK_BYTES // 4096, 1031),
    "rows as long as a block is worth": (9, SHORT_STRIDE_BYTES // 4),
    "rows that are read one by one": (9, SHORT_STRIDE_BYTES // 4 + 1),
}


def stored(folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Write a tensor "x" as the last of a file, and return it."""
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    write_safetensors(folder / "x.safetensors", {"a": np.zeros(3, np.uint8), "x": array})
    return array


@pytest.mark.parametrize("name", SHAPES)
def test_columns_are_slices(name: str, tmp_path: Path) -> None:
    whole = stored(tmp_path, SHAPES[name])
    n_cols = whole.shape[1]
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        for start, stop in ((0, n_cols), (0, 1), (n_cols - 1, n_cols), (1, n_cols - 2), (3, 3)):
            found = file.tensors["x"].read_columns(start, stop)
            assert found.dtype == np.int32
            assert found.flags.c_contiguous
            assert np.array_equal(found, whole[:, start:stop])
        with pytest.raises(IndexError, match=r"x: columns 1\.\."):
            file.tensors["x"].read_columns(1, n_cols + 1)


def test_elements_are_slices_of_the_flat_tensor(tmp_path: Path) -> None:
    whole = stored(tmp_path, (3, 4, 5)).reshape(-1)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        for start, stop in ((0, 60), (59, 60), (7, 33), (60, 60)):
            assert np.array_equal(file.tensors["x"].read_elements(start, stop), whole[start:stop])
        with pytest.raises(IndexError, match=r"x: elements 1\.\.61 of 60"):
            file.tensors["x"].read_elements(1, 61)


@pytest.mark.parametrize("name", SHAPES)
def test_columns_of_a_file_that_was_cut_off_meanwhile(name: str, tmp_path: Path) -> None:
    stored(tmp_path, SHAPES[name])
    path = tmp_path / "x.safetensors"
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(CheckpointError, match=r"x: the file ends at byte .* it is truncated"):
            file.tensors["x"].read_columns(1, SHAPES[name][1])
