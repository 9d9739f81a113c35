"""Verifying an output file before it gets its name: a sample of every tensor, read back from the file.

The sample of a tensor is its first rows, its last rows and six runs between them, in eight experts where
there are that many: 64 rows or 256 Ki weights, whichever is less. They must

  1. hold no NaN and no infinity;
  2. have the bytes that encoding the same rows of the source again gives. Where a tensor is copied, these are
     the source's own; where it is calibrated, those whose digest was kept. This finds bytes that memory, disk
     or file system have changed, and rows, matrices or tensors in the wrong place;
  3. decode to weights as near to the source's as their type allows. This finds a kernel that computes
     something wrong on this machine.

What a type allows is a limit in codecs.py. The relative error of rows is sqrt(sum w (x - q)^2 / sum w x^2),
w the importance of the column, or 1. A limit is about twice the largest that generated rows have: normal,
Laplace's, uniform, of Student's t, of one sign, of one size, with zeros among them, without importances and
with several kinds of them; and at most 1, which is what zeros would give. (Only IQ1_M is allowed more:
without importances it does worse than zeros to ternary weights.) Every matrix of the trained model in
tests/golden stays below two thirds of its limit, or below 85% for the ternary types;
tests/quantize/fill/test_error_ranges.py measures all this anew.

Such limits hold for rows that are spread like trained ones. Where a few weights are much larger than all the
others, a type whose grid has no zero (most IQ types) makes the others larger than they were, in ggml as here:
with one outlier of 50 among weights of 0.001, IQ2_XXS gives 180%. `is_ordinary` tells such rows apart.

Scales are float16 in most types. Below 2**-14 their spacing no longer shrinks with them, so an absolute error
goes on top of the relative one: half that spacing times the largest multiple of the scale that a weight is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadTensor, OutputError
from gguf_tools.format.block_layouts import count_nonfinite
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.chunks import RowRange, rows_alike
from quantize.fill.encode import ERRORS_RISE, encode_rows
from quantize.fill.filling import FillJob
from quantize.fill.sources import GGUFTensor
from quantize.formats import get_format
from quantize.formats.codecs import codec_of, ignores_importances

LEAST_MEAN = 0.65
"""Least mean magnitude in an ordinary row, in units of the root mean square. Normal weights have 0.80,
Laplace's 0.71, weights of one size 1; one outlier or many zeros bring it near 0."""

SAMPLE_RUNS = 8
SAMPLE_ROWS = 64
SAMPLE_WEIGHTS = 256 * 1024

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

_DAMAGED = "memory, disk or file system is at fault"


@dataclass(frozen=True)
class TensorError:
    """How far the sampled rows of a tensor are from the source: sqrt(sum w (x - q)^2 / sum w x^2)."""

    tensor: str
    type: str
    relative: float


@dataclass(frozen=True)
class Verification:
    """Result of a check that has found nothing wrong.

    n_weights  weights that were read back
    n_tensors  tensors that they belong to
    worst      the tensor with the largest relative error; None if there are no tensors
    """

    n_weights: int
    n_tensors: int
    worst: TensorError | None

    def __str__(self) -> str:
        text = f"verified {self.n_weights:,} weights of {self.n_tensors} tensors"
        if self.worst is None:
            return text
        worst = self.worst
        return f"{text}: worst relative error {_percent(worst.relative)} ({worst.tensor}, {worst.type})"


def merge_verifications(files: Iterable[Verification]) -> Verification:
    """Merge the verifications of several files."""
    files = tuple(files)
    worst = [file.worst for file in files if file.worst is not None]
    return Verification(
        sum(file.n_weights for file in files),
        sum(file.n_tensors for file in files),
        max(worst, key=lambda error: error.relative, default=None),
    )


def verify_output(path: Path, layout: FileLayout, job: FillJob) -> Verification:
    """Check the file at `path`, under whatever name, against its layout and the sources of its tensors.

    raises  BadTensor naming tensor and row for the first wrong one, OutputError for a wrong size or header,
            and what reading the sources raises
    """
    _check_header(path, layout)
    spans = job.sources.rows_per_weights()
    errors = []
    n_weights = 0
    with GGUFFile(path) as file:
        for info in layout.tensors:
            _check_calibrated(path, info, job)
            sample = _Sample(path, info, GGUFTensor(file, info.name), job)
            for rows in sample_rows(info, spans.get(info.name)):
                sample.check_rows(rows)
                n_weights += len(rows) * info.n_cols
            errors.append(sample.finish())
    worst = max(errors, key=lambda error: error.relative, default=None)
    return Verification(n_weights, len(errors), worst)


def sample_rows(info: TensorInfo, rows_per_weights: int | None = None) -> Iterator[RowRange]:
    """Yield the rows of a tensor that are looked at, as evenly spread as they can be.

    No range crosses from one matrix into the next, or from one row of importances, of which each serves
    `rows_per_weights` rows.
    """
    span = rows_alike(info, rows_per_weights)
    group = info.type.rows_interleaved
    n_rows = min(SAMPLE_ROWS, SAMPLE_WEIGHTS // max(1, info.n_cols))
    length = max(1, n_rows // SAMPLE_RUNS // group) * group
    runs = [(0, info.n_rows)]
    if info.n_rows > SAMPLE_RUNS * length:
        last = info.n_rows - length
        starts = [last * i // (SAMPLE_RUNS - 1) // group * group for i in range(SAMPLE_RUNS)]
        runs = [(start, start + length) for start in starts]
    for start, stop in runs:
        while start < stop:
            end = min(stop, (start // span + 1) * span)
            yield RowRange(info.name, start, end)
            start = end


def _check_header(path: Path, layout: FileLayout) -> None:
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        header = file.read(len(layout.header))
    if n_bytes != layout.total_bytes:
        raise OutputError(f"{path}: has {n_bytes:,} bytes, expected {layout.total_bytes:,}")
    if header != layout.header:
        first = next(i for i, (a, b) in enumerate(zip(header, layout.header, strict=True)) if a != b)
        raise OutputError(f"{path}: byte {first} of the header is not what was written; {_DAMAGED}")


def _check_calibrated(path: Path, info: TensorInfo, job: FillJob) -> None:
    """Raise BadTensor for a calibrated tensor whose bytes are not those that were written."""
    calibrator = job.calibrator
    if calibrator is None or not job.is_calibrated(info.name):
        return
    row = calibrator.damaged_row(info.name, path)
    if row is not None:
        raise BadTensor(f"{path}: {info.name}: row {row} is not what was written; {_DAMAGED}", info.name)


class _Sums:
    """Sums over rows, from which their relative error follows."""

    def __init__(self) -> None:
        self.lost = 0.0
        self.total = 0.0
        self.weights = 0.0

    def add(self, lost: Floats, total: Floats, weights: float) -> None:
        """Add rows: the error and the size of each, squared, (n_rows,), and the sum of the weights of one."""
        self.lost += float(lost.sum())
        self.total += float(total.sum())
        self.weights += weights * len(lost)

    def relative_error(self) -> float:
        return math.sqrt(self.lost / self.total) if self.total else 0.0


class _Sample:
    """The rows of one tensor that are checked."""

    def __init__(self, path: Path, info: TensorInfo, stored: GGUFTensor, job: FillJob) -> None:
        self._path = path
        self._info = info
        self._stored = stored
        self._sources = sources = job.sources
        self._source = sources.tensors[info.name]
        self._is_calibrated = job.is_calibrated(info.name)
        self._importance = None if ignores_importances(info.type.name) else sources.importances.get(info.name)
        self._all = _Sums()
        self._ordinary = _Sums()
        self._worst = (0.0, 0)  # the largest relative error of an ordinary row, and which

    def check_rows(self, rows: RowRange) -> None:
        """Check rows of one matrix that share their importances; raises BadTensor."""
        info, start, stop = self._info, rows.start, rows.stop
        stored = self._stored.raw_rows(start, stop)
        # What a calibrated tensor should be was compared already, see `_check_calibrated`.
        expected = stored if self._is_calibrated else encode_rows(rows, info.type, self._sources)
        self._check_finite(stored, start)
        self._check_bytes(stored, expected, start)
        if self._source.type != info.type:
            self._measure(stored, start, stop)

    def finish(self) -> TensorError:
        """The relative error of all rows; raises BadTensor if that of ordinary ones is too large."""
        type_, sums = self._info.type.name, self._ordinary
        codec = codec_of(type_)
        if codec is not None:
            limits = codec.error_range
            relative = limits.relative * (ERRORS_RISE if self._is_calibrated else 1)
            allowed = relative * math.sqrt(sums.total) + limits.absolute * math.sqrt(sums.weights)
            if math.sqrt(sums.lost) > allowed:
                error, row = self._worst
                measured = _percent(sums.relative_error())
                raise self._error(
                    f"relative error {measured} as {type_}, {_percent(error)} in row {row}, expected at most"
                    f" {_percent(relative)}; either {type_} is not computed right on this machine,"
                    " or such weights do not suit it"
                )
        return TensorError(self._info.name, type_, self._all.relative_error())

    def _check_finite(self, stored: Bytes, start: int) -> None:
        """Look for what no row has when it is written (see encode.py)."""
        info = self._info
        n_bad, row = count_nonfinite(info.type, stored, info.row_bytes)
        if n_bad:
            name = info.type.name
            what = f"a scale of {name}" if info.type.is_quantized else f"a weight ({name})"
            text = f"row {start + row}: {what} is NaN or infinite, expected a finite one"
            raise self._error(f"{text}; {_DAMAGED}")

    def _check_bytes(self, stored: Bytes, expected: Bytes, start: int) -> None:
        if np.array_equal(stored, expected):
            return
        info = self._info
        index, byte = divmod(int(np.argmax(stored != expected)), info.row_bytes)
        row = start + index
        if self._source.type == info.type:
            raise self._error(f"row {row} is not the source's from byte {byte} on; {_DAMAGED}")
        own = slice(index * info.row_bytes, (index + 1) * info.row_bytes)
        errors = []
        for data in (stored, expected):
            sums = _Sums()
            sums.add(*self._losses(data[own], row, row + 1))
            errors.append(_percent(sums.relative_error()))
        raise self._error(
            f"row {row} is not what encoding it as {info.type.name} gives from byte {byte} on:"
            f" relative error {errors[0]}, expected {errors[1]}; {_DAMAGED}"
        )

    def _measure(self, stored: Bytes, start: int, stop: int) -> None:
        lost, total, weights = self._losses(stored, start, stop)
        self._all.add(lost, total, weights)
        ordinary = is_ordinary(self._source_rows(start, stop))
        self._ordinary.add(lost[ordinary], total[ordinary], weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(ordinary & (total > 0), np.sqrt(lost / total), 0)
        row = int(np.argmax(errors))
        self._worst = max(self._worst, (float(errors[row]), start + row))

    def _losses(self, data: Bytes, start: int, stop: int) -> tuple[Floats, Floats, float]:
        """Compute sum w (x - q)^2 and sum w x^2 of rows with this data, (n_rows,) each, and sum w."""
        codec = get_format(self._info.type)
        rows = self._source_rows(start, stop)
        decoded = codec.decode(data.reshape(stop - start, -1), self._info.n_cols).astype(np.float64)
        weights = np.ones(self._info.n_cols)
        if self._importance is not None:
            weights = self._importance.weighting_of_row(start).values.astype(np.float64)
        return (rows - decoded) ** 2 @ weights, rows**2 @ weights, float(weights.sum())

    def _error(self, text: str) -> BadTensor:
        return BadTensor(f"{self._path}: {self._info.name}: {text}", self._info.name)

    def _source_rows(self, start: int, stop: int) -> Floats:
        return self._source.read_rows(start, stop).astype(np.float64)


def _percent(ratio: float) -> str:
    """Write a ratio for people: 0.0784 -> "7.84%"."""
    return f"{100 * ratio:.3g}%"


def is_ordinary(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Tell which of `rows`, (n_rows, n_cols), are spread so that the limits hold, (n_rows,); zeros are."""
    return np.abs(rows).mean(axis=1) >= LEAST_MEAN * np.sqrt((rows**2).mean(axis=1))
