"""EETQ: 8-bit codes with a scale per output, in the order of CUTLASS' mixed-precision matrix product.

    X.weight  or X.qweight  I8     (n_cols, n_rows): the transposed sizes, and bytes in tiles
    X.weight_scales         float  (n_rows,)

    weight[i, j] = (byte - 128) * scale[i]

The product is the exact value rounded once. 128 bytes are a tile of two rows and 64 columns, and the tiles of
two rows follow each other. So a row range is read as the pairs of rows that hold it.

Devices of compute capability 7.5 to 8.9 write this layout. Files don't say which device wrote them, and those
written on 7.0 come out shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import check_scales, scaled

TILE_ROWS, TILE_COLS = 2, 64
_COLUMNS_OF_16 = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
_SWAPPED = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class EetqWeight(Decoded):
    """A matrix of bytes in tiles, and a scale per row."""

    codes: RawTensor
    scales: RawTensor
    stored_as: ClassVar[str] = "EETQ 8 bits by row"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        from convert.weights.kernels import untile

        n_cols = self.shape[1]
        first, last = start // TILE_ROWS * TILE_ROWS, -(-stop // TILE_ROWS) * TILE_ROWS
        stored = self.codes.read_elements(first * n_cols, last * n_cols).view(np.uint8)
        codes = np.empty((last - first, n_cols), np.uint8)
        untile(stored.reshape(-1, n_cols // TILE_COLS, TILE_ROWS * TILE_COLS), _places(), codes)
        scales = self.scales.read_elements(first, last).astype(np.float32)[:, None]
        return scaled(codes, 128, scales, n_cols)[start - first : stop - first]


@cache
def _places() -> np.ndarray:
    """Return where in a tile's bytes each (row, column) stands, uint32 (2, 64)."""
    # Stored position -> column, within 16; then the middle two of every four bytes change places.
    columns = np.array(_COLUMNS_OF_16).reshape(4, 4)[:, _SWAPPED].reshape(16)
    place = np.argsort(columns)
    row = np.concatenate([place + 16 * part for part in range(TILE_COLS // 16)])
    return (np.arange(TILE_ROWS)[:, None] * TILE_COLS + row).astype(np.uint32)


def _load(module: Module, suffix: str) -> EetqWeight:
    codes, scales = module[suffix], module[".weight_scales"]
    check_scales(scales, 1)
    n_cols, n_rows = codes.shape
    if scales.shape != (n_rows,):
        raise module.wrong(scales, f"shape {scales.shape}", f"({n_rows},) for {n_rows} outputs")
    if n_cols % TILE_COLS or n_rows % TILE_COLS or not n_cols:
        raise module.wrong(codes, f"shape {codes.shape}", f"multiples of {TILE_COLS}")
    return EetqWeight(module.name, (n_rows, n_cols), codes, scales)


def _fits(module: Module, suffix: str) -> bool:
    codes = module[suffix]
    return module.has(".weight_scales") and codes.dtype == "I8" and len(codes.shape) == 2


LOADERS: tuple[WeightsLoader, ...] = tuple(
    WeightsLoader(
        format="EETQ", methods=("eetq",), main=main, sides=(".weight_scales",),
        load=partial(_load, suffix=main), fits=partial(_fits, suffix=main),
    )
    for main in (".weight", ".qweight")
)  # fmt: skip
