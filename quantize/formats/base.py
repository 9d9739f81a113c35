"""The contract of a codec, and what nearly all codecs do around their kernels.

A codec turns rows of floats into the bytes of one ggml type, and such bytes into rows of float32. It is a
`QuantFormat`, one of the `FORMATS` at the end of its module. The docstring of what decodes the bytes tells
their layout; where a module is about a single type, its own docstring does. Most formats are made from the
kernels alone, with `block_format`, `ik_format` of ik/rows.py or `trellis_format` of ik/trellis/encoding.py.
Where blocks are read by their fields, `block_dtype` says which there are.

`encode(rows, weighting)` returns uint8 (n_rows, row bytes), C-contiguous, in little-endian order:

  - It checks what it is given, and raises ShapeError if rows are not two-dimensional or not of ROW_DTYPES, if
    a row is not a whole number of blocks, if the rows are not whole groups (`type.rows_interleaved`), or if
    the weighting is not for so many columns. `check_rows` does all that.
  - A type that requires importances raises NeedsImportance where the weighting is None. A type that ignores
    them checks the weighting and leaves it at that.
  - It raises BlockRefused, naming row and columns, for what the type can't hold: a NaN, an infinity, or
    squared errors beyond float32 in a search. Only F32, F16 and BF16 take all floats. Where weights are so
    large that a scale comes out as NaN or infinity, `QuantFormat.encode` raises it. That is what callers use.
  - A row's bytes depend on that row (of interleaved rows, on its group) and the weighting. They are the same
    in every process, thread and call, and on every machine. `rows` is left as it is; the bytes may be a view
    of it.

`decode(data, n_cols)` takes uint8 (n_rows, row bytes), whatever the bytes are, and returns float32
(n_rows, n_cols), the numbers that ggml's decoder gives. It raises ShapeError if n_cols columns do not take
so many bytes. The result may be a view of `data`.

A module of types that can only be decoded has `DECODERS`, by name.

Two modules may make the same bytes, but each serves one type: its id in the file is all that a reader knows.

Kernels see flat arrays: numba compiles a kernel once for each type of its arguments, so `as_source` gives
all rows of a dtype the same one. An encoding kernel fills the bytes it is handed and returns -1, or it
returns the number of the first block that it can't encode, and leaves the rest undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadWeights, NeedsImportance, ShapeError
from gguf_tools.format.block_layouts import LAYOUTS
from gguf_tools.format.ggml_types import GGMLType
from quantize.importances.weighting import Weighting

Rows = npt.NDArray[Any]
"""(n_rows, n_cols) of ROW_DTYPES."""

ROW_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_SOURCE_ITEMS = dict(zip(ROW_DTYPES, (np.float32, np.int16, np.uint16), strict=True))

Floats32 = npt.NDArray[np.float32]

Bytes = npt.NDArray[np.uint8]

Decode = Callable[[Bytes, int], Floats32]
"""A function decode(data, n_cols), as the contract has it."""


_BITS = {"f2": "<u2", "b2": "<u2", "e1": "u1"}


@cache
def block_dtype(type_: GGMLType) -> np.dtype[Any]:
    """Return the dtype of a type's blocks; floats of 16 and 8 bits are integers, as kernels read them."""
    fields: list[tuple[str, str, int]] = []
    for field in LAYOUTS[type_.name].block:
        kind, count = ("u2", 4) if field.kind == "m8" else (field.kind, field.count)
        fields.append((field.name, _BITS.get(kind, f"<{kind}"), count))
    return np.dtype([(name, kind) if count == 1 else (name, kind, count) for name, kind, count in fields])


class BlockRefused(BadWeights):
    """Weights that a type can't hold.

    type_  name of the type
    row    of the rows that were to be encoded
    what   the columns, and what is wrong there
    """

    def __init__(self, type_: str, row: int, what: str) -> None:
        super().__init__(f"{type_}: row {row}{what}")
        self.type_, self.row, self.what = type_, row, what

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockRefused, (self.type_, self.row, self.what)

    def within(self, tensor: str, first: int) -> BadWeights:
        """Return the same error about a tensor whose rows from `first` on these were."""
        return BadWeights(f"{tensor}: {self.type_}: row {first + self.row}{self.what}")


@dataclass(frozen=True)
class QuantFormat:
    """A codec between float rows and the bytes of one ggml type; the module says what both functions owe.

    make  is `encode` of the module
    """

    type: GGMLType
    make: Callable[[Rows, Weighting | None], Bytes]
    decode: Decode

    def encode(self, rows: Rows, weighting: Weighting | None) -> Bytes:
        """Return rows as the bytes of the type, all scales of which are finite numbers.

        Importances that are so large that a search would overflow are made smaller, all by the same factor.
        raises  what the contract says
        """
        data = self.make(rows, None if weighting is None else weighting.in_range())
        check_scales(self.type, rows, data)
        return data


def check_scales(type_: GGMLType, rows: Rows, data: Bytes) -> None:
    """Raise BlockRefused if a scale of encoded rows is NaN or infinite; llama-quantize refuses these, too.

    rows  that were encoded
    data  uint8 (n_rows, row bytes)
    """
    from quantize.formats.finite import first_bad_scale

    found = first_bad_scale(type_, data)
    if found is None:
        return
    row, block = found
    whole_row = type_.row_meta_bytes or type_.rows_interleaved > 1
    n_elems = rows.shape[1] if whole_row else type_.block_elems
    raise _too_large(rows, type_, row, block * n_elems, n_elems)


def _too_large(rows: Rows, type_: GGMLType, row: int, first: int, n_elems: int) -> BlockRefused:
    weights = rows[row, first : first + n_elems].astype(np.float64)
    where = f", column {first}" if n_elems == 1 else f", columns {first} to {first + n_elems - 1}"
    largest = float(weights[np.argmax(np.abs(weights))])  # a NaN if there is one
    if not np.isfinite(largest):
        return BlockRefused(type_.name, row, f"{where}: a weight is not a finite number")
    found = f"the weight is {largest:g}" if n_elems == 1 else f"the largest weight is {largest:g}"
    limit = "" if type_.name != "F16" else " (65504)"
    return BlockRefused(
        type_.name,
        row,
        f"{where}: {found}, beyond the range of {type_.name}{limit}; choose BF16 or F32 for the tensor",
    )


def as_source(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return rows as the flat array that kernels read, without a copy when they are C-contiguous and aligned.

    numba has no 16-bit floats, so their bits travel as integers, and the integer's type says which they are:
    float32 as it is, bfloat16 as uint16, float16 as int16. The array is read-only, whether rows are or not:
    these are two types to numba, and a kernel would be compiled for each.
    """
    if not (rows.flags.c_contiguous and rows.flags.aligned):
        rows = np.require(rows, requirements=["C", "A"])
    source = rows.reshape(-1).view(_SOURCE_ITEMS[rows.dtype])
    source.flags.writeable = False
    return source


def as_floats(rows: Rows) -> Floats32:
    """Return rows as the flat array of float32 that kernels read; halves are widened, exactly."""
    source = as_source(rows)
    if source.dtype == np.float32:
        return source
    from quantize.simd.tiles import widen

    widened = np.empty(source.size, np.float32)
    widen(source, widened)
    return as_source(widened)


def check_rows(rows: Rows, weighting: Weighting | None, type_: GGMLType) -> None:
    """Raise ShapeError unless `rows` can be encoded as `type_`, and `weighting` is one of such rows."""
    if rows.ndim != 2:
        raise ShapeError(f"{type_.name}: rows must have 2 dimensions, found shape {rows.shape}")
    if rows.dtype not in ROW_DTYPES:
        raise ShapeError(f"{type_.name}: rows must be float32, float16 or bfloat16, found {rows.dtype}")
    n_rows, n_cols = rows.shape
    if n_cols % type_.block_elems:
        raise ShapeError(f"{type_.name}: row length {n_cols} is not a multiple of {type_.block_elems}")
    _check_groups(n_rows, type_)
    if weighting is not None:
        values = weighting.values
        if values.shape != (n_cols,) or values.dtype != np.float32:
            raise ShapeError(
                f"{type_.name}: importances must be float32 ({n_cols},), found {values.dtype} {values.shape}"
            )


def check_data(data: Bytes, n_cols: int, type_: GGMLType) -> None:
    """Raise ShapeError unless `data` are rows of `n_cols` columns as `type_`, and whole groups of them."""
    expected = type_.row_bytes(n_cols)
    if data.ndim != 2 or data.dtype != np.uint8 or data.shape[1] != expected:
        raise ShapeError(
            f"{type_.name}: data of rows of {n_cols} must be uint8 (n_rows, {expected}),"
            f" found {data.dtype} {data.shape}"
        )
    _check_groups(len(data), type_)


def _check_groups(n_rows: int, type_: GGMLType) -> None:
    if n_rows % type_.rows_interleaved:
        raise ShapeError(f"{type_.name}: {n_rows} rows are no multiple of {type_.rows_interleaved}")


def encode_blocks(
    rows: Rows,
    weighting: Weighting | None,
    type_: GGMLType,
    plain: Callable[..., int] | None = None,
    weighted: Callable[..., int] | None = None,
    tables: tuple[Any, ...] = (),
) -> Bytes:
    """Return `rows` as blocks one after the other, made by one of two kernels.

    plain     called without importances: plain(source, *tables, out); None: there must be importances
    weighted  called with: weighted(source, importances, *tables, out); None: they are not used
    tables    constants of the kernels

    source and importances are those of `as_source`, out is uint8 of all bytes. To `weighted`, source is
    float32 whatever the rows are: such a search takes seconds to compile, and so long to run that widening
    halves takes 1 to 8 % of it.
    raises    what the contract says
    """
    check_rows(rows, weighting, type_)
    data = np.empty((len(rows), type_.row_bytes(rows.shape[1])), np.uint8)
    out = data.reshape(-1)
    if weighted is not None and weighting is not None:
        failure = weighted(as_floats(rows), as_source(weighting.values), *tables, out)
    elif plain is not None:
        failure = plain(as_source(rows), *tables, out)
    else:
        raise NeedsImportance(f"{type_.name}: this type needs importances; give an importance matrix")
    if failure >= 0:
        raise _refusal(rows, type_, failure)
    return data


def _refusal(rows: Rows, type_: GGMLType, number: int) -> BlockRefused:
    """Return the error for block `number` of `rows`."""
    row, first = divmod(number * type_.block_elems, rows.shape[1])
    stop = first + type_.block_elems
    if np.isfinite(rows[row, first:stop].astype(np.float32)).all():
        reason = (
            "weights or importances are so large that squared errors overflow float32 (llama.cpp aborts"
            " here); choose another type"
        )
    else:
        reason = "a weight is not a finite number"
    return BlockRefused(type_.name, row, f", columns {first} to {stop - 1}: {reason}")


def decode_blocks(
    data: Bytes,
    n_cols: int,
    type_: GGMLType,
    kernel: Callable[..., None],
    tables: tuple[Any, ...] = (),
    item: npt.DTypeLike = np.uint8,
) -> Floats32:
    """Return the rows of blocks that stand one after the other.

    kernel  called as kernel(blocks, *tables, out): blocks are all bytes as one read-only array of `item`,
            out is float32 of all weights
    """
    check_data(data, n_cols, type_)
    rows = np.empty((len(data), n_cols), np.float32)
    blocks = np.ascontiguousarray(data).reshape(-1).view(item)
    blocks.flags.writeable = False
    kernel(blocks, *tables, rows.reshape(-1))
    return rows


def as_blocks(data: Bytes, n_cols: int, type_: GGMLType, block: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the bytes of rows as their blocks, (n_blocks,) of `block`."""
    check_data(data, n_cols, type_)
    return np.ascontiguousarray(data).reshape(-1).view(block)


def block_format(
    type_: GGMLType,
    decode: Callable[..., None],
    plain: Callable[..., int] | None = None,
    weighted: Callable[..., int] | None = None,
    *,
    tables: Callable[[], tuple[Any, ...]] = tuple,
    decode_tables: Callable[[], tuple[Any, ...]] = tuple,
    item: npt.DTypeLike = np.uint8,
) -> QuantFormat:
    """Return the codec of a type whose blocks stand one after the other, from its kernels.

    Types of llama.cpp get the bytes of ggml's quantize_q4_0, quantize_q4_K and so on.

    decode, item     the kernel and the items of `decode_blocks`
    plain, weighted  the kernels of `encode_blocks`
    tables           called for the constants of plain and weighted when they are first needed
    decode_tables    called for those of decode
    """

    def encode_rows(rows: Rows, weighting: Weighting | None) -> Bytes:
        return encode_blocks(rows, weighting, type_, plain, weighted, tables())

    def decode_rows(data: Bytes, n_cols: int) -> Floats32:
        return decode_blocks(data, n_cols, type_, decode, decode_tables(), item)

    return QuantFormat(type_, encode_rows, decode_rows)
