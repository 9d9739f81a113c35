"""Finds how many columns share a scale, and reads the scales of a row range.

Formats that pack along the input store scales as (n_groups, n_out): a row range of the weight is a column
range there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Module
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint

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
            try:
                fits = pattern == module.stem or re.search(pattern, module.stem) is not None
            except re.error:
                raise module.settings.bad(key, "names or regular expressions") from None
            if fits:
                yield values
