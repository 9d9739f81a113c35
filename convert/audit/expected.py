"""Expected error of a type: rows of the base, encoded anew, beside what the file has of the same rows.

The encoders write llama.cpp's bytes, so a file that was made without importances has the very bytes that
encoding the base gives. Importances and calibration move errors to where they do less harm: other bytes, and
a larger plain error, but by no more than the factors below. They are relative to the error of this tensor's
own rows, so that they hold for weights of any spread.

The weights of a base may lie on a grid: those of a checkpoint in FP8, GPTQ, AWQ or MXFP4, or of a file that
was encoded before. Then the plain encoder may make next to no error, and factors of it allow nothing. So a
tensor may always have the error that its type makes of ordinary weights, and on a grid factors are of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from convert.audit.measure import Indices, Ordinary, Sums
from gguf_tools.errors import BadWeights, QuantError
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.fill.same_bytes import differing_blocks
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor, consecutive_runs
from quantize.formats import encodable, get_format
from quantize.formats.codecs import ErrorRange, codec_of, requires_importances
from quantize.importances.weighting import ColumnWeights
from quantize.options import METHOD_KEY, REFINED_KEY

FLOAT_ERROR = 1e-6
"""Relative error that is no error: of F32 tensors that another converter computed in another order."""

Floats32 = npt.NDArray[np.float32]

SAMPLE_ROWS = 32
SAMPLE_WEIGHTS = 128 * 1024
"""How much of a tensor is encoded anew: no more rows than this, nor more weights."""

ROWS_TOGETHER = 4
"""Neighbouring rows of a sample, which are read at once."""

NO_RANGE = ErrorRange(1.0, 0.0)
"""Errors that are allowed to a type without a row in the table of codecs."""


@dataclass(frozen=True)
class Rise:
    """How far an encoder that knows importances or activations departs from the plain one.

    tensor  factor of a whole tensor's plain error
    row     factor of that of a block of a row
    slope   how far the slope may be from the plain one, in units of the plain error
    moved   error of a whole tensor that may be there before it is encoded, however fine the type is
    leaning how far the slope may be from the plain one before it is encoded
    cosine  share of the plain cosine that a block keeps; a block of other weights has less than 0.3 of it
    """

    tensor: float
    row: float
    slope: float
    moved: float = 0.0
    leaning: float = 0.0
    cosine: float = 0.5

    def largest(self, expected: Expected) -> float:
        """Compute the largest error of a tensor, relative to its weights."""
        return max(self.tensor * expected.made, expected.usual, self.moved)

    def steepest(self, expected: Expected) -> float:
        """Compute how far the slope of a tensor may be from the plain one."""
        return max(self.slope * expected.made, self.leaning) + SLOPE_FLOOR


FLOATS = Rise(tensor=1.0, row=1.0, slope=0.0)
"""Of types of floats, which round every weight by itself."""

PLAIN = Rise(tensor=1.05, row=2.0, slope=0.03)
"""Of a tensor that is not as the plain encoder makes it, in a file whose others are."""

WEIGHTED = Rise(tensor=1.6, row=12.0, slope=0.4)
"""Of importances. Measured on files of both models in examples/ and of SmolLM2-135M, of all types: tensors
have up to 1.37 (IQ4_KSS), blocks of a row 7.1 (Q6_K), slopes 0.28 (Q3_K). `scripts/measure/audit.py clean`
measures it anew."""

COARSEST = Rise(tensor=2.4, row=12.0, slope=0.7)
"""Of importances in IQ2_XXS: 1.83, and a slope of 0.53."""

TRELLIS = Rise(tensor=6.0, row=12.0, slope=1.8)
"""Of types with one scale a row: IQ4_KT has 4.6 where some columns matter far more than others."""

CALIBRATED = Rise(tensor=4.0, row=20.0, slope=1.0, moved=0.25, leaning=0.2, cosine=0.4)
"""Of calibrations: 2.8 (Q6_K, the output of a model whose hidden states have few directions), rows 7.5
(Q3_K), slopes 0.62 (Q3_K). Making up for earlier tensors moves weights at any type: by 9.3 % in a down of
SmolLM2-135M that is Q6_K, and by 18.3 % in an attn_v of a small random model. The larger the errors before,
the more the weights shrink: slopes of small random models at 3 bits have 0.15 (Q4_0) and 0.01 (Q8_0). A weak
row that makes up for strong ones keeps 0.49 of the plain cosine (Q2_K, an attn_q of a small random model)."""

SLOPE_FLOOR = 0.003


Encoder = Literal["plain", "importances", "calibrated"]
"""Way in which a file seems to have been encoded."""

PLAIN_SHARE = 0.8
"""Share of tensors with the plain encoder's bytes from which a file is taken to be made by it alone."""

RAISED = 1.12
"""Median of tensors' errors, in units of the plain encoder's, from which a file is taken to be calibrated, or
of an unknown encoder. Files with importances have 0.9 to 1.08, calibrated ones 1.13 and more."""


def encoder_of(expected: Sequence[Expected], metadata: Metadata) -> Encoder:
    """Tell what the encoded tensors of a file were encoded with: from its metadata, or from their errors."""
    if METHOD_KEY in metadata or REFINED_KEY in metadata:
        return "calibrated"
    # What any encoder gives back as it was says nothing of which one it was.
    telling = [each for each in expected if not each.is_on_grid] or expected
    has_importances = keys.QUANTIZE_IMATRIX_ENTRIES_COUNT in metadata
    n_plain = sum(each.is_plain for each in telling)
    if telling and not has_importances and n_plain / len(telling) >= PLAIN_SHARE:
        return "plain"
    ratios = [each.ratio for each in telling if not each.is_plain]
    return "calibrated" if ratios and float(np.median(ratios)) > RAISED else "importances"


def rise_of(type_: GGMLType, encoder: Encoder) -> Rise:
    """Say how far tensors of a type may depart from the plain encoding in a file."""
    if type_ in FLOAT_DTYPES:
        return FLOATS
    if encoder == "plain":
        return PLAIN
    if type_.name.endswith("_KT"):
        return TRELLIS
    if encoder == "calibrated":
        return CALIBRATED
    return COARSEST if type_.name.startswith("IQ2_XXS") else WEIGHTED


@dataclass(frozen=True)
class Expected:
    """Figures of a sample of a tensor's rows, as the encoder makes them and as the file has them.

    relative  error of the rows as the encoder makes them; the type's limit where there is no encoder
    usual     error that it makes of ordinary weights; 0 where that is not known
    cosine    of the angle between what it makes and the base's: that of these rows, or of ordinary ones
    slope     of the same rows
    measured  sums of the file's rows
    is_plain  whether the file's rows are the encoder's to the byte
    limits    what the type may do to any rows
    """

    relative: float
    usual: float
    cosine: float
    slope: float
    measured: Sums
    is_plain: bool
    limits: ErrorRange

    @property
    def made(self) -> float:
        """The error that the type makes: of these rows, or of ordinary ones where these lie on a grid."""
        return self.usual if self.is_on_grid else self.relative

    @property
    def is_on_grid(self) -> bool:
        """Whether the type loses so little of the base's weights that they must lie on a grid."""
        return self.relative < ON_A_GRID * self.usual

    @property
    def ratio(self) -> float:
        """The file's error in units of the encoder's, or of the usual one of a tensor on a grid."""
        unit = self.usual if self.is_on_grid else self.relative
        return float(self.measured.relative) / unit if unit else 1.0

    def ordinary(self, rise: Rise) -> Ordinary:
        """Say what a block of the tensor may be like, if its encoder departs so far from the plain one."""
        row = PLAIN_ROW if self.has_plain_rows(rise) else rise.row
        largest = max(row * self.made, self.usual)
        return Ordinary(largest, rise.cosine * self.cosine, self.limits.absolute)

    def has_plain_rows(self, rise: Rise) -> bool:
        """Whether all rows should be the plain encoder's, as those of the sample are.

        A calibration keeps stock's bytes where its own are no better: of some rows, or some experts.
        """
        return self.is_plain and rise != CALIBRATED


PLAIN_ROW = 2.0
"""Largest error of a row in units of the tensor's, where bytes are the plain encoder's. Measured: 1.6."""

ON_A_GRID = 0.85
"""Share of the usual error below which weights are taken to lie on a grid. Matrices of small-llama have 0.85
to 1.14 of it, at all types."""


@lru_cache(maxsize=256)
def usual_of(type_name: str) -> tuple[float, float]:
    """Compute the relative error, and the cosine, that a type leaves of ordinary weights: normal ones."""
    rows = np.random.default_rng(0).standard_normal((32, 1024)).astype(np.float32)
    encoded = as_encoded(by_name(type_name), rows)
    if encoded is None:
        return 0.0, 1.0
    sums = Sums.of(rows, encoded[1]).over()
    return float(sums.relative), float(sums.cosine)


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
    parts = [tensor.read_rows(*run).astype(np.float32, copy=False) for run in consecutive_runs(rows)]
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
        return Expected(relative, 0.0, 1.0, 1.0, measured, np.array_equal(wanted, found), limits)
    encoded = as_encoded(info.type, wanted)
    if encoded is None:
        return Expected(min(limits.relative, 1.0), 0.0, PLAIN.cosine, 1.0, measured, False, limits)
    plain = Sums.of(wanted, encoded[1]).over()
    slope = float(plain.slope) if plain.found else 1.0
    raw = np.concatenate([stored.raw_rows(*run) for run in consecutive_runs(rows)])
    same = not differing_blocks(info.type, encoded[0], raw, len(rows)).any()
    usual, cosine = usual_of(info.type.name)
    least = min(float(plain.cosine), cosine)
    return Expected(float(plain.relative), usual, least, slope, measured, same, limits)
