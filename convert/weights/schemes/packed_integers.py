"""Integers packed into 32-bit words: compressed-tensors' pack-quantized, 1 to 8 bits (Kimi-K2's int4).

    X.weight_packed      I32 (rows, words)  codes along the columns, a code being q + 2 ** (bits - 1)
    X.weight_scale       float, per tensor, row or group of columns, see convert.weights.scales
    X.weight_shape       I64 or I32 (2,)    rows and columns without padding
    X.weight_zero_point  I32 (words, groups) packed along the rows, stored like the codes; or I8 (rows,
                         groups), unpacked; missing where quantization is symmetric
    X.weight_g_idx       I32 (cols,)        the group of every column (act-order); -1 in it: not used

    weight[i, j] = (code[i, j] - zero[i, group]) * scale[i, group], zero 2 ** (bits - 1) where none is stored

The difference is exact, so the product is the exact value rounded once.

Codes of 1, 2, 4 and 8 bits stand in a word lowest first. For the other widths version 0.18 of the library
changed the packing: from as many whole codes as fit a word, its top bits unused, to one stream of bits. The
two differ in the number of words; where they don't, `version` tells. How many bits there are follows from the
shapes, among the `num_bits` that the configuration mentions: several groups of modules may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import ScaleGrid, scale_grid
from gguf_tools.errors import UnsupportedCheckpoint

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Packing:
    """The way in which codes are packed into words.

    bits   width of a code
    dense  one stream of bits; otherwise a word has whole codes only, which is the same for 1, 2, 4 and 8 bits
    """

    bits: int
    dense: bool

    def n_words(self, n_codes: int) -> int:
        if self.dense:
            return ceil(n_codes * self.bits / WORD_BITS)
        return ceil(n_codes / (WORD_BITS // self.bits))

    @property
    def unit(self) -> tuple[int, int]:
        """The smallest number of codes that fill whole words, and how many words."""
        return (WORD_BITS, self.bits) if self.dense else (WORD_BITS // self.bits, 1)

    def unpack(self, words: np.ndarray, n_codes: int) -> np.ndarray:
        """Return the codes of every row of `words`, int32 (n_rows, n_words), as uint8 (n_rows, n_codes)."""
        from convert.weights.kernels import unpack

        if self.dense:
            return unpack(words, self.bits, n_codes)
        per_word = WORD_BITS // self.bits
        shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(self.bits)
        fields = words.view(np.uint32)[:, :, None] >> shifts & np.uint32(2**self.bits - 1)
        codes = fields.astype(np.uint8).reshape(len(words), per_word * words.shape[1])
        return np.ascontiguousarray(codes[:, :n_codes])


@dataclass(frozen=True, slots=True)
class PackedWeight(Decoded):
    """A matrix of integers in words.

    packed   I32 (rows, words)
    packing  how codes stand in them, those of the zero points too
    scales   per tensor, row or group
    zeros    as stored, None where quantization is symmetric
    g_idx    group of every column, None where groups are runs of columns

    Reading any rows reads all of g_idx, and packed zero points with all rows in the same words.
    """

    packed: RawTensor
    packing: Packing
    scales: ScaleGrid
    zeros: RawTensor | None
    g_idx: RawTensor | None

    @property
    def stored_as(self) -> str:
        order = ", act-order" if self.g_idx is not None else ""
        return f"int{self.packing.bits} {self.scales.described}{order}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import scale_columns, scale_groups

        n_cols = self.shape[1]
        codes = self.packing.unpack(self.packed.read_rows(start, stop), n_cols)
        scales = self.scales.of_rows(start, stop)
        zeros = self._zeros(start, stop, scales.shape)
        rows = np.empty((stop - start, n_cols), np.float32)
        groups = self._groups()
        if groups is None:
            scale_groups(codes, zeros, scales, self.scales.block[1], rows)
        else:
            scale_columns(codes, groups, zeros, scales, rows)
        return rows

    def _zeros(self, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the zero points of rows `start` to `stop`, float32 in the shape of their scales."""
        middle = np.float32(2 ** (self.packing.bits - 1))
        if self.zeros is None:
            return np.full(shape, middle, np.float32)
        if self.zeros.dtype == "I8":
            return np.ascontiguousarray(self.zeros.read_rows(start, stop).astype(np.float32) + middle)
        unit_rows, unit_words = self.packing.unit
        first, last = start // unit_rows, -(-stop // unit_rows)
        words = self.zeros.read_rows(first * unit_words, min(last * unit_words, self.zeros.n_rows))
        codes = self.packing.unpack(np.ascontiguousarray(words.T), stop - first * unit_rows)
        return np.ascontiguousarray(codes[:, start - first * unit_rows :].T.astype(np.float32))

    def _groups(self) -> np.ndarray | None:
        if self.g_idx is None:
            return None
        groups = self.g_idx.read()
        if (groups == -1).any():
            return None
        if (groups < 0).any() or (groups >= self.scales.grid[1]).any():
            raise UnsupportedCheckpoint(
                f"{self.g_idx.path}: {self.g_idx.name}: groups from {groups.min()} to {groups.max()},"
                f" expected 0 to {self.scales.grid[1] - 1}"
            )
        return groups.astype(np.uint32)


def _fits(module: Module) -> bool:
    return module[".weight_packed"].dtype == "I32" and not module.has(".scale_packed")


def _load(module: Module) -> PackedWeight:
    packed, shape_tensor = module[".weight_packed"], module.get(".weight_shape")
    if len(packed.shape) != 2 or (shape_tensor is not None and shape_tensor.shape != (2,)):
        raise UnsupportedCheckpoint(
            f"{packed.path}: {packed.name}: packed integers of shape {packed.shape}, expected a matrix"
        )
    bits = _bits(module)
    if shape_tensor is not None:
        n_rows, n_cols = (int(size) for size in shape_tensor.read())
    elif len(bits) == 1 and WORD_BITS % bits[0] == 0:
        n_rows, n_cols = packed.shape[0], packed.shape[1] * (WORD_BITS // bits[0])
    else:
        raise module.wrong(packed, "no weight_shape beside it", f"{module.stem}.weight_shape")
    shape = n_rows, n_cols
    if min(shape) < 1:
        raise module.wrong(packed, f"weight_shape {shape}", "a matrix that is not empty")
    packing = _packing(module, packed, shape, bits)
    scales = scale_grid(module, shape, module[".weight_scale"], [(1, size) for size in _group_sizes(module)])
    zeros, g_idx = module.get(".weight_zero_point"), module.get(".weight_g_idx")
    if zeros is not None:
        _check_zeros(module, zeros, packing, (shape[0], scales.grid[1]))
    if g_idx is not None and g_idx.shape != shape[1:]:
        raise module.wrong(g_idx, f"shape {g_idx.shape}", f"{shape[1:]}, a group for every column")
    return PackedWeight(module.name, shape, packed, packing, scales, zeros, g_idx)


def _packing(module: Module, packed: RawTensor, shape: tuple[int, int], bits: tuple[int, ...]) -> Packing:
    """Return the packing that gives `packed` its width."""
    fitting = [
        packing
        for count in bits
        for packing in _packings(module, count)
        if (shape[0], packing.n_words(shape[1])) == packed.shape
    ]
    if not fitting:
        raise module.wrong(
            packed, f"shape {packed.shape} for {shape}", f"codes of {' or '.join(map(str, bits))} bits"
        )
    return fitting[0]


def _packings(module: Module, bits: int) -> Iterator[Packing]:
    """Yield the packings of codes of `bits` bits, the more likely one first."""
    if WORD_BITS % bits == 0:
        yield Packing(bits, dense=True)
        return
    dense = not _is_old(module.settings.get("version"))
    yield Packing(bits, dense)
    yield Packing(bits, not dense)


def _is_old(version: object) -> bool:
    """Return whether `version` of compressed-tensors packs whole codes only: it is before 0.18."""
    parts = str(version).split(".")
    if version is None or len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    return (int(parts[0]), int(parts[1])) < (0, 18)


def _check_zeros(module: Module, zeros: RawTensor, packing: Packing, shape: tuple[int, int]) -> None:
    packed = packing.n_words(shape[0]), shape[1]
    if (zeros.dtype, zeros.shape) not in (("I32", packed), ("I8", shape)):
        stored = f"zero points stored as {zeros.dtype} {zeros.shape}"
        raise module.wrong(zeros, stored, f"I32 {packed} or I8 {shape}")


def _bits(module: Module) -> tuple[int, ...]:
    """Return the numbers of bits that the configuration mentions, or all of them."""
    widths = module.settings.of_groups("num_bits")
    return tuple(bits for bits in widths if type(bits) is int and 1 <= bits <= 8) or (4, 8, 2, 3, 6, 5, 7, 1)


def _group_sizes(module: Module) -> tuple[int, ...]:
    sizes = module.settings.of_groups("group_size")
    return tuple(size for size in sizes if type(size) is int and size > 0)


LOADERS = (
    WeightsLoader(
        format="packed integers",
        methods=("compressed-tensors", "auto-round"),
        main=".weight_packed",
        sides=(".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        fits=_fits,
        load=_load,
        last=True,
    ),
)
