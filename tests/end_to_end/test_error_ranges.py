"""The limits of errors, measured: what codecs do to the rows of the trained model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import imatrix
from convert.checkpoint.checkpoint import Checkpoint
from convert.options import ConvertOptions
from convert.pipeline import prepare
from quantize.fill.verify import is_ordinary
from quantize.formats import available, get_format
from quantize.formats.codecs import ignores_importances, requires_importances
from tests.quantize.fill.error_shares import LARGEST_SHARES, share_of_limit
from tests.support.trained_model import EXAMPLE, GOLDEN

Matrix = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Rows and their importances."""


@pytest.fixture(scope="module")
def trained() -> list[Matrix]:
    """Some rows of every matrix of the trained model whose rows fit every type, with their importances."""
    data = imatrix.load(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf")
    with Checkpoint(EXAMPLE) as checkpoint:
        _, given = prepare(checkpoint, None, ConvertOptions(outtype="Q2_K", importances=data))
        matrices = []
        for name, found in given.importances.items():
            source = given.tensors[name]
            if source.shape[-1] % 256 == 0:
                step = min(found.rows_per_weights, 64)
                for start in (0, found.rows_per_weights * (found.matrix.shape[0] - 1)):
                    rows = source.read_rows(start, start + step).astype(np.float32)
                    matrices.append((rows, found.weighting_of_row(start).values))
    return matrices


@pytest.mark.parametrize("name", available())
def test_trained_rows_stay_well_inside(name: str, trained: list[Matrix]) -> None:
    format_ = get_format(name)
    assert len(trained) > 50
    assert np.mean([is_ordinary(rows.astype(np.float64)).mean() for rows, _ in trained]) > 0.99
    shares = []
    for rows, weights in trained:
        if not requires_importances(name):
            shares.append(share_of_limit(format_, rows, None))
        if not ignores_importances(name):
            shares.append(share_of_limit(format_, rows, weights))
    assert max(shares) < LARGEST_SHARES.get(name, 0.67)
