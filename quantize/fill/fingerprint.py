"""The fingerprint of a run: all that decides the bytes of its outputs, as JSON data made to be compared.

An interrupted run can only be resumed under the same fingerprint. Under another, the error names the first
difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.errors import BadRequest
from gguf_tools.header import encode_value
from gguf_tools.layout import FileLayout
from gguf_tools.system.files import read_at
from gguf_tools.values import Kind, Value
from quantize.fill.chunks import CHUNK_ELEMS
from quantize.fill.digests import BYTES_VERSION
from quantize.fill.encode import FillJob
from quantize.fill.provenance import in_first_form

# A source is recognised by its size and these pieces. Reading all of it would take hours, and its times
# change when it is downloaded again, which must not invalidate finished work.
_START_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 4096

_TOLD_CHARS = 40


def describe_run(layouts: Mapping[str, FileLayout], job: FillJob, inputs: Iterable[Path]) -> dict[str, Any]:
    """Return the fingerprint of filling outputs of these names and layouts from `inputs`.

    raises  BadRequest for an input that can't be read
    """
    layouts = {name: in_first_form(layout) for name, layout in layouts.items()}
    tensors = [info for layout in layouts.values() for info in layout.tensors]
    metadata = next(iter(layouts.values())).metadata
    calibration = {} if job.calibrator is None else {"calibration": dict(job.calibrator.about)}
    return calibration | {
        "version of the bytes": BYTES_VERSION,
        "elements of a chunk": CHUNK_ELEMS,
        "source": {**{path.name: _sample(path) for path in inputs}, **job.remote},
        "type of": {info.name: info.type.name for info in tensors},
        "shape of": {info.name: list(info.shape) for info in tensors},
        "source of": {info.name: job.sources[info.name].name for info in tensors},
        "importances of": {
            name: _digest(*(np.ascontiguousarray(numbers).data for numbers in (entry.read(), entry.counts)))
            for name, entry in ((name, resolved.matrix) for name, resolved in job.importances.items())
        },
        "metadata": {key: _told(value) for key, value in metadata.items()},
        "output": {name: _digest(layout.header) for name, layout in layouts.items()},
    }


def _sample(path: Path) -> str:
    """Return the size of a file and the digest of the pieces by which it is recognised."""
    try:
        with open(path, "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            pieces = [read_at(file.fileno(), _START_BYTES, 0)]
            for piece in range(1, _PIECES + 1):
                offset = max(0, n_bytes * piece // _PIECES - _PIECE_BYTES)
                pieces.append(read_at(file.fileno(), _PIECE_BYTES, offset))
    except OSError as error:
        raise BadRequest(f"{path}: can't be read: {error.strerror}") from error
    return f"{n_bytes} bytes, {_digest(*pieces)}"


def _told(value: Value) -> str:
    """Return the value itself if it is short enough for a message, otherwise a digest of it."""
    if value.kind is not Kind.ARRAY and len(str(value.data)) <= _TOLD_CHARS:
        return f"{value.data!r} ({value.kind.name})"
    return _digest(encode_value(value))


def _digest(*pieces: bytes | memoryview) -> str:
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
