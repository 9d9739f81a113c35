"""Models in one file or split over several: opened as one, laid out down to every byte offset.

    NAME-00001-of-00003.gguf   all metadata, `split.*` keys at the end, the first tensors
    NAME-00002-of-00003.gguf   only the `split.*` keys, the next tensors
    ...

`split.no` counts from 0 (uint16), `split.count` is the number of files (uint16) and
`split.tensors.count` the number of tensors in all files (int32). A model in one file has none of them.

The layout of a file is known before any weight is read. The header depends only on metadata and on each
tensor's name, shape and type. Data follow in the order of the tensors, each padded with zeros to the
alignment, including the last: byte for byte what llama.cpp writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf_tools.argument_types import checked
from gguf_tools.errors import FormatError, TruncatedError
from gguf_tools.format import keys
from gguf_tools.format.header import DEFAULT_ALIGNMENT, VERSION, Endian, align_up, alignment_of, encode_header
from gguf_tools.format.reader import GGUFFile, GGUFSource
from gguf_tools.format.shown import value_text
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import first_of, quoted


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


SPLIT_KEYS = (keys.SPLIT_NO, keys.SPLIT_COUNT, keys.SPLIT_TENSORS_COUNT)
MAX_SHARDS = 0xFFFF

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.gguf", re.DOTALL)


def shard_path(prefix: Path, index: int, count: int) -> Path:
    """Return the path of shard `index` (from 0) of `count`: PREFIX-00001-of-00003.gguf."""
    return prefix.with_name(_shard_name(prefix.name, index, count))


def _shard_name(stem: str, index: int, count: int) -> str:
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def set_of(path: Path) -> tuple[Path, int] | None:
    """Return prefix and count of the set that a file belongs to by its name, None for other names."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or not match["prefix"]:
        return None
    return path.with_name(match["prefix"]), int(match["count"])


def shard_paths(path: str | os.PathLike[str], count: int) -> list[Path]:
    """Return the files of a model for `path` ("model.gguf"): `path` itself when there is only one."""
    path = Path(path)
    if count == 1:
        return [path]
    return [shard_path(path.with_name(path.stem), index, count) for index in range(count)]


# --- laying out -----------------------------------------------------------------------------


def group_tensors(
    tensors: Iterable[TensorInfo],
    *,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    padded_to: int = 1,
) -> list[list[TensorInfo]]:
    """Assign tensors to shards in order; a new shard starts where the next tensor would break a limit.

    max_bytes    limit of tensor data in a shard; a larger tensor gets a shard of its own
    max_tensors  limit of tensors in a shard
    padded_to    the data of each tensor count up to a multiple of this
    """
    groups: list[list[TensorInfo]] = [[]]
    group_bytes = 0
    for info in tensors:
        n_bytes = align_up(info.n_bytes, padded_to)
        is_full = max_tensors is not None and len(groups[-1]) >= max_tensors
        is_heavy = max_bytes is not None and group_bytes + n_bytes > max_bytes
        if groups[-1] and (is_full or is_heavy):
            groups.append([])
            group_bytes = 0
        groups[-1].append(info)
        group_bytes += n_bytes
    return groups


def shard_metadata(metadata: Metadata, index: int, count: int, n_tensors: int) -> Metadata:
    """Return the metadata of shard `index` (from 0) of `count`; `n_tensors` counts all shards together.

    The first shard has all of `metadata` and then the `split.*` keys, the others only the `split.*` keys. An
    alignment other than 32 goes into each, or its offsets could not be read. A single shard is a plain file
    without `split.*` keys.
    """
    own = {key: value for key, value in metadata.items() if key not in SPLIT_KEYS}
    if count == 1:
        return own
    if index:
        needs_alignment = alignment_of(own, "metadata") != DEFAULT_ALIGNMENT
        own = {keys.ALIGNMENT: own[keys.ALIGNMENT]} if needs_alignment else {}
    own[keys.SPLIT_NO] = Value.u16(index)
    own[keys.SPLIT_COUNT] = Value.u16(count)
    own[keys.SPLIT_TENSORS_COUNT] = Value.i32(n_tensors)
    return own


def layouts_of(
    metadata: Metadata, groups: Sequence[Sequence[TensorInfo]], *, endian: Endian = "little"
) -> list[FileLayout]:
    """Lay out one file for each group of tensors.

    metadata  see `shard_metadata`
    raises    FormatError if there are more than 65535 groups, and whatever FileLayout.of raises
    """
    if len(groups) > MAX_SHARDS:
        raise FormatError(f"{len(groups)} shards, expected at most {MAX_SHARDS}; allow larger ones")
    n_tensors = sum(map(len, groups))
    return [
        FileLayout.of(shard_metadata(metadata, index, len(groups), n_tensors), group, endian=endian)
        for index, group in enumerate(groups)
    ]


# --- reading --------------------------------------------------------------------------------


class GGUFSet(GGUFSource):
    """A model in one file or several.

    shards    the files, in order
    metadata  metadata of the first shard, without the `split.*` keys of a set of several files
    tensors   tensors of all shards, in order
    missing   what is wrong with a set of which only one part is open; "" for a whole one. The part then keeps
              its `split.*` keys
    """

    def __init__(self, path: str | os.PathLike[str], *, may_lack_parts: bool = False) -> None:
        self.path = Path(path)
        self.missing = ""
        self.shards: list[GGUFFile] = []
        try:
            self.shards.append(GGUFFile(self.path))
            count = _split_number(self.shards[0], keys.SPLIT_COUNT)
            if count > 1:
                self._open_others(count, may_lack_parts)
            self._file_of = self._index_tensors()
        except BaseException:
            self.close()
            raise
        first = self.shards[0]
        self.version = first.version
        self.endian = first.endian
        self.alignment = first.alignment
        hidden = SPLIT_KEYS if len(self.shards) > 1 else ()
        self.metadata = {key: value for key, value in first.metadata.items() if key not in hidden}
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}
        self.size_bytes = sum(shard.size_bytes for shard in self.shards)

    def _open_others(self, count: int, may_lack_parts: bool) -> None:
        """Open the other shards, and check that the set is complete and belongs together.

        With `may_lack_parts`, a part stays alone where others are missing.
        """
        (opened,) = self.shards
        match = _SHARD_NAME.fullmatch(self.path.name)
        index = _split_number(opened, keys.SPLIT_NO)
        if count > MAX_SHARDS or index >= count:
            raise FormatError(
                f"{self.path}: is part {index + 1} of {count} by its metadata, "
                f"expected a part of at most {MAX_SHARDS}"
            )
        if match is None or (int(match["number"]), int(match["count"])) != (index + 1, count):
            raise FormatError(
                f"{self.path}: is part {index + 1} of {count} by its metadata; "
                f"expected a name that ends in -{index + 1:05d}-of-{count:05d}.gguf"
            )
        names = [_shard_name(match["prefix"], number, count) for number in range(count)]
        missing = [name for name in names if not os.path.exists(os.path.join(self.path.parent, name))]
        if missing:
            self.missing = f"{len(missing)} of {count} parts are missing: {first_of(missing, 3)}"
            if may_lack_parts:
                return
            raise TruncatedError(f"{self.path}: {self.missing}")
        for number, path in enumerate(map(self.path.with_name, names)):
            if number != index:
                self.shards.insert(number, GGUFFile(path))
            shard = self.shards[number]
            found = (_split_number(shard, keys.SPLIT_NO), _split_number(shard, keys.SPLIT_COUNT))
            if found != (number, count):
                raise FormatError(
                    f"{path}: is part {found[0] + 1} of {found[1]} by its metadata, "
                    f"expected part {number + 1} of {count}"
                )
            if shard.endian != opened.endian:
                raise FormatError(
                    f"{path}: is {shard.endian} endian, {self.path.name} is {opened.endian} endian"
                )
        n_tensors = sum(len(shard.tensors) for shard in self.shards)
        expected = self.shards[0].metadata.get(keys.SPLIT_TENSORS_COUNT)
        if expected is not None and expected.data != n_tensors:
            raise FormatError(
                f"{self.path}: the parts hold {n_tensors} tensors, the metadata say {value_text(expected)}"
            )

    def _index_tensors(self) -> dict[str, GGUFFile]:
        file_of: dict[str, GGUFFile] = {}
        for shard in self.shards:
            for name in shard.tensors:
                if name in file_of:
                    other = file_of[name].path.name
                    raise FormatError(f"{shard.path}: tensor {quoted(name)} is in {other} too")
                file_of[name] = shard
        return file_of

    def __repr__(self) -> str:
        files = f", {len(self.shards)} files" if len(self.shards) > 1 else ""
        return f"<GGUFSet {self.path}: {len(self.tensors)} tensors, {len(self.metadata)} keys{files}>"

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return [shard.path for shard in self.shards]

    def shard_of(self, name: str) -> int:
        """Return the index in `shards` of the shard that holds a tensor; raises FormatError if none does."""
        return self.shards.index(self.file_of(name))

    def file_of(self, name: str) -> GGUFFile:
        """Return the shard that holds a tensor; raises FormatError if none does."""
        try:
            return self._file_of[name]
        except KeyError:
            raise FormatError(f"{self.path}: no tensor {name!r}") from None


@checked
def open_gguf(path: str | os.PathLike[str], *, may_lack_parts: bool = False) -> GGUFSet:
    """Open a model by the path of its file, or of any one of its parts.

        with open_gguf("lite-Q4_K_M.gguf") as file:
            print(file.get("general.name"), len(file.tensors))

    may_lack_parts  open a part alone where others are missing; `missing` then says so
    raises  GGUFError for a damaged file, MissingModel for one that isn't there
    """
    return GGUFSet(path, may_lack_parts=may_lack_parts)


def _split_number(file: GGUFFile, key: str) -> int:
    """Return a `split.*` number, 0 where it is missing; raises FormatError if it isn't a whole number."""
    number = file.get(key, 0)
    if not isinstance(number, int) or number < 0:
        found = value_text(file.metadata[key])
        raise FormatError(f"{file.path}: key {key!r} is {found}, expected a number")
    return number
