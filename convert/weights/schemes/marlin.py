"""Marlin: 4-bit GPTQ weights in the order in which a kernel reads them, and its 2:4 sparse variant.

Dense (the original Marlin's and AutoGPTQ's names; AutoAWQ stores the same as qweight and scales):

    X.B  I32    (n_cols / 16, 2 * n_rows)
    X.s  float  (n_groups, n_rows)

    weight[i, j] = (code[i, j] - 8) * scale[g, i]

128 words of B are a tile of 64 rows and 16 columns of the weight, shuffled as `_tile_places` says. Scales are
shuffled within 64 rows, or within 32 where there is a single group; the configured group size doesn't matter.

Sparse (4 or 8 bits): of every four columns two are kept.

    X.B_24    or X.weight_packed  I32    (n_cols / 32, n_rows * 16 * bits / 32)   the kept codes, in tiles
    X.B_meta  or X.meta           I16    (n_cols / 32, 2 * n_rows)                which columns they stand in
    X.s       or X.scale_packed   float  (n_groups, n_rows)

The other two are exactly 0. The difference is exact, so the product is the exact value rounded once.

Tiles are 64 rows high. A row range is read as the tiles that hold it, which are column ranges of all tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import check_matrix, check_scales, read_scales, scaled

TILE_ROWS, TILE_COLS = 64, 16
TILE_CODES = TILE_ROWS * TILE_COLS

# Order of eight (4 bits) or four (8 bits) codes in the words that a kernel takes apart with masks.
_INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
# Of the rows of 32 scales, by fours of eight; of 64 scales of the sparse variant.
_SCALES_OF_32 = (0, 1, 8, 9, 16, 17, 24, 25)
_SCALES_OF_64_SPARSE = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class MarlinWeight(Decoded):
    """A matrix in Marlin's dense layout: B and s."""

    codes: RawTensor
    scales: RawTensor
    by_rows: ClassVar[bool] = False

    @property
    def stored_as(self) -> str:
        return f"Marlin 4 bits in groups of {self.shape[1] // self.scales.shape[0]}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        first, last = _tiles(start, stop)
        codes = _read_tiles(self.codes, 4, first, last, _tile_places())
        n_groups = self.scales.shape[0]
        order = _scale_order_one_group() if n_groups == 1 else _scale_order()
        scales = _in_order(read_scales(self.scales, first, last), order)
        return scaled(codes, 8, scales, self.shape[1] // n_groups)[start - first : stop - first]


@dataclass(frozen=True, slots=True)
class SparseMarlinWeight(Decoded):
    """A matrix in Marlin's 2:4 sparse layout: the kept codes, where they stand, and scales."""

    codes: RawTensor
    places: RawTensor
    scales: RawTensor
    bits: int
    by_rows: ClassVar[bool] = False

    @property
    def stored_as(self) -> str:
        size = self.shape[1] // self.scales.shape[0]
        return f"Marlin 2:4 sparse {self.bits} bits in groups of {size}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        from convert.weights.kernels import scatter_pairs

        first, last = _tiles(start, stop)
        codes = _read_tiles(self.codes, self.bits, first, last, _sparse_tile_places(self.bits))
        n_kept, n_groups = self.shape[1] // 2, self.scales.shape[0]
        scales = read_scales(self.scales, first, last)
        # A group as long as the kept half of a row, or longer, leaves the scales in order.
        if self.shape[1] // n_groups < n_kept:
            scales = _in_order(scales, _sparse_scale_order())
        kept = scaled(codes, 1 << (self.bits - 1), scales, n_kept // n_groups)
        out = np.empty((last - first, self.shape[1]), np.float32)
        scatter_pairs(kept, self._read_places(first, last), out)
        return out[start - first : stop - first]

    def _read_places(self, first: int, last: int) -> np.ndarray:
        """Return which of its four columns every kept code stands in, uint8 (last - first, n_kept)."""
        from convert.weights.kernels import unpack

        stored = self.places.read_columns(2 * first, 2 * last)
        # A column pair of the 16-bit masks is stored as one run: 64 rows at a time, shuffled.
        by_tile = stored.reshape(len(stored), (last - first) // TILE_ROWS, 2 * TILE_ROWS)
        tiles = by_tile[:, :, _mask_places()]
        masks = tiles.transpose(1, 2, 0, 3).reshape(last - first, 2 * len(stored))
        return unpack(masks, 2, self.shape[1] // 2)


def _tiles(start: int, stop: int) -> tuple[int, int]:
    """Return the first and last row of the tiles that hold rows `start` to `stop`."""
    return start // TILE_ROWS * TILE_ROWS, -(-stop // TILE_ROWS) * TILE_ROWS


def _read_tiles(raw: RawTensor, bits: int, first: int, last: int, places: np.ndarray) -> np.ndarray:
    """Return the codes of the rows `first` to `last`, whole tiles, uint8 (last - first, n_codes)."""
    from convert.weights.kernels import unpack, untile

    # Words per row of the weight: 16 columns of it share a row of tiles.
    width = TILE_COLS * bits // 32
    words = raw.read_columns(first * width, last * width)
    n_codes = (last - first) * TILE_COLS
    tiles = unpack(words, bits, n_codes).reshape(len(words), n_codes // TILE_CODES, TILE_CODES)
    codes = np.empty((last - first, len(words) * TILE_COLS), np.uint8)
    untile(tiles.transpose(1, 0, 2), places, codes)
    return codes


@cache
def _tile_places() -> np.ndarray:
    """Return where in a tile's 1024 codes each (row, column) of the weight stands, uint32 (64, 16).

    A tile is four blocks of 16x16. Each of 32 threads holds, of every block, four columns of row `lane // 4`
    and of the row 8 further on.
    """
    plain = [
        256 * block + 16 * column + lane // 4 + 8 * half
        for lane in range(32)
        for block in range(4)
        for half in range(2)
        for column in _columns_of(lane)
    ]
    # Plain position: block, column in it, row in it.
    places = _stored_at(plain, _INTERLEAVED[4]).reshape(4, 16, 16)
    return np.ascontiguousarray(places.transpose(0, 2, 1).reshape(TILE_ROWS, TILE_COLS))


@cache
def _sparse_tile_places(bits: int) -> np.ndarray:
    """Return the same for a tile of kept codes."""
    plain = [
        16 * column + 256 * (lane // 8) + 8 * (lane // 4 % 2) + 4 * half + block
        for lane in range(32)
        for block in range(4)
        for half in range(2)
        for column in _columns_of(lane)
    ]
    places = _stored_at(plain, _INTERLEAVED[bits]).reshape(4, 16, 16)
    return np.ascontiguousarray(places.transpose(0, 2, 1).reshape(TILE_ROWS, TILE_COLS))


def _columns_of(lane: int) -> tuple[int, ...]:
    pair = 2 * (lane % 4)
    return pair, pair + 1, pair + 8, pair + 9


def _stored_at(plain: list[int], interleaved: tuple[int, ...]) -> np.ndarray:
    """Return plain position -> stored position, uint32; `plain` is the order before interleaving."""
    stored = np.array(plain).reshape(-1, len(interleaved))[:, interleaved].reshape(-1)
    return np.argsort(stored).astype(np.uint32)


def _in_order(scales: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return rows of `scales` with the shuffle within every `order.size` of them undone."""
    blocks = scales.reshape(-1, order.size, scales.shape[1])
    return np.ascontiguousarray(blocks[:, order].reshape(scales.shape))


@cache
def _scale_order() -> np.ndarray:
    """Return row -> where its scale is stored, within 64 rows."""
    return np.argsort(np.array([i + 8 * j for i in range(8) for j in range(8)]))


@cache
def _scale_order_one_group() -> np.ndarray:
    """Return row -> where its scale is stored, within 32 rows, where there is a single group."""
    return np.argsort(np.array([2 * i + offset for i in range(4) for offset in _SCALES_OF_32]))


@cache
def _sparse_scale_order() -> np.ndarray:
    """Return row -> where its scale is stored, within 64 rows of the sparse variant."""
    return np.argsort(np.array([8 * i + offset for i in range(8) for offset in _SCALES_OF_64_SPARSE]))


@cache
def _mask_places() -> np.ndarray:
    """Return (row, even or odd column) -> place in the 128 masks of 64 rows and two columns, (64, 2)."""
    row = np.arange(TILE_ROWS)
    moved = row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row // 8 * 4
    places = np.empty((TILE_ROWS, 2), np.int64)
    for odd in range(2):
        # A mask of an odd column in an even row changes places with the one below and before it.
        down = np.where((moved % 2 == 0) & (odd == 1), 1, np.where((moved % 2 == 1) & (odd == 0), -1, 0))
        places[:, odd] = (moved + down) * 2 + odd - down
    return places


# ---- loading


def marlin_weight(module: Module, codes_suffix: str, scales_suffix: str) -> MarlinWeight:
    """Return the weight whose tensors have the dense layout, after checking that they fit each other."""
    codes, scales = module[codes_suffix], module[scales_suffix]
    check_scales(scales)
    check_matrix(module, codes, "I32")
    n_rows = scales.shape[1]
    n_cols = TILE_COLS * codes.shape[0]
    if codes.shape[1] != 2 * n_rows:
        raise module.wrong(codes, f"shape {codes.shape}", f"{2 * n_rows} columns for {n_rows} outputs")
    _check_sizes(module, codes, scales, n_rows, n_cols)
    return MarlinWeight(module.name, (n_rows, n_cols), codes, scales)


def _sparse_weight(
    module: Module, codes_suffix: str, places_suffix: str, scales_suffix: str
) -> SparseMarlinWeight:
    codes, places, scales = module[codes_suffix], module[places_suffix], module[scales_suffix]
    check_scales(scales)
    check_matrix(module, codes, "I32")
    n_rows, n_cols = scales.shape[1], 2 * TILE_COLS * codes.shape[0]
    bits = next((bits for bits in (4, 8) if codes.shape[1] == n_rows * TILE_COLS * bits // 32), None)
    if bits is None:
        raise module.wrong(
            codes, f"shape {codes.shape}", f"{2 * n_rows} columns (4 bits) or {4 * n_rows} (8 bits)"
        )
    if places.dtype != "I16" or places.shape != (n_cols // 32, 2 * n_rows):
        raise module.wrong(places, f"{places.dtype} {places.shape}", f"I16 {(n_cols // 32, 2 * n_rows)}")
    _check_sizes(module, codes, scales, n_rows, n_cols)
    return SparseMarlinWeight(module.name, (n_rows, n_cols), codes, places, scales, bits)


def _check_sizes(module: Module, codes: RawTensor, scales: RawTensor, n_rows: int, n_cols: int) -> None:
    if n_rows % TILE_ROWS:
        raise module.wrong(codes, f"{n_rows} rows", f"a multiple of {TILE_ROWS}")
    if scales.shape[0] == 0 or n_cols % (2 * scales.shape[0]):
        raise module.wrong(scales, f"{scales.shape[0]} groups", f"groups of equal size for {n_cols} columns")


LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("Marlin", ("gptq", "marlin"), ".B", (".s",),
                  lambda module: marlin_weight(module, ".B", ".s"), lambda module: module.has(".s")),
    WeightsLoader("Marlin 2:4", ("gptq", "marlin"), ".B_24", (".B_meta", ".s"),
                  lambda module: _sparse_weight(module, ".B_24", ".B_meta", ".s")),
    WeightsLoader("Marlin 2:4", ("compressed-tensors",), ".weight_packed", (".meta", ".scale_packed"),
                  lambda module: _sparse_weight(module, ".weight_packed", ".meta", ".scale_packed"),
                  lambda module: module.has(".meta", ".scale_packed")),
)  # fmt: skip
