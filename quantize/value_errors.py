"""Errors between the values of two files, and of a finished file against what it was made of.

Between two files: how far decoded tensors of one are from those of the other.

Against the source: are the values within their types' errors? Of every tensor four rows are compared for each
million weights, and 32 at least. Where source and file have the same type, their bytes must be the same.
Elsewhere the error must be within twice the range of the type (see quantize/fill/verify.py), because
importances and calibration move errors to where they do less harm. The range of a type of one or two bits is
wide. So two more things are wrong: rows that are zeros where the source's are not, and rows that do not
resemble the source's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.errors import QuantError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import NO_REPORT, Advance, Reporter
from gguf_tools.text import in_layer_ranges, printable, table
from quantize.fill.chunks import RowRange
from quantize.fill.encode import ERRORS_RISE, RowSources, encode_rows, strips
from quantize.fill.scaled import scaled_tensors, with_scales
from quantize.fill.sources import SourceTensor
from quantize.fill.verify import is_ordinary
from quantize.formats.codecs import codec_of

_LAYER = re.compile(r"^blk\.\d+\.")

_NAME_WIDTH = 38
"""Maximum width of a name in the table, in characters, so that a line has at most 100."""


@dataclass(frozen=True)
class ValueErrors:
    """Errors between the values of a tensor in A and in B, or of several tensors together.

    names          of the tensors
    of_a, of_b     types, for instance F16 and Q4_K; several are separated by commas
    n_elems        how many values were compared
    squared_error  sum of (b - a)**2 in float64
    squared        sum of a**2 in float64
    largest        largest |b - a|
    """

    names: tuple[str, ...]
    of_a: str
    of_b: str
    n_elems: int
    squared_error: float
    squared: float
    largest: float

    @property
    def rms(self) -> float:
        """Root of the mean squared error."""
        return math.sqrt(self.squared_error / self.n_elems) if self.n_elems else 0.0

    @property
    def relative(self) -> float:
        """Norm of the error over the norm of A; infinity where A is zero and B is not."""
        if not self.squared_error:
            return 0.0
        return math.sqrt(self.squared_error / self.squared) if self.squared else math.inf

    @classmethod
    def together(cls, parts: Sequence[ValueErrors]) -> ValueErrors:
        """Merge the errors of all `parts`, as if they were one tensor."""
        return cls(
            tuple(name for part in parts for name in part.names),
            ",".join(dict.fromkeys(part.of_a for part in parts)),
            ",".join(dict.fromkeys(part.of_b for part in parts)),
            sum(part.n_elems for part in parts),
            math.fsum(part.squared_error for part in parts),
            math.fsum(part.squared for part in parts),
            max((part.largest for part in parts), default=0.0),
        )

    def to_json(self) -> dict[str, Any]:
        """The numbers as plain data, without the names."""
        return {
            "a": self.of_a,
            "b": self.of_b,
            "elements": self.n_elems,
            "rms": self.rms,
            "relative": self.relative,
            "largest": self.largest,
        }


def compare_values(a: GGUFSource, b: GGUFSource, progress: Reporter = NO_REPORT) -> FileErrors:
    """Measure the errors of all tensors that both files have in the same shape, in the order of A.

    progress  counts the bytes of A that are read
    raises    QuantError for a type that can't be decoded
    """
    shapes = {name: info.shape for name, info in b.tensors.items()}
    common = [info for info in a.tensors.values() if shapes.get(info.name) == info.shape]
    progress.start(sum(info.n_bytes for info in common), 0)
    of_a, of_b = scaled_tensors(a), scaled_tensors(b)
    return FileErrors(
        tuple(_errors_of(of_a[info.name], of_b[info.name], progress.advance) for info in common)
    )


@dataclass(frozen=True)
class FileErrors:
    """Errors between the values of two files.

    tensors  those of each tensor, in the order of A
    """

    tensors: tuple[ValueErrors, ...]

    @property
    def total(self) -> ValueErrors:
        """The errors of all tensors together."""
        return ValueErrors.together(self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The errors of each tensor, by name, and those of all together."""
        by_name = {name: each.to_json() for each in self.tensors for name in each.names}
        return {"values": by_name, "total": self.total.to_json()}

    def lines(self) -> Iterator[str]:
        """Yield a table of errors; tensors of the same name and types in several layers are one line.

        Of several layers, the errors are those of all together, and the worst layer is named.
        """
        folded: dict[tuple[str, str, str], list[ValueErrors]] = {}
        for each in self.tensors:
            folded.setdefault((_LAYER.sub("blk.*.", each.names[0]), each.of_a, each.of_b), []).append(each)
        changed = [parts for parts in folded.values() if any(part.squared_error for part in parts)]
        rows = [_row(parts) for parts in changed]
        if len(rows) > 1:
            rows.append((f"all {len(self.tensors)} tensors", "", *_numbers(self.total), ""))
        if rows:
            heads = ("values of B against A", "types", "RMS error", "relative", "largest", "worst layer")
            yield from table([heads, *rows], right=(2, 3, 4))
        same = sum(not each.squared_error for each in self.tensors)
        if same:
            yield f"{same} of {len(self.tensors)} tensors have the same values"


def _errors_of(a: SourceTensor, b: SourceTensor, advance: Advance) -> ValueErrors:
    n_rows = math.prod(a.shape[:-1])
    squared_error = squared = largest = 0.0
    group = math.lcm(a.type.rows_interleaved, b.type.rows_interleaved)
    for first, rows in strips(a, 0, n_rows, group):
        exact = rows.astype(np.float64)
        errors = b.read_rows(first, first + len(rows)).astype(np.float64) - exact
        squared_error += float(np.vdot(errors, errors))
        squared += float(np.vdot(exact, exact))
        largest = max(largest, float(np.abs(errors).max(initial=0)))
        advance(len(rows) * a.type.row_bytes(a.shape[-1]))
    return ValueErrors(
        (a.name,), a.type.name, b.type.name, n_rows * a.shape[-1], squared_error, squared, largest
    )


def _row(parts: Sequence[ValueErrors]) -> tuple[str, ...]:
    (name,) = in_layer_ranges(part.names[0] for part in parts)
    worst = max(parts, key=lambda part: part.relative)
    layer = _LAYER.match(worst.names[0])
    where = f"{layer[0][4:-1]}: {_percent(worst.relative)}" if layer and len(parts) > 1 else ""
    together = ValueErrors.together(parts)
    return _shortened(printable(name)), f"{together.of_a} {together.of_b}", *_numbers(together), where


def _numbers(errors: ValueErrors) -> tuple[str, str, str]:
    return f"{errors.rms:.3e}", _percent(errors.relative), f"{errors.largest:.3e}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."


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
    progress: Reporter = NO_REPORT,
) -> list[Finding]:
    """Compare the values of a file or split set with those of its source; return findings.

    sources   tensors of what it was made of, by the names of the file
    progress  counts the bytes of the file's tensors
    """
    findings: list[Finding] = []
    strangers: list[str] = []
    progress.start(sum(info.n_bytes for info in file.tensors.values()), 0)
    tensors, sources = scaled_tensors(file), with_scales(sources, Path(source_name))
    for info in file.tensors.values():
        source = sources.get(info.name)
        if source is None:
            strangers.append(info.name)
        else:
            findings += _check_tensor(file, info, tensors[info.name], source)
        progress.advance(info.n_bytes)
    if len(strangers) == len(file.tensors):
        text = f"{source_name} has no tensor of this file; is it another model?"
        return [Finding(KIND, text, Level.BAD, file=str(file.path))]
    if strangers:
        shown = ", ".join(in_layer_ranges(strangers))
        text = f"{len(strangers)} tensors are not in {source_name} and were not compared: {shown}"
        findings.append(Finding(KIND, text, Level.NOTE, tuple(strangers), str(file.path)))
    return findings


def _check_tensor(
    file: GGUFSource, info: TensorInfo, stored: SourceTensor, source: SourceTensor
) -> Iterator[Finding]:
    path = str(file.file_of(info.name).path)
    if math.prod(source.shape) != info.n_elems or source.shape[-1] != info.n_cols:
        text = f"shape {info.shape}, the source's is {source.shape}"
        yield Finding(KIND, text, Level.BAD, (info.name,), path)
        return
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


def _wrong(info: TensorInfo, stored: SourceTensor, source: SourceTensor, start: int, stop: int) -> str:
    """Describe what is wrong with some rows; "" for nothing."""
    if source.type == info.type:
        sources = RowSources({info.name: source}, {})
        expected = encode_rows(RowRange(info.name, start, stop), info.type, sources)
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
