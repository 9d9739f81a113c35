"""The fingerprint of a run: all that decides the bytes of its outputs, as JSON data made to be compared.

An interrupted run can only be resumed under the same fingerprint. Under another, the error names the first
difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from gguf_tools.files.inputs import InputWatch
from gguf_tools.format.header import encode_value
from gguf_tools.format.layout import FileLayout
from gguf_tools.format.values import Kind, Value
from quantize.fill.chunks import CHUNK_ELEMS
from quantize.fill.digests import BYTES_VERSION
from quantize.fill.encode import FillJob
from quantize.fill.provenance import in_first_form

_TOLD_CHARS = 40


def describe_run(layouts: Mapping[str, FileLayout], job: FillJob, inputs: InputWatch) -> dict[str, Any]:
    """Return the fingerprint of filling outputs of these names and layouts from `inputs`.

    Inputs are recognised by samples of their bytes. Their times change when they are downloaded again, which
    must not make finished work useless.
    """
    layouts = {name: in_first_form(layout) for name, layout in layouts.items()}
    tensors = [info for layout in layouts.values() for info in layout.tensors]
    metadata = next(iter(layouts.values())).metadata
    calibration = {} if job.calibrator is None else {"calibration": dict(job.calibrator.about)}
    return calibration | {
        "version of the bytes": BYTES_VERSION,
        "elements of a chunk": CHUNK_ELEMS,
        "source": {**{name: digest.to_json() for name, digest in inputs.digests.items()}, **job.remote},
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
