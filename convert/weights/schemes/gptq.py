"""GPTQ: codes packed along the input axis, with scales and zero points per group of columns.

    X.qweight  I32    (ceil(n_cols * bits / 32), n_rows)     codes of one output, low first, down a column
    X.qzeros   I32    (n_groups, ceil(n_rows * bits / 32))   zero points, low first, along a row
    X.scales   float  (n_groups, n_rows)
    X.g_idx    I32    (n_cols,)                              group of every column

    weight[i, j] = (code[i, j] - zero[g, i]) * scale[g, i]        g = g_idx[j]

The difference is exact, so the product is the exact value rounded once to float32. With act-order g_idx jumps
from group to group, but columns keep their order. Groups are runs of columns where there is no g_idx, or
where it is a placeholder: all zero, though there are several groups.

2, 3, 4 and 8 bits are one stream of bits, low first. GPTQModel's `gptq_p`, which is also what 5, 6 and 7
bits are stored in, splits codes into planes (see `unpack_planes`). `bits` follows from the shapes, module
by module: that honours every spelling of mixed widths.

Zero points are stored as they are in `gptq_v2` and `gptq_p`, and less one otherwise (v1). Writers of v1
subtract 1 from every field of a whole word at once, so a zero point of 0 borrows from the next field. Adding
the same constant to the word undoes that; adding 1 field by field would not. 3-bit fields, which cross words,
are counted modulo 8.

A row range of the weight is a column range of `qweight`, `qzeros` and `scales`. All of g_idx is read for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import check_scales, group_size_of, read_scales, scaled
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from gguf_tools.text import quoted

LAYOUTS = {None: 1, "gptq": 1, "gptq_v2": 0, "gptq_p": 0}
"""Value of checkpoint_format -> number to add to stored zero points."""

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
PLANAR_WIDTHS = (5, 6, 7)
SIDES = (".qzeros", ".scales", ".g_idx")

# 1 in every field of a 32-bit word.
_ONES = {2: np.uint32(0x55555555), 4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


@dataclass(frozen=True, slots=True)
class GptqWeight(Decoded):
    """A matrix in GPTQ's packing.

    codes, zeros, scales, groups  qweight, qzeros (None: all in the middle), scales, g_idx (None: runs)
    bits                          of a code
    planar                        codes are split into planes
    zero_offset                   what to add to stored zero points
    group_size                    columns in a group; 0 where `groups` says which columns these are
    """

    codes: RawTensor
    zeros: RawTensor | None
    scales: RawTensor
    groups: RawTensor | None
    bits: int
    planar: bool
    zero_offset: int
    group_size: int
    by_rows: ClassVar[bool] = False

    @property
    def stored_as(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else f"{self.scales.shape[0]} groups"
        return f"GPTQ {self.bits} bits in {groups}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        n_cols = self.shape[1]
        codes = self._unpack(np.ascontiguousarray(self.codes.read_columns(start, stop).T), n_cols)
        scales = read_scales(self.scales, start, stop)
        zeros = self._read_zeros(start, stop)
        groups = self._read_groups()
        return scaled(codes, zeros, scales, self.group_size if groups is None else groups)

    def _unpack(self, words: np.ndarray, n_codes: int) -> np.ndarray:
        from convert.weights.kernels import unpack, unpack_planes

        return (unpack_planes if self.planar else unpack)(words, self.bits, n_codes)

    def _read_zeros(self, start: int, stop: int) -> np.ndarray:
        """Return the zero points of these rows, float32 (stop - start, n_groups)."""
        n_groups = self.scales.shape[0]
        if self.zeros is None:
            return np.full((stop - start, n_groups), 1 << (self.bits - 1), np.float32)
        # 32 codes fill `bits` words, whatever the width.
        first = start // 32 * self.bits
        last = min(-(-stop // 32) * self.bits, self.zeros.shape[1])
        words = self.zeros.read_columns(first, last).view(np.uint32)
        skip = start % 32
        if self.zero_offset and self.bits in _ONES:
            words = words + _ONES[self.bits]
        zeros = self._unpack(words, skip + stop - start)[:, skip:]
        if self.zero_offset and self.bits not in _ONES:
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return np.ascontiguousarray(zeros.T, np.float32)

    def _read_groups(self) -> np.ndarray | None:
        """Return the group of every column, uint32, or None where groups are runs of `group_size`."""
        if self.groups is None:
            return None
        groups = self.groups.read()
        n_groups = self.scales.shape[0]
        if not groups.any() and n_groups > 1 and self.group_size:
            return None
        if groups.size and not 0 <= groups.min() <= groups.max() < n_groups:
            bad = int(groups[(groups < 0) | (groups >= n_groups)][0])
            raise CheckpointError(
                f"{self.groups.path}: {self.groups.name}: group {bad}, expected 0 to {n_groups - 1}"
            )
        if self.group_size and np.array_equal(groups, np.arange(groups.size) // self.group_size):
            return None
        return groups.astype(np.uint32)


def gptq_weight(module: Module, zero_offset: int, *, planar: bool = False) -> GptqWeight:
    """Return the weight whose tensors have GPTQ's names, after checking that they fit each other.

    zero_offset  what to add to stored zero points
    planar       codes are split into planes
    """
    codes, scales = module[".qweight"], module[".scales"]
    zeros, groups = module.get(".qzeros"), module.get(".g_idx")
    check_scales(scales)
    if codes.dtype != "I32" or len(codes.shape) != 2:
        raise UnsupportedCheckpoint(
            f"{codes.path}: {codes.name}: GPTQ codes packed in {codes.dtype} {codes.shape}, expected a matrix"
            f" of I32 ({module.settings.where('pack_dtype')})"
        )
    n_groups, n_rows = scales.shape
    if codes.shape[1] != n_rows:
        raise module.wrong(codes, f"shape {codes.shape}", f"{n_rows} columns as in {scales.name}")
    if groups is not None and (len(groups.shape) != 1 or groups.dtype not in ("I32", "I64")):
        raise module.wrong(groups, f"{groups.dtype} {groups.shape}", "one I32 per column")
    bits = _bits(module, codes, zeros, groups, n_rows)
    n_cols = groups.shape[0] if groups is not None else codes.shape[0] * 32 // bits
    if zeros is not None and zeros.shape != (n_groups, -(-n_rows * bits // 32)):
        raise module.wrong(
            zeros, f"shape {zeros.shape}", f"{(n_groups, -(-n_rows * bits // 32))} for {bits} bits"
        )
    try:
        group_size = group_size_of(module, n_cols, n_groups)
    except CheckpointError:
        if groups is None:
            raise
        group_size = 0
    return GptqWeight(
        module.name, (n_rows, n_cols), codes, zeros, scales, groups, bits,
        planar or bits in PLANAR_WIDTHS, zero_offset, group_size,
    )  # fmt: skip


def _bits(
    module: Module, codes: RawTensor, zeros: RawTensor | None, groups: RawTensor | None, n_rows: int
) -> int:
    """Return the width of the codes that the shapes allow; of several, the one that the settings give."""
    n_words = codes.shape[0]
    said = module.settings.integer("bits", "w_bit")
    if groups is not None:
        fit = [bits for bits in WIDTHS if n_words == -(-groups.shape[0] * bits // 32)]
        reason = f"{groups.shape[0]} columns in {n_words} words"
    elif zeros is not None and len(zeros.shape) == 2:
        fit = [bits for bits in WIDTHS if zeros.shape[1] == -(-n_rows * bits // 32)]
        reason = f"{n_rows} zero points in {zeros.shape[1]} words"
    else:
        fit = [bits for bits in WIDTHS if said in (None, bits)]
        reason = "no zero points and no g_idx"
    if said in fit:
        return said
    if len(fit) == 1:
        return fit[0]
    raise CheckpointError(
        f"{codes.path}: {module.stem}: {reason} fit {' or '.join(map(str, fit)) or 'no number of'} bits,"
        f" expected {module.settings.where('bits')} ({said})"
    )


def _load(module: Module) -> GptqWeight:
    layout = module.settings.get("checkpoint_format", "format")
    if not isinstance(layout, str | None) or layout not in LAYOUTS:
        raise UnsupportedCheckpoint(
            f"{module.settings.where('checkpoint_format')} is {quoted(layout)}, which is not read for GPTQ"
            f" (read: {', '.join(str(name) for name in LAYOUTS if name)}, marlin, marlin_24); first tensor:"
            f" {module['.qweight'].name}"
        )
    return gptq_weight(module, LAYOUTS[layout], planar=layout == "gptq_p")


def _fits(module: Module) -> bool:
    if module.settings.method == "gptq":
        return True
    codes, scales = module[".qweight"], module.get(".scales")
    return (
        scales is not None
        and codes.dtype == "I32"
        and len(codes.shape) == len(scales.shape) == 2
        and codes.shape[1] == scales.shape[1]
    )


LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("GPTQ", ("gptq",), ".qweight", SIDES, _load, _fits, last=True),
)  # fmt: skip
