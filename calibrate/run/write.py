"""Writing of rows that were encoded: into the outputs, the records and the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from calibrate.run.partial_model import PartialTensor
from calibrate.run.records import Records
from gguf_tools.errors import QuantError
from gguf_tools.files.partial_file import PartialFile
from quantize.fill.chunks import ChunkTask
from quantize.fill.encode import digest_rows, in_byte_order
from quantize.fill.executors import Done, naming
from quantize.fill.sources import SourceTensor
from quantize.formats.base import Bytes


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
