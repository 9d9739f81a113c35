"""Provenance: for every tensor of a file, a number for what its bytes were made of.

The key `gguf_tools.provenance` is an array of uint32 in file order, two for each tensor: the lower half of
its number and the upper. Readers in JavaScript have no exact numbers above 2**53, and some crash when one of
their big integers becomes JSON. Files of earlier versions have an array of uint64. A split set has the
numbers of all its tensors in its first file. A number is the xxh3_64 of everything that decides the bytes of
a tensor: the rows of its source and the dtype they are read in, its shape, its type, the importances that
weigh it, and the version of the encoded bytes. It is 0 for a tensor that is copied as it is. Tensors with the
same number, if it is not 0, have the same bytes, so one can stand in for the other (see reuse.py).

A source is digested chunk by chunk while its rows pass by; its digest is that of the chunks' digests in their
order. It does not depend on threads or machine, but it depends on where chunks begin (`CHUNK_ELEMS`), so the
number covers that too.

xxh3 is not a cryptographic hash: a file made to deceive can claim anything.

The fingerprint of a run is all that decides the bytes of its outputs, as JSON data made to be compared. An
interrupted run can only be resumed under the same fingerprint. Under another, the error names the first
difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import xxhash

from gguf_tools.files.inputs import InputWatch
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import encode_value
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Value
from quantize.fill.chunks import BYTES_VERSION, CHUNK_ELEMS, UNKNOWN
from quantize.fill.filling import FillJob
from quantize.fill.sources import rows_dtype
from quantize.formats.codecs import ignores_importances
from quantize.importances.entries import ResolvedImportance

PROVENANCE_KEY = "gguf_tools.provenance"

DIGEST_VERSION = 1
"""Version of the numbers. It goes up when a number is made of other things, or in another way."""

_LOWER = (1 << 32) - 1


def digest_importance(resolved: ResolvedImportance | None, type_name: str) -> int:
    """Digest the weights that a tensor's search uses, uint64; 0 for none."""
    if resolved is None or ignores_importances(type_name):
        return 0
    state = xxhash.xxh3_64(f"{resolved.rows_per_weights}\n".encode())
    for weighting in resolved.weightings():
        state.update(weighting.content())
    return state.intdigest() or 1


def digest_weighting(job: FillJob, tensor: str, type_name: str) -> int:
    """Digest what the search of a job's tensor uses besides its rows, uint64; 0 for nothing."""
    importance = digest_importance(job.sources.importances.get(tensor), type_name)
    if job.calibrator is None or not job.is_calibrated(tensor):
        return importance
    facts = f"calibrated {job.calibrator.digest:016x} {importance:016x}"
    return xxhash.xxh3_64_intdigest(facts.encode()) or 1


def tensor_provenance(info: TensorInfo, source: GGMLType, chunks: Iterable[int], importance: int) -> int:
    """Make the number of a tensor, uint64; UNKNOWN if a chunk's digest is.

    info        as it is in the output
    source      the type of its source, see SourceTensor
    chunks      the digests of its rows, in order
    importance  see `digest_weighting`
    """
    chunks = tuple(chunks)
    if UNKNOWN in chunks:
        return UNKNOWN
    shape = "x".join(map(str, info.shape))
    digests = "".join(f"{digest:016x}" for digest in chunks)
    facts = (
        f"digest {DIGEST_VERSION}",
        f"bytes {BYTES_VERSION}",
        f"chunk {CHUNK_ELEMS}",
        f"tensor {info.type.name} {shape}",
        f"importance {importance:016x}",
        f"source {rows_dtype(source).name} {digests}",
    )
    return xxhash.xxh3_64_intdigest("\n".join(facts).encode()) or 1


def provenance_value(numbers: Iterable[int]) -> Value:
    """Make the metadata value; its size depends on how many numbers there are, and on nothing else."""
    return Value.u32s(half for number in numbers for half in (number & _LOWER, number >> 32))


def with_provenance(layout: FileLayout, value: Value) -> FileLayout:
    """Put another value of provenance into a layout."""
    metadata = {**layout.metadata, PROVENANCE_KEY: value}
    return FileLayout.of(metadata, layout.tensors, endian=layout.endian, version=layout.version)


def in_first_form(layout: FileLayout) -> FileLayout:
    """Turn a layout into the one that earlier versions wrote, in which provenance has the same size.

    A fingerprint describes this one, so that a run that an earlier version began can be resumed.
    """
    if PROVENANCE_KEY not in layout.metadata:
        return layout
    return with_provenance(layout, Value.array(Kind.UINT64, _numbers(layout.metadata[PROVENANCE_KEY])))


def read_provenance(file: GGUFSource) -> dict[str, int] | None:
    """Read the numbers of the tensors that have one, by name; None if the file has none that fit it."""
    value = file.metadata.get(PROVENANCE_KEY)
    numbers = () if value is None else _numbers(value)
    if value is None or len(numbers) != len(file.tensors):
        return None
    return {name: number for name, number in zip(file.tensors, numbers, strict=True) if number != UNKNOWN}


def _numbers(value: Value) -> tuple[int, ...]:
    """Read the numbers that a value of either form holds; none for anything else."""
    if value.item is Kind.UINT64:
        return value.data
    if value.item is not Kind.UINT32 or len(value.data) % 2:
        return ()
    halves = value.data
    return tuple(lower | upper << 32 for lower, upper in zip(halves[::2], halves[1::2], strict=True))


_TOLD_CHARS = 40


def describe_run(job: FillJob, inputs: InputWatch) -> dict[str, Any]:
    """Take the fingerprint of a job, whose inputs are watched.

    Inputs are recognised by samples of their bytes. Their times change when they are downloaded again, which
    must not make finished work useless.
    """
    sources = job.sources
    layouts = {name: in_first_form(layout) for name, layout in job.layouts.items()}
    tensors = [info for layout in layouts.values() for info in layout.tensors]
    metadata = next(iter(layouts.values())).metadata
    calibration = {} if job.calibrator is None else {"calibration": dict(job.calibrator.about)}
    return calibration | {
        "version of the bytes": BYTES_VERSION,
        "elements of a chunk": CHUNK_ELEMS,
        "source": {**{name: digest.to_json() for name, digest in inputs.digests.items()}, **sources.remote},
        "type of": {info.name: info.type.name for info in tensors},
        "shape of": {info.name: list(info.shape) for info in tensors},
        "source of": {info.name: sources.tensors[info.name].name for info in tensors},
        "importances of": {
            name: _digest(*(np.ascontiguousarray(numbers).data for numbers in (entry.read(), entry.counts)))
            for name, entry in ((name, resolved.matrix) for name, resolved in sources.importances.items())
        },
        "metadata": {key: _told(value) for key, value in metadata.items()},
        "output": {name: _digest(layout.header) for name, layout in layouts.items()},
    }


def _told(value: Value) -> str:
    """The value itself if it is short enough for a message, otherwise a digest of it."""
    if value.kind is not Kind.ARRAY and len(str(value.data)) <= _TOLD_CHARS:
        return f"{value.data!r} ({value.kind.name})"
    return _digest(encode_value(value))


def _digest(*pieces: bytes | memoryview) -> str:
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
