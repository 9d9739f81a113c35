"""Whole numbers times scales, where scales and zero points lie as convert.weights.scales says.

    weight[i, j] = (code[i, j] - zero) * scale     of the block or group of (i, j)

The difference is exact, so the product is the exact value rounded once. Codes are stored in three ways.

Packed into 32-bit words: compressed-tensors' pack-quantized, 1 to 8 bits (Kimi-K2's int4).

    X.weight_packed      I32 (rows, words)  codes along the columns, a code being q + 2 ** (bits - 1)
    X.weight_scale       float, per tensor, row or group of columns
    X.weight_shape       I64 or I32 (2,)    rows and columns without padding
    X.weight_zero_point  I32 (words, groups) packed along the rows, stored like the codes; or I8 (rows,
                         groups), unpacked; missing where quantization is symmetric
    X.weight_g_idx       I32 (cols,)        the group of every column (act-order); -1 in it: not used

Zero is 2 ** (bits - 1) where none is stored. Codes of 1, 2, 4 and 8 bits stand in a word lowest first. For
the other widths version 0.18 of the library changed the packing: from as many whole codes as fit a word, its
top bits unused, to one stream of bits. The two differ in the number of words; where they don't, `version`
tells. How many bits there are follows from the shapes, among the `num_bits` that the configuration mentions:
several groups of modules may differ.

A byte each: compressed-tensors' int-quantized and naive-quantized, ModelOpt's W8A16 and W8A8.

    X.weight             I8 (rows, cols)
    X.weight_scale       per tensor, row, group or block
    X.weight_zero_point  I8 of the same shape, where quantization is not symmetric

Two rows in a byte: ModelOpt's W4A16_AWQ.

    X.weight        U8 (rows / 2, cols)  byte (r, j) holds row 2 * r in its lower half and row 2 * r + 1 in
                                         the upper, both in two's complement
    X.weight_scale  float (rows, groups)

Where X.pre_quant_scale is stored too, the model scales the inputs of X at run time; that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import ScaleGrid, scale_grid, scaled
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
        n_cols = self.shape[1]
        codes = self.packing.unpack(self.packed.read_rows(start, stop), n_cols)
        scales = self.scales.of_rows(start, stop)
        zeros = self._zeros(start, stop, scales.shape)
        groups = self._groups()
        return scaled(codes, zeros, scales, self.scales.block[1] if groups is None else groups)

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


def _load_packed(module: Module) -> PackedWeight:
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
    sizes = module.settings.of_groups("group_size")
    groups = [(1, size) for size in sizes if type(size) is int and size > 0]
    scales = scale_grid(module, shape, module[".weight_scale"], groups)
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


@dataclass(frozen=True, slots=True)
class Int8Weight(Decoded):
    """A matrix of 8-bit integers.

    codes          I8 (rows, cols)
    scales, zeros  of its blocks; zeros None where they are 0
    """

    codes: RawTensor
    scales: ScaleGrid
    zeros: ScaleGrid | None

    @property
    def stored_as(self) -> str:
        return f"int8 {self.scales.described}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        codes = self.codes.read_rows(start, stop)
        scales = self.scales.of_rows(start, stop)
        zeros = 0 if self.zeros is None else self.zeros.of_rows(start, stop)
        return scaled(codes, zeros, scales, self.scales.block[1])


def int8_weight(module: Module, codes: RawTensor, scales: RawTensor, zeros: RawTensor | None) -> Int8Weight:
    """Return a weight of 8-bit integers; CheckpointError when the parts don't fit each other."""
    if len(codes.shape) != 2:
        raise UnsupportedCheckpoint(
            f"{codes.path}: {codes.name}: {codes.dtype} of shape {codes.shape}, expected a matrix"
        )
    grid = scale_grid(module, codes.shape, scales)
    if zeros is None:
        return Int8Weight(module.name, codes.shape, codes, grid, None)
    if zeros.dtype != "I8" or zeros.shape != scales.shape:
        stored = f"zero points stored as {zeros.dtype} {zeros.shape}"
        raise module.wrong(zeros, stored, f"I8 {scales.shape}, as of {scales.name}")
    return Int8Weight(module.name, codes.shape, codes, grid, ScaleGrid(zeros, grid.grid, grid.block))


@dataclass(frozen=True, slots=True)
class RowPairWeight(Decoded):
    """A matrix of signed 4-bit integers whose rows share bytes in pairs.

    pairs   U8 (rows / 2, cols); for an odd range the pair at its edge is read too
    scales  of groups of columns
    """

    pairs: RawTensor
    scales: ScaleGrid

    @property
    def stored_as(self) -> str:
        return f"int4 {self.scales.described}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        first = start // 2
        pairs = self.pairs.read_rows(first, -(-stop // 2)).view(np.int8)
        codes = np.stack([(pairs << 4) >> 4, pairs >> 4], axis=1).reshape(-1, pairs.shape[1])
        codes = codes[start - 2 * first : stop - 2 * first]
        return scaled(codes, 0, self.scales.of_rows(start, stop), self.scales.block[1])


def _is_pairs(module: Module) -> bool:
    scales = module.get(".weight_scale")
    return (
        module[".weight"].dtype == "U8"
        and scales is not None
        and scales.dtype in ("F32", "BF16", "F16")
        and len(scales.shape) == 2
    )


def _load_pairs(module: Module) -> RowPairWeight:
    pairs = module[".weight"]
    if len(pairs.shape) != 2:
        raise module.wrong(pairs, f"shape {pairs.shape}", "a matrix")
    shape = 2 * pairs.shape[0], pairs.shape[1]
    return RowPairWeight(module.name, shape, pairs, scale_grid(module, shape, module[".weight_scale"]))


LOADERS = (
    WeightsLoader(
        format="packed integers",
        methods=("compressed-tensors", "auto-round"),
        main=".weight_packed",
        sides=(".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        load=_load_packed,
        fits=lambda module: module[".weight_packed"].dtype == "I32" and not module.has(".scale_packed"),
        last=True,
    ),
    WeightsLoader(
        format="int8",
        methods=("compressed-tensors", "modelopt", "auto-round"),
        main=".weight",
        sides=(".weight_scale", ".weight_zero_point"),
        load=lambda module: int8_weight(
            module, module[".weight"], module[".weight_scale"], module.get(".weight_zero_point")
        ),
        fits=lambda module: module[".weight"].dtype == "I8" and module.has(".weight_scale"),
    ),
    WeightsLoader(
        format="int4 in row pairs",
        methods=("modelopt",),
        main=".weight",
        sides=(".weight_scale",),
        load=_load_pairs,
        fits=_is_pairs,
    ),
)
