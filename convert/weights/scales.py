"""Reads the scales of a matrix, in whatever form they are stored.

A block of rows and columns shares a scale. That covers every form there is, as a grid of blocks:

    stored shape            block               called
    (), (1,)                the whole matrix    per tensor
    (rows,), (rows, 1)      one row             per channel, per row
    (rows, n)               cols / n of a row   groups
    (n, m)                  as configured       blocks; the last ones are ragged where the size doesn't divide
                                                the matrix, and more of them than needed are padding

A stack of matrices has a grid of each, (n_mats, ...).

Elements: F32, F16, BF16 and 8-bit floats are widened to float32, which is exact. U8 holds exponents like
F8_E8M0: 2 ** (byte - 127), and 255 is NaN.

Formats that pack along the input store the scales of groups as (n_groups, n_out): a row range of the weight
is a column range there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Module
from gguf_tools.errors import BadConfig, CheckpointError, UnsupportedCheckpoint
from gguf_tools.expressions import Expression, parse_expression

GRID_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8")

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The scales of a matrix, or of a stack of equal ones.

    raw    as stored
    grid   (block rows, block columns) of one matrix
    block  rows and columns that share a scale
    """

    raw: RawTensor
    grid: tuple[int, int]
    block: Block

    def read(self, start: int, stop: int, matrix: int = 0) -> np.ndarray:
        """Return block rows `start` to `stop` of a matrix, float32 (stop - start, block columns)."""
        if self.raw.n_cols != self.grid[1]:
            # Stored in another shape than the grid's: one number per row or fewer, read whole.
            everything = self.raw.read().reshape(-1, *self.grid)
            return decode_scales(everything[matrix, start:stop], self.raw.dtype)
        first = matrix * self.grid[0]
        return decode_scales(self.raw.read_rows(first + start, first + stop), self.raw.dtype)

    def of_rows(self, start: int, stop: int) -> np.ndarray:
        """Return the scales of every row from `start` to `stop`, float32 (stop - start, block columns)."""
        size = self.block[0]
        if size == 1:
            return self.read(start, stop)
        first = start // size
        blocks = self.read(first, -(-stop // size))
        return blocks[np.arange(start, stop) // size - first]

    @property
    def described(self) -> str:
        """How the scales lie, for people: "in blocks of 128x128"."""
        if self.grid == (1, 1):
            return "with one scale"
        if self.grid[1] == 1 and self.block[0] == 1:
            return "with a scale per row"
        if self.block[0] == 1:
            return f"in groups of {self.block[1]}"
        return f"in blocks of {self.block[0]}x{self.block[1]}"


def decode_scales(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Return stored scales of the safetensors type `dtype` as float32, C-contiguous."""
    if dtype == "U8":
        stored = stored.view(ml_dtypes.float8_e8m0fnu)
    return np.ascontiguousarray(stored.astype(np.float32))


def scale_grid(
    module: Module, shape: tuple[int, ...], raw: RawTensor, blocks: Sequence[Block] = ()
) -> ScaleGrid:
    """Return how `raw` scales a weight of `shape`.

    blocks  the sizes of blocks that the configuration mentions; the first whose grid fits is taken
    raises  CheckpointError when no form fits
    """
    if raw.dtype not in GRID_DTYPES:
        raise module.wrong(raw, f"scales stored as {raw.dtype}", ", ".join(GRID_DTYPES))
    stack, size = shape[:-2], (1, *shape)[-2:]
    if raw.shape[: len(stack)] == stack:
        own = raw.shape[len(stack) :]
        if len(own) == 4 and own[1] == own[3] == 1:
            own = (own[0], own[2])
        elif stack and own == (1, 1):
            own = ()  # one number per matrix, with the axes of the stack
        grid = own if len(own) == 2 else (prod(own), 1)
        block = _block(grid, (size[0], size[1]), blocks if len(own) == 2 else ())
        if block is not None:
            return ScaleGrid(raw, (grid[0], grid[1]), block)
    needed = f"one scale, one per row or groups of columns for {shape}"
    if blocks:
        grid, (block_rows, block_cols) = _grid_of((size[0], size[1]), blocks[0]), blocks[0]
        needed = f"{grid} for {shape} in blocks of {block_rows}x{block_cols}"
    raise module.wrong(raw, f"shape {raw.shape}", needed)


def _block(grid: tuple[int, ...], size: tuple[int, int], blocks: Sequence[Block]) -> Block | None:
    """Return the size of the blocks when a matrix of `size` has `grid` of them, None when that can't be."""
    rows, cols = size
    for block in blocks:
        if _grid_of(size, block) == grid:
            return block
    if grid == (rows, 1):
        return 1, cols
    if grid == (1, 1) and not blocks:
        return rows, cols
    if grid[0] == rows and grid[1] and cols % grid[1] == 0:
        return 1, cols // grid[1]
    for block in blocks:
        if block[0] > 1 and all(
            stored >= needed for stored, needed in zip(grid, _grid_of(size, block), strict=True)
        ):
            return block
    return None


def _grid_of(size: tuple[int, int], block: Block) -> tuple[int, int]:
    """Return how many block rows and columns a matrix of `size` has; the last ones may be ragged."""
    return -(-size[0] // block[0]), -(-size[1] // block[1])


SCALE_DTYPES = ("F16", "BF16", "F32")
_SIZE_KEYS = ("group_size", "q_group_size")


def check_scales(raw: RawTensor, n_axes: int = 2) -> None:
    """Raise UnsupportedCheckpoint unless `raw` are floats with `n_axes` axes."""
    if raw.dtype not in SCALE_DTYPES or len(raw.shape) != n_axes:
        raise UnsupportedCheckpoint(
            f"{raw.path}: {raw.name}: scales stored as {raw.dtype} {raw.shape}, expected"
            f" {', '.join(SCALE_DTYPES)} with {n_axes} axes"
        )


def check_matrix(module: Module, raw: RawTensor, dtype: str) -> None:
    """Raise CheckpointError unless `raw` is a matrix of `dtype`."""
    if raw.dtype != dtype or len(raw.shape) != 2:
        raise module.wrong(raw, f"{raw.dtype} {raw.shape}", f"a matrix of {dtype}")


def read_scales(raw: RawTensor, start: int, stop: int) -> np.ndarray:
    """Return columns `start` to `stop` of (n_groups, n_out) as float32 (stop - start, n_groups)."""
    return np.ascontiguousarray(raw.read_columns(start, stop).T, np.float32)


def scaled(
    codes: np.ndarray, zeros: np.ndarray | int, scales: np.ndarray, groups: np.ndarray | int
) -> np.ndarray:
    """Return (code - zero) * scale, float32 in the shape of `codes`.

    codes   uint8 or int8 (n_rows, n_cols)
    zeros   float32 in the shape of `scales`, or one number for all
    scales  float32 (n_rows, n_groups)
    groups  how many columns a group has, or uint32 (n_cols,): the group of each column
    """
    # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
    from convert.weights.kernels import scale_columns, scale_groups

    if isinstance(zeros, int):
        zeros = np.full_like(scales, zeros)
    out = np.empty(codes.shape, np.float32)
    if isinstance(groups, int):
        scale_groups(codes, zeros, scales, groups, out)
    else:
        scale_columns(codes, groups, zeros, scales, out)
    return out


def group_size_of(module: Module, n_cols: int, n_groups: int) -> int:
    """Return how many of the `n_cols` columns of `module` share a scale; the last group may be shorter.

    The size that the configuration gives for this module, or for all, counts if it makes as many groups as
    there are. Otherwise it is the size that divides the row into them; -1, or no size, means the whole row.
    raises  CheckpointError when neither fits
    """
    said = list(_sizes(module))
    for size in (*said, n_cols // max(1, n_groups)):
        size = n_cols if size == -1 else size
        if size > 0 and -(-n_cols // size) == n_groups and (size in said or size * n_groups == n_cols):
            return size
    raise CheckpointError(
        f"{module.checkpoint.folder}: {module.name}: {n_groups} groups for {n_cols} columns, expected groups"
        f" of {', '.join(str(size) for size in said) or 'equal size'}"
        f" ({module.settings.where(_SIZE_KEYS[0])})"
    )


def _sizes(module: Module) -> Iterator[int]:
    for values in overrides(module):
        if type(values.get("group_size")) is int:
            yield values["group_size"]
    general = module.settings.integer(*_SIZE_KEYS)
    if general is not None:
        yield general


def overrides(module: Module) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that the configuration has for this module alone, best first.

    GPTQModel calls them `dynamic` (keys are regular expressions, "+:" in front is allowed, "-:" excludes),
    auto-round `extra_config` (keys are names or regular expressions).
    """
    for key in ("dynamic", "extra_config"):
        table = module.settings.get(key)
        if not isinstance(table, Mapping):
            continue
        for pattern, values in table.items():
            if not isinstance(values, Mapping) or pattern.startswith("-:"):
                continue
            pattern = pattern.removeprefix("+:")
            where = module.settings.where(key)
            if pattern == module.stem or _expression(pattern, where).matches(module.stem):
                yield values


@cache
def _expression(pattern: str, where: str) -> Expression:
    return parse_expression(pattern, place=f"{where}: ", error=BadConfig)
