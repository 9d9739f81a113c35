"""AWQ: 4-bit codes with a scale and a zero point per group of columns, in four layouts.

    weight[i, j] = (code[i, j] - zero[g, i]) * scale[g, i]        g = j // group_size

GEMM, the usual one. Eight outputs share a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 (low first):

    X.qweight  I32    (n_cols, n_rows / 8)
    X.qzeros   I32    (n_groups, n_rows / 8)    may be missing: all 8
    X.scales   float  (n_groups, n_rows)

GEMV. Codes low first along a row, groups padded to a multiple of 8:

    X.qweight  I32    (n_rows, n_cols / 8)
    X.qzeros   I32    (n_rows, n_words)
    X.scales   float  (n_rows, 8 * n_words)

GEMV fast (llm-awq's second). Tiles of 4 rows and 64 columns; what is stored as zeros is -scale * zero:

    X.qweight  I16    (n_rows / 4, n_cols)
    X.qzeros   float  (8 * n_words, n_rows)
    X.scales   float  (8 * n_words, n_rows)

    weight[i, j] = code[i, j] * scale[g, i] + stored_zero[g, i]

Marlin's layout has no qzeros; see `convert.weights.schemes.marlin`.

Zero points are whole numbers, so the first formula rounds once, in the product. A half-precision scale times
a code is exact in float32, so the second rounds once, in the sum. The shapes show which layout it is. A row
range is read as the columns that hold it: whole words of 8 outputs in GEMM, tiles of 4 rows in GEMV fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import check_matrix, check_scales, group_size_of, read_scales, scaled
from convert.weights.schemes.marlin import marlin_weight
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint

BITS = 4
PER_WORD = 8
ORDER = np.array((0, 2, 4, 6, 1, 3, 5, 7))
"""Output, of the eight in a word, that field k belongs to."""


@dataclass(frozen=True, slots=True)
class AwqGemmWeight(Decoded):
    """A matrix in the GEMM layout: qweight, qzeros (None: all 8) and scales."""

    codes: RawTensor
    zeros: RawTensor | None
    scales: RawTensor
    group_size: int
    by_rows: ClassVar[bool] = False

    @property
    def stored_as(self) -> str:
        return f"AWQ GEMM 4 bits in groups of {self.group_size}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        codes = _read_interleaved(self.codes, start, stop)
        zeros: np.ndarray | int = 1 << (BITS - 1)
        if self.zeros is not None:
            zeros = _read_interleaved(self.zeros, start, stop).astype(np.float32)
        return scaled(codes, zeros, read_scales(self.scales, start, stop), self.group_size)


def _read_interleaved(raw: RawTensor, start: int, stop: int) -> np.ndarray:
    """Return outputs `start` to `stop` of a tensor packed along its rows, uint8 (stop - start, n_rows)."""
    from convert.weights.kernels import unpack_across

    first = start // PER_WORD
    words = raw.read_columns(first, -(-stop // PER_WORD)).view(np.uint32).T
    codes = np.empty((PER_WORD * words.shape[0], words.shape[1]), np.uint8)
    unpack_across(np.ascontiguousarray(words), ORDER, codes)
    return codes[start - first * PER_WORD : stop - first * PER_WORD]


@dataclass(frozen=True, slots=True)
class AwqGemvWeight(Decoded):
    """A matrix in the GEMV layout: qweight, qzeros and scales, all with an output per row."""

    codes: RawTensor
    zeros: RawTensor
    scales: RawTensor
    group_size: int

    @property
    def stored_as(self) -> str:
        return f"AWQ GEMV 4 bits in groups of {self.group_size}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        from convert.weights.kernels import unpack

        n_cols = self.shape[1]
        n_groups = -(-n_cols // self.group_size)
        codes = unpack(self.codes.read_rows(start, stop), BITS, n_cols)
        zeros = unpack(self.zeros.read_rows(start, stop), BITS, n_groups).astype(np.float32)
        scales = self.scales.read_rows(start, stop)[:, :n_groups].astype(np.float32)
        return scaled(codes, zeros, scales, self.group_size)


FAST_ROWS, FAST_COLS = 4, 64


@dataclass(frozen=True, slots=True)
class AwqGemvFastWeight(Decoded):
    """A matrix in the layout of the fast GEMV: qweight in tiles, -scale * zero, and scales."""

    codes: RawTensor
    zeros: RawTensor
    scales: RawTensor
    group_size: int
    by_rows: ClassVar[bool] = False

    @property
    def stored_as(self) -> str:
        return f"AWQ GEMV fast 4 bits in groups of {self.group_size}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        from convert.weights.kernels import scale_and_add_groups, unpack, untile

        n_cols = self.shape[1]
        n_groups = -(-n_cols // self.group_size)
        first, last = start // FAST_ROWS, -(-stop // FAST_ROWS)
        stored = unpack(self.codes.read_rows(first, last), BITS, FAST_ROWS * n_cols)
        codes = np.empty((FAST_ROWS * (last - first), n_cols), np.uint8)
        tiles = stored.reshape(last - first, n_cols // FAST_COLS, FAST_ROWS * FAST_COLS)
        untile(tiles, _fast_places(), codes)
        codes = codes[start - first * FAST_ROWS : stop - first * FAST_ROWS]
        scales = read_scales(self.scales, start, stop)[:, :n_groups]
        addends = read_scales(self.zeros, start, stop)[:, :n_groups]
        out = np.empty((stop - start, n_cols), np.float32)
        scale_and_add_groups(codes, addends, scales, self.group_size, out)
        return out


def _fast_places() -> np.ndarray:
    """Return where in a tile's 256 codes each (row, column) stands, uint32 (4, 64).

    A tile is four rows one after the other. In a row, 32 columns at a time, eight columns are stored in
    ORDER; before that the 16 pairs of columns, seen as a 4x4 matrix, were transposed.
    """
    columns = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(4, 8)
    stored = columns[:, ORDER].reshape(32)
    place = np.argsort(stored)
    row = np.concatenate([place, 32 + place])
    return (np.arange(FAST_ROWS)[:, None] * FAST_COLS + row).astype(np.uint32)


# ---- loading


def gemm_weight(module: Module) -> AwqGemmWeight:
    """Return the weight whose tensors have the GEMM layout, after checking that they fit each other."""
    codes, scales, zeros = module[".qweight"], module[".scales"], module.get(".qzeros")
    _checked(module)
    check_scales(scales)
    n_groups, n_rows = scales.shape
    if codes.dtype != "I32" or codes.shape[1:] != (n_rows // PER_WORD,):
        raise module.wrong(
            codes,
            f"{codes.dtype} {codes.shape}",
            f"I32 with {n_rows // PER_WORD} columns for {n_rows} outputs",
        )
    if zeros is not None and (zeros.dtype != "I32" or zeros.shape != (n_groups, codes.shape[1])):
        raise module.wrong(zeros, f"{zeros.dtype} {zeros.shape}", f"I32 {(n_groups, codes.shape[1])}")
    n_cols = codes.shape[0]
    size = group_size_of(module, n_cols, n_groups)
    return AwqGemmWeight(module.name, (n_rows, n_cols), codes, zeros, scales, size)


def _load_gemv(module: Module) -> AwqGemvWeight:
    codes, scales, zeros = module[".qweight"], module[".scales"], module[".qzeros"]
    _checked(module)
    check_scales(scales)
    check_matrix(module, zeros, "I32")
    n_rows, n_cols = codes.shape[0], PER_WORD * codes.shape[1]
    size = _padded_group_size(module, n_cols)
    needed = -(-n_cols // size)
    if zeros.shape[0] != n_rows or PER_WORD * zeros.shape[1] < needed:
        raise module.wrong(zeros, f"shape {zeros.shape}", f"at least {needed} groups of {n_rows} rows")
    if scales.shape[1] < needed:
        raise module.wrong(scales, f"shape {scales.shape}", f"at least {needed} groups")
    return AwqGemvWeight(module.name, (n_rows, n_cols), codes, zeros, scales, size)


def _load_gemv_fast(module: Module) -> AwqGemvFastWeight:
    codes, scales, zeros = module[".qweight"], module[".scales"], module[".qzeros"]
    _checked(module)
    for raw in (scales, zeros):
        check_scales(raw)
    n_rows, n_cols = FAST_ROWS * codes.shape[0], codes.shape[1]
    size = _padded_group_size(module, n_cols)
    needed = -(-n_cols // size)
    for raw in (scales, zeros):
        if raw.shape[1] != n_rows or raw.shape[0] < needed:
            raise module.wrong(raw, f"shape {raw.shape}", f"at least {needed} groups of {n_rows} rows")
    if n_cols % FAST_COLS:
        raise module.wrong(codes, f"{n_cols} columns", f"a multiple of {FAST_COLS}")
    return AwqGemvFastWeight(module.name, (n_rows, n_cols), codes, zeros, scales, size)


def _padded_group_size(module: Module, n_cols: int) -> int:
    """Return the configured group size; the padded shapes don't give the number of groups."""
    size = module.settings.integer("group_size", "q_group_size")
    if size is None or size == 0 or size < -1:
        raise CheckpointError(
            f"{module.checkpoint.folder}: {module.stem}: {module.settings.where('group_size')} is {size},"
            " expected the group size, which this layout of AWQ doesn't show"
        )
    return n_cols if size == -1 else size


def _checked(module: Module) -> Module:
    """Return the module; UnsupportedCheckpoint where the settings say that its codes have other bits."""
    bits = module.settings.integer("bits", "w_bit")
    if bits not in (None, BITS):
        raise UnsupportedCheckpoint(
            f"{module.settings.where('bits')} is {bits}, which is not read for AWQ (read: {BITS});"
            f" first tensor: {module['.qweight'].name}"
        )
    return module


def _is_matrix(module: Module, dtype: str) -> bool:
    codes, scales = module[".qweight"], module.get(".scales")
    return codes.dtype == dtype and scales is not None and len(codes.shape) == len(scales.shape) == 2


def _is_marlin(module: Module) -> bool:
    return (
        _is_matrix(module, "I32")
        and not module.has(".qzeros")
        and module[".qweight"].shape[1] == 2 * module[".scales"].shape[1]
    )


def _is_gemm(module: Module) -> bool:
    if module.settings.method == "awq":
        return module[".qweight"].dtype == "I32"
    return _is_matrix(module, "I32") and PER_WORD * module[".qweight"].shape[1] == module[".scales"].shape[1]


_SIDES = (".qzeros", ".scales")

LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("AWQ marlin", ("awq",), ".qweight", _SIDES,
                  lambda module: marlin_weight(_checked(module), ".qweight", ".scales"), _is_marlin),
    WeightsLoader("AWQ GEMV fast", ("awq",), ".qweight", _SIDES, _load_gemv_fast, lambda module: (
        _is_matrix(module, "I16") and FAST_ROWS * module[".qweight"].shape[0] == module[".scales"].shape[1]
    )),
    WeightsLoader("AWQ GEMV", ("awq",), ".qweight", _SIDES, _load_gemv, lambda module: (
        _is_matrix(module, "I32") and module[".qweight"].shape[0] == module[".scales"].shape[0]
    )),
    WeightsLoader("AWQ GEMM", ("awq",), ".qweight", _SIDES, gemm_weight, _is_gemm),
)  # fmt: skip
