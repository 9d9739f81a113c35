"""The output in the making: its tensors as they stand, records of what was made, and how rows are written.

Records are in the work folder, a line each, so that a run that goes on has them all. A record is written
before the journal says that its chunks are done. So a chunk that is done has its record, and rows that are
made again get a second one, which counts. Records that a crash of the machine has damaged are left out: the
bytes of the output do not depend on them, only the report and --verify do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from gguf_tools.errors import OutputError, QuantError
from gguf_tools.files.owned_folder import LineLog
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.findings import remark
from gguf_tools.format.header import Endian
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system import files
from quantize.fill.chunks import ChunkTask
from quantize.fill.encode import digest_rows, in_byte_order
from quantize.fill.executors import Done, naming
from quantize.fill.filling import Output
from quantize.fill.sources import FLOAT_DTYPES, DescribedTensor, SourceTensor
from quantize.formats import get_decoder
from quantize.formats.base import Bytes


class PartialTensor(DescribedTensor):
    """A tensor of the output as a SourceTensor; rows that are not written yet are the source's.

    written  which rows are, bool (n_rows,): all, until whoever writes them says otherwise
    """

    by_rows = True

    def __init__(self, info: TensorInfo, source: SourceTensor, file: _OutputFile, offset: int) -> None:
        super().__init__(info)
        self._source, self._file, self._offset = source, file, offset
        self.written = np.ones(info.n_rows, np.bool_)

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
        with OutputError.from_os(f"{path}: can't be opened:"):
            self._fd = files.open_file(path, os.O_RDONLY)

    def read(self, offset: int, n_bytes: int) -> npt.NDArray[np.uint8]:
        data = np.empty(n_bytes, np.uint8)
        if files.fill(self._fd, data.data, offset) < n_bytes:
            raise OutputError(f"{self.path}: shorter than it was written; was it changed meanwhile?")
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


class ChunkErrors(NamedTuple):
    """Squared errors on the held-out rows of a chunk, of the method's bytes and of the stock encoder's."""

    chunk: int
    error: float
    stock_error: float


@dataclass(frozen=True)
class Record:
    """How some rows of a tensor came out.

    first, n_rows  the rows, counted through the tensor's matrices
    n_cols         columns of the rows
    n_seen         tokens that they were seen to multiply
    has_factor     whether the second moments of what they multiply could be used
    error          squared error on held-out rows
    stock_error    the same of the stock encoder's bytes
    is_stock       whether stock's bytes were kept
    chunks         errors by held-out chunk, for a token of it: in nats where `in_nats`, else of the products
    is_close       whether the held-out rows can't tell which bytes are better
    """

    tensor: str
    first: int
    n_rows: int
    n_cols: int
    n_seen: int
    has_factor: bool
    error: float
    stock_error: float
    is_stock: bool
    chunks: tuple[ChunkErrors, ...] = ()
    in_nats: bool = False
    is_close: bool = False

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Make a record of JSON data."""
        return cls(**{**data, "chunks": tuple(ChunkErrors(*each) for each in data.get("chunks", ()))})


class Records:
    """The records of a run.

    parts   by tensor and first row
    chunks  digests of the bytes of chunks, by number
    """

    def __init__(self, path: Path, run: str, *, expected: bool = False) -> None:
        """Open the records of a run; those of another one are removed.

        expected  whether there are some, unless they were lost
        """
        self.parts: dict[tuple[str, int], Record] = {}
        self.chunks: dict[int, int] = {}
        self._log = LineLog(path)
        if self._log.is_torn or (expected and not self._log.lines):
            line = f"{path}: missing, or not as it was written; the report leaves out what is lost"
            remark(line)
        if self._log.lines[:1] == [{"run": run}]:
            for line in self._log.lines[1:]:
                self._take(line)
        else:
            self._log.clear()
            self._log.append({"run": run})

    def close(self) -> None:
        self._log.close()

    def add(self, record: Record) -> None:
        self.parts[record.tensor, record.first] = record
        self._log.append({"part": asdict(record)})

    def add_chunk(self, number: int, digest: int) -> None:
        self.chunks[number] = digest
        self._log.append({"chunk": number, "digest": digest})

    def of(self, tensors: Iterable[str]) -> list[Record]:
        """Return the records of some tensors."""
        wanted = set(tensors)
        return [record for record in self.parts.values() if record.tensor in wanted]

    def _take(self, data: dict[str, Any]) -> None:
        if "part" in data:
            record = Record.read(data["part"])
            self.parts[record.tensor, record.first] = record
        else:
            self.chunks[data["chunk"]] = data["digest"]


@dataclass(frozen=True)
class Writer:
    """Writes rows as far as their chunks are missing.

    sources  of the tensors, by their names in the outputs
    tensors  of the partial model; rows that are written become so there
    missing  chunks that are not done, by tensor, in the order of their rows
    files    open for writing, by the number of the output
    done     is told the number and the digest of each chunk that is written
    """

    sources: Mapping[str, SourceTensor]
    tensors: Mapping[str, PartialTensor]
    missing: Mapping[str, Sequence[ChunkTask]]
    files: Mapping[int, PartialFile]
    done: Done
    records: Records

    def is_missing(self, tensor: str, first: int = 0, n_rows: int | None = None) -> bool:
        """Whether some of a tensor's rows, or of `n_rows` from `first` on, are not written."""
        written = self.tensors[tensor].written
        return not written[first : None if n_rows is None else first + n_rows].all()

    def write(self, tensor: str, first: int, data: Bytes) -> None:
        """Write rows from `first` on, uint8 (n_rows, row bytes).

        raises  QuantError for a chunk of which only some rows are given
        """
        target, last = self.tensors[tensor], first + len(data)
        for task in self.missing.get(tensor, ()):
            rows = task.rows
            if not first <= rows.start < last:
                continue
            with naming(task):
                if rows.stop > last:
                    raise QuantError(f"{rows}: only rows to {last} were made")
                own = data[rows.start - first : rows.stop - first]
                stored = in_byte_order(own, target.type, target.endian)
                self.files[task.output].write(task.offset, stored.data)
                self.records.add_chunk(task.number, xxhash.xxh3_64_intdigest(stored.data))
                digest = digest_rows(rows, self.sources[tensor])
            self.done(task.number, digest)
        target.written[first:last] = True
