"""What a type makes of a tensor: rows of the base, encoded anew, beside what the file has of the same rows.

The encoders write llama.cpp's bytes, so a file that was made without importances has the very bytes that
encoding the base gives. Importances and calibration move errors to where they do less harm: other bytes, and
a larger plain error, but by no more than the factors below. They are relative to the error of this tensor's
own rows, so that they hold for weights of any spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadWeights, QuantError
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo
from quality.auditing.measure import Indices, Ordinary, Sums
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import encodable, get_format
from quantize.formats.codecs import ErrorRange, codec_of, requires_importances
from quantize.importances.weighting import ColumnWeights
from quantize.roles import Role, tensor_role

FLOAT_ERROR = 1e-6
"""Relative error that is no error: of F32 tensors that another converter computed in another order."""

Floats32 = npt.NDArray[np.float32]

SAMPLE_ROWS = 32
SAMPLE_WEIGHTS = 128 * 1024
"""How much of a tensor is encoded anew: no more rows than this, nor more weights."""

ROWS_TOGETHER = 4
"""Neighbouring rows of a sample, which are read at once."""

NO_RANGE = ErrorRange(1.0, 0.0)
"""What is allowed to a type that has no row in the table of codecs."""


@dataclass(frozen=True)
class Rise:
    """How far an encoder that knows importances or activations departs from the plain one.

    tensor  factor of a whole tensor's plain error
    row     factor of that of a row, or of a block of one
    slope   how far the slope may be from the plain one, in units of the plain error
    """

    tensor: float
    row: float
    slope: float


FLOATS = Rise(tensor=1.0, row=1.0, slope=0.0)
"""Of types of floats, which round every weight by itself."""

WEIGHTED = Rise(tensor=1.6, row=3.0, slope=0.3)
"""Of importances. Measured on files of both models in examples/, of all types: tensors have up to 1.37
(IQ4_KSS), rows 1.9, slopes 0.25 (IQ1_M). `scripts/measure_audit.py clean` measures it anew."""

CALIBRATED = Rise(tensor=2.6, row=7.0, slope=0.35)
"""Of calibrations: 2.05 (Q5_K), rows 4.5 (Q4_K), slopes 0.26 (Q3_K)."""

CALIBRATED_OUTPUT = Rise(tensor=4.0, row=10.0, slope=0.7)
"""Of a calibrated output matrix, which few tokens move farther: 2.8, where hidden states have few
directions."""

COARSEST = Rise(tensor=2.4, row=4.0, slope=0.7)
"""Of IQ2_XXS: 1.83, and a slope of 0.53."""

TRELLIS = Rise(tensor=6.0, row=9.0, slope=1.8)
"""Of types with one scale a row: IQ4_KT has 4.6 where some columns matter far more than others."""

SLOPE_FLOOR = 0.003
LEAST_COSINE_SHARE = 0.5
"""Share of the plain cosine that a block keeps; a block of other weights has less than 0.3 of it."""


def rise_of(info: TensorInfo, *, calibrated: bool) -> Rise:
    """Say how far the encoding of a tensor may depart from the plain one.

    calibrated  whether it may have been calibrated, rather than encoded with an importance matrix or without
    """
    if info.type.name.endswith("_KT"):
        return TRELLIS
    if info.type.name.startswith("IQ2_XXS"):
        return COARSEST
    if not calibrated:
        return WEIGHTED
    is_output = tensor_role(info.name, info.shape).role is Role.OUTPUT
    return CALIBRATED_OUTPUT if is_output else CALIBRATED


@dataclass(frozen=True)
class Expected:
    """What the encoder makes of a sample of a tensor's rows, and what the file has there.

    relative  error of the rows as the encoder makes them; the type's limit where there is no encoder
    cosine    cosine of the angle between them and the base's
    slope     of the same rows
    measured  sums of the file's rows
    is_plain  whether the file's rows are the encoder's to the byte
    limits    what the type may do to any rows
    """

    relative: float
    cosine: float
    slope: float
    measured: Sums
    is_plain: bool
    limits: ErrorRange

    @property
    def ratio(self) -> float:
        """The file's error in units of the encoder's."""
        return float(self.measured.relative) / self.relative if self.relative else 1.0

    def ordinary(self, rise: Rise) -> Ordinary:
        """Say what a block of the tensor may be like, if its encoder departs so far from the plain one."""
        row = PLAIN_ROW if self.is_plain else rise.row
        return Ordinary(row * self.relative, LEAST_COSINE_SHARE * self.cosine, self.limits.absolute)


PLAIN_ROW = 2.0
"""Largest error of a row in units of the tensor's, where bytes are the plain encoder's. Measured: 1.6."""


def limits_of(type_: GGMLType) -> ErrorRange:
    codec = codec_of(type_.name)
    return NO_RANGE if codec is None else codec.error_range


def sample_rows(info: TensorInfo, runs: Sequence[tuple[int, int]], *, by_rows: bool) -> Indices:
    """Choose rows to encode anew, spread over those that are read, in whole groups of interleaved rows.

    by_rows  whether rows of the base are read where they are, rather than all rows for any
    """
    group = info.type.rows_interleaved
    most = max(group, min(SAMPLE_ROWS, SAMPLE_WEIGHTS // max(1, info.n_cols)) // group * group)
    together = math.lcm(group, ROWS_TOGETHER) if by_rows else most
    pieces = [
        (first, min(first + together, stop)) for start, stop in runs for first in range(start, stop, together)
    ]
    n_pieces = min(max(1, most // together), len(pieces))
    chosen = np.unique(np.linspace(0, len(pieces) - 1, n_pieces).astype(np.int64))
    return np.concatenate([np.arange(*pieces[index]) for index in chosen.tolist()])


def read_rows(tensor: SourceTensor, rows: Indices) -> Floats32:
    """Read rows in any order as float32 (n, n_cols); neighbours are read together."""
    if not len(rows):
        return np.empty((0, tensor.shape[-1]), np.float32)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = np.split(rows, breaks)
    parts = [tensor.read_rows(int(run[0]), int(run[-1]) + 1).astype(np.float32, copy=False) for run in runs]
    return np.concatenate(parts)


def as_encoded(type_: GGMLType, rows: Floats32) -> tuple[npt.NDArray[np.uint8], Floats32] | None:
    """Encode rows without importances; return the bytes and the values. None where the type can't.

    A type that can't be encoded without importances gets equal ones.
    """
    if type_.name not in encodable():
        return None
    n_cols = rows.shape[-1]
    weights = ColumnWeights(np.ones(n_cols, np.float32)) if requires_importances(type_.name) else None
    try:
        format_ = get_format(type_)
        data = format_.encode(rows, weights)
        return data, format_.decode(data, n_cols)
    except (BadWeights, QuantError):
        return None


def expect(
    info: TensorInfo, stored: SourceTensor, base: SourceTensor, runs: Sequence[tuple[int, int]]
) -> Expected:
    """Say what the type makes of a tensor."""
    rows = sample_rows(info, runs, by_rows=base.by_rows)
    wanted, found = read_rows(base, rows), read_rows(stored, rows)
    measured = Sums.of(wanted, np.nan_to_num(found, posinf=0, neginf=0)).over()
    limits = limits_of(info.type)
    if info.type in FLOAT_DTYPES:
        relative = max(limits.relative, FLOAT_ERROR)
        return Expected(relative, 1.0, 1.0, measured, np.array_equal(wanted, found), limits)
    encoded = as_encoded(info.type, wanted)
    if encoded is None:
        return Expected(min(limits.relative, 1.0), LEAST_COSINE_SHARE, 1.0, measured, False, limits)
    plain = Sums.of(wanted, encoded[1]).over()
    slope = float(plain.slope) if plain.found else 1.0
    same = np.array_equal(encoded[1], found)
    return Expected(float(plain.relative), float(plain.cosine), slope, measured, same, limits)
