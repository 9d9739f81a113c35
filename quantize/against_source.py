"""A finished file against what it was made of: are its values those of the source, within its types' errors?

Of every tensor four rows are compared for each million weights, and 32 at least. Where source and file have
the same type, their bytes must be the same. Elsewhere the error must be within twice the range of the type
(see quantize/fill/verify.py), because importances and calibration move errors to where they do less
harm. The range of a type of one or two bits is wide. So two more things are wrong: rows that are zeros where
the source's are not, and rows that do not resemble the source's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from gguf_tools.errors import QuantError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import StartProgress, no_start
from gguf_tools.text import in_layer_ranges
from quantize.fill.chunks import RowRange
from quantize.fill.encode import ERRORS_RISE, FillJob, encode_rows
from quantize.fill.sources import GGUFTensor, SourceTensor
from quantize.fill.verify import is_ordinary
from quantize.formats.codecs import codec_of

KIND = "values"

ELEMS_OF_A_SAMPLE = 1 << 20
LEAST_SAMPLES = 8
_SAMPLES_BY_COLUMNS = 2
"""Samples of a tensor whose rows lie in columns of the source: each takes all of it."""

_ROWS = 4
"""How many rows a sample has, where that many are left and rows are not interleaved."""

_LEAST_COSINE = 0.25
"""Least cosine of the angle between rows and what a type makes of them. Random rows of seven kinds stay above
0.56 in ternary types, and above 0.65 in all others; rows of two models come to 0.05 at most."""


def compare_with_source(
    file: GGUFSource,
    sources: Mapping[str, SourceTensor],
    source_name: str,
    started: StartProgress = no_start,
) -> list[Finding]:
    """Compare the values of a file or split set with those of its source; return findings.

    sources  tensors of what it was made of, by the names of the file
    started  called with the bytes of the file's tensors; what it returns, with those of each
    """
    findings: list[Finding] = []
    strangers: list[str] = []
    progress = started(sum(info.n_bytes for info in file.tensors.values()))
    for info in file.tensors.values():
        source = sources.get(info.name)
        if source is None:
            strangers.append(info.name)
        else:
            findings += _check_tensor(file, info, source)
        progress(info.n_bytes)
    if len(strangers) == len(file.tensors):
        text = f"{source_name} has no tensor of this file; is it another model?"
        return [Finding(KIND, text, Level.BAD, file=str(file.path))]
    if strangers:
        shown = ", ".join(in_layer_ranges(strangers))
        text = f"{len(strangers)} tensors are not in {source_name} and were not compared: {shown}"
        findings.append(Finding(KIND, text, Level.NOTE, tuple(strangers), str(file.path)))
    return findings


def _check_tensor(file: GGUFSource, info: TensorInfo, source: SourceTensor) -> Iterator[Finding]:
    path = str(file.file_of(info.name).path)
    if math.prod(source.shape) != info.n_elems or source.shape[-1:] != info.shape[-1:]:
        text = f"shape {info.shape}, the source's is {source.shape}"
        yield Finding(KIND, text, Level.BAD, (info.name,), path)
        return
    stored = GGUFTensor(file, info.name)
    try:
        for start, stop in sample_rows(info, source):
            wrong = _wrong(info, stored, source, start, stop)
            if wrong:
                yield Finding(KIND, f"rows {start} to {stop}: {wrong}", Level.BAD, (info.name,), path)
                return
    except QuantError as error:
        yield Finding(KIND, f"not compared: {error}", Level.NOTE, (info.name,), path)


def sample_rows(info: TensorInfo, source: SourceTensor) -> Iterator[tuple[int, int]]:
    """Yield which rows of a tensor are compared, as (start, stop), spread over all of it."""
    group = math.lcm(info.type.rows_interleaved, source.type.rows_interleaved)
    length = -(-_ROWS // group) * group
    n_groups = -(-info.n_rows // length)
    n_samples = _SAMPLES_BY_COLUMNS
    if source.by_rows:
        n_samples = max(LEAST_SAMPLES, info.n_elems // ELEMS_OF_A_SAMPLE)
    if n_groups <= n_samples:
        firsts = [length * index for index in range(n_groups)]
    else:
        firsts = [length * ((n_groups - 1) * index // (n_samples - 1)) for index in range(n_samples)]
    for first in firsts:
        yield first, min(first + length, info.n_rows)


def _wrong(info: TensorInfo, stored: GGUFTensor, source: SourceTensor, start: int, stop: int) -> str:
    """Describe what is wrong with some rows; "" for nothing."""
    if source.type == info.type:
        expected = encode_rows(RowRange(info.name, start, stop), info.type, FillJob({info.name: source}, {}))
        same = np.array_equal(expected, stored.raw_rows(start, stop))
        return "" if same else f"are not the source's, which are {info.type.name} too"
    wanted = source.read_rows(start, stop).astype(np.float64)
    found = stored.read_rows(start, stop).astype(np.float64)
    ordinary = is_ordinary(wanted) & np.isfinite(wanted).all(axis=1)
    wanted, found = wanted[ordinary], found[ordinary]
    size, length = math.sqrt(float(np.vdot(wanted, wanted))), math.sqrt(float(np.vdot(found, found)))
    codec = codec_of(info.type.name)
    largest = 0.0 if codec is None else codec.error_range.absolute * math.sqrt(wanted.size)
    if size <= 2 * largest:
        return ""
    if not length:
        return "are zeros, the source's are not"
    cosine = float(np.vdot(wanted, found)) / size / length
    if not cosine >= _LEAST_COSINE:
        return f"do not resemble the source's (cosine {cosine:.2f})"
    lost = math.sqrt(float(np.sum((wanted - found) ** 2)))
    if codec is not None and lost > ERRORS_RISE * codec.error_range.relative * size + largest:
        allowed = 100 * ERRORS_RISE * codec.error_range.relative
        return f"relative error {100 * lost / size:.3g}%, expected at most {allowed:.3g}% as {info.type.name}"
    return ""
