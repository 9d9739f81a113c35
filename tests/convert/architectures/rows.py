"""A check of the tensors that a checkpoint becomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from convert.pipeline import open_conversion


def assert_runs_are_those_of_the_whole(folder: Path) -> None:
    """Read every tensor whole, and in runs of a few rows, as numbers and as bytes."""
    with open_conversion(folder) as conversion:
        for tensor in conversion.tensors:
            n_rows = int(np.prod(tensor.shape[:-1]))
            whole = tensor.read_rows(0, n_rows)
            runs = [tensor.read_rows(at, min(at + 3, n_rows)) for at in range(0, n_rows, 3)]
            np.testing.assert_array_equal(np.concatenate(runs), whole, tensor.name)
            raw = np.concatenate([tensor.raw_rows(at, min(at + 5, n_rows)) for at in range(0, n_rows, 5)])
            np.testing.assert_array_equal(raw, np.ascontiguousarray(whole).reshape(-1).view(np.uint8))
