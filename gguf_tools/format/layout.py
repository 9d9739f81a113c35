"""A GGUF file down to every byte offset, before any weight is read.

The header depends only on metadata and on each tensor's name, shape and type. Data follow in the order of
the tensors, each padded with zeros to the alignment, including the last: byte for byte what llama.cpp
writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.header import DEFAULT_ALIGNMENT, VERSION, Endian, align_up, alignment_of, encode_header
from gguf_tools.format.tensors import TensorInfo as TensorInfo
from gguf_tools.format.values import Metadata, Value


@dataclass(frozen=True)
class FileLayout:
    """A file before its data.

    metadata     as written
    tensors      in file order
    alignment    alignment of every tensor's data
    endian       "little" or "big"; the data must be written in this order, too
    version      3, or 2
    header       bytes of the header, padded up to `data_start`
    data_start   where the first tensor's data begin
    offsets      absolute offset of each tensor's data
    total_bytes  size of the whole file
    """

    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    alignment: int
    endian: Endian
    version: int
    header: bytes = field(repr=False)
    data_start: int
    offsets: tuple[int, ...]
    total_bytes: int
    _offset_of: dict[str, int] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<FileLayout: {len(self.tensors)} tensors, {self.total_bytes:,} bytes>"

    @classmethod
    def of(
        cls,
        metadata: Metadata,
        tensors: Iterable[TensorInfo],
        *,
        alignment: int | None = None,
        endian: Endian = "little",
        version: int = VERSION,
    ) -> FileLayout:
        """Lay out a file.

        alignment  None takes `general.alignment` of the metadata, or 32; a number goes into the metadata
        raises     FormatError for anything that the format can't hold, ShapeError for a row length that
                   a type can't hold
        """
        metadata = dict(metadata)
        tensors = tuple(tensors)
        if alignment is not None and (alignment != DEFAULT_ALIGNMENT or keys.ALIGNMENT in metadata):
            metadata[keys.ALIGNMENT] = Value.u32(alignment)
        alignment = alignment_of(metadata, "metadata")

        relative: list[int] = []
        data_bytes = 0
        for info in tensors:
            relative.append(data_bytes)
            data_bytes += align_up(info.n_bytes, alignment)
        header = encode_header(metadata, tensors, relative, endian=endian, version=version)
        data_start = align_up(len(header), alignment)
        offsets = tuple(data_start + offset for offset in relative)
        by_name: dict[str, int] = {}
        for info, offset in zip(tensors, offsets, strict=True):
            if info.name in by_name:
                raise FormatError(f"tensor {info.name!r} appears twice")
            by_name[info.name] = offset
        return cls(
            metadata=metadata,
            tensors=tensors,
            alignment=alignment,
            endian=endian,
            version=version,
            header=header.ljust(data_start, b"\0"),
            data_start=data_start,
            offsets=offsets,
            total_bytes=data_start + data_bytes,
            _offset_of=by_name,
        )

    def offset_of(self, name: str) -> int:
        """Return the absolute offset of a tensor's data; raises FormatError if there is no such tensor."""
        try:
            return self._offset_of[name]
        except KeyError:
            raise FormatError(f"no tensor {name!r} in this layout") from None
