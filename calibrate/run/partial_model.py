"""The model that is being written: tensors as they stand in the output, where they stand there already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import OutputError
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system import files
from quantize.fill.encode import in_byte_order
from quantize.fill.session import Output
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import get_decoder


class PartialTensor:
    """A tensor of the output as a SourceTensor; rows that are not written yet are the source's.

    written  which rows are, bool (n_rows,): all, until whoever writes them says otherwise
    """

    by_rows = True

    def __init__(self, info: TensorInfo, source: SourceTensor, file: _OutputFile, offset: int) -> None:
        self._info, self._source, self._file, self._offset = info, source, file, offset
        self.written = np.ones(info.n_rows, np.bool_)

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    @property
    def type(self) -> GGMLType:
        return self._info.type

    @property
    def endian(self) -> Endian:
        return self._file.endian

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return rows that are written, as they are stored, uint8 (n_bytes,), in little-endian order."""
        row_bytes = self._info.row_bytes
        data = self._file.read(self._offset + start * row_bytes, (stop - start) * row_bytes)
        return in_byte_order(data, self.type, self.endian)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows start .. stop - 1, (stop - start, n_cols)."""
        written = self.written[start:stop]
        if written.all():
            return self._decoded(start, stop)
        rows = self._source.read_rows(start, stop).astype(np.float32)
        for first, last in _runs(written):
            rows[first:last] = self._decoded(start + first, start + last)
        return rows

    def _decoded(self, start: int, stop: int) -> npt.NDArray[Any]:
        raw, n_cols = self.raw_rows(start, stop), self._info.n_cols
        dtype = FLOAT_DTYPES.get(self.type)
        if dtype is not None:
            return raw.view(dtype).reshape(stop - start, n_cols)
        return get_decoder(self.type)(raw.reshape(stop - start, -1), n_cols)


class _OutputFile:
    """An output that is being written, open for reading; it may get its name meanwhile."""

    def __init__(self, path: Path, endian: Endian) -> None:
        self.path, self.endian = path, endian
        try:
            self._fd = files.open_file(path, os.O_RDONLY)
        except OSError as error:
            raise OutputError(f"{path}: can't be opened: {error.strerror}") from error

    def read(self, offset: int, n_bytes: int) -> npt.NDArray[np.uint8]:
        data = np.empty(n_bytes, np.uint8)
        view = data.data
        while view:
            count = files.read_into(self._fd, view, offset)
            if count == 0:
                raise OutputError(f"{self.path}: shorter than it was written; was it changed meanwhile?")
            view, offset = view[count:], offset + count
        return data

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def open_partial_model(
    outputs: Sequence[Output], partials: Mapping[int, Path], sources: Mapping[str, SourceTensor]
) -> Iterator[dict[str, PartialTensor]]:
    """Give the tensors of all outputs, by name, as if all their rows were written.

    partials  the files that outputs grow in, by number; the others have their names
    sources   by the names of the outputs' tensors
    """
    files = []
    try:
        tensors = {}
        for number, output in enumerate(outputs):
            files.append(_OutputFile(partials.get(number, output.path), output.layout.endian))
            for info, offset in zip(output.layout.tensors, output.layout.offsets, strict=True):
                tensors[info.name] = PartialTensor(info, sources[info.name], files[-1], offset)
        yield tensors
    finally:
        for file in files:
            file.close()


def _runs(written: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of every run of rows that are written."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], written, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
