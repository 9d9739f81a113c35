"""Splitting a model into several files as llama-gguf-split does, and merging them again.

What that program does (tools/gguf-split/gguf-split.cpp), byte for byte:

- A limit of size counts the data of tensors, each padded to 32 bytes whatever the alignment, and no
  header. (llama.cpp's converter counts them without padding, see shards.py.)
- Every file ends its metadata with split.no, split.tensors.count and split.count, in this order: the
  count is known only at the end. (The converter puts the number of tensors last.)
- A set of one file has these keys, too, and is named -00001-of-00001.
- --no-tensor-first-split makes the first file one of metadata alone.

Where that program gives up or goes wrong, this one does not: a first tensor beyond the limit gets a file of
its own, like a later one; an alignment other than 32 goes into every file, with offsets to match; the version
and dimensions of 1 stay as they are; merged files are the model's, without stale `split.*` keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gguf_tools.edit.rewrite import NewFile, Origin
from gguf_tools.errors import BadRequest, FormatError
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.format import keys
from gguf_tools.format.shards import (
    MAX_SHARDS,
    SPLIT_KEYS,
    FileLayout,
    GGUFSet,
    group_tensors,
    shard_metadata,
    shard_path,
)
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value

_DEFAULT_MAX_TENSORS = 128
_COUNTED_ALIGNMENT = 32


def split_files(
    source: GGUFSet,
    prefix: Path,
    *,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    first_is_empty: bool = False,
) -> list[NewFile]:
    """Return the files to split a model into, PREFIX-00001-of-0000N.gguf; see `group_tensors`.

    max_bytes, max_tensors  neither: 128 tensors
    first_is_empty          whether the first file holds metadata alone
    raises                  FormatError if there were more than 65535 files
    """
    if max_bytes is None and max_tensors is None:
        max_tensors = _DEFAULT_MAX_TENSORS
    groups = group_tensors(
        source.tensors.values(), max_bytes=max_bytes, max_tensors=max_tensors, padded_to=_COUNTED_ALIGNMENT
    )
    if first_is_empty:
        groups = [[], *groups]
    if len(groups) > MAX_SHARDS:
        raise FormatError(
            f"{source.path}: would become {len(groups):,} files, expected at most {MAX_SHARDS:,}; "
            "allow larger ones"
        )
    return [
        _new_file(
            source,
            shard_path(prefix, index, len(groups)),
            _shard_metadata(source.metadata, index, len(groups), len(source.tensors)),
            group,
        )
        for index, group in enumerate(groups)
    ]


def merged_file(source: GGUFSet, path: Path, *, replace: bool = False) -> NewFile:
    """Return the file to merge a split set into.

    replace  allow that there is a file at `path`
    raises  BadRequest if the source isn't part of a set, OutputError if there is a file at `path`
    """
    if not any(key in source.shards[0].metadata for key in SPLIT_KEYS):
        raise BadRequest(f"{source.path}: is a complete model, not part of a split set; nothing to merge")
    refuse_to_replace([path], force=replace)
    metadata = {key: value for key, value in source.metadata.items() if key not in SPLIT_KEYS}
    return _new_file(source, path, metadata, source.tensors.values())


def _shard_metadata(metadata: Metadata, index: int, count: int, n_tensors: int) -> Metadata:
    # A count of 1 would make it the metadata of a plain file; the true one is set, last, below.
    own = dict(shard_metadata(metadata, index, max(count, 2), n_tensors))
    del own[keys.SPLIT_COUNT]
    own[keys.SPLIT_COUNT] = Value.u16(count)
    return own


def _new_file(source: GGUFSet, path: Path, metadata: Metadata, tensors: Iterable[TensorInfo]) -> NewFile:
    layout = FileLayout.of(metadata, tensors, endian=source.endian, version=source.version)
    origins = tuple(Origin(source.file_of(info.name), info.name) for info in layout.tensors)
    return NewFile(path, layout, origins)
