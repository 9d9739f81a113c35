"""Chunks that are longer than what goes through a layer's block at a time."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from imatrix.forward.open import open_model  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402
from tests.support.trained_model import EXAMPLE  # noqa: E402


def test_pieces_of_a_chunk_give_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = np.random.default_rng(0).integers(0, 500, (2, 40))
    with open_model(EXAMPLE) as model:
        whole, of_whole = run_all_layers(model, chunks)
        monkeypatch.setattr("imatrix.forward.layers.ffn._BLOCK_ROWS", 16)
        found, of_pieces = run_all_layers(model, chunks)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)
    assert of_pieces.keys() == of_whole.keys()
    for name, sums in of_whole.items():
        np.testing.assert_allclose(of_pieces[name].squares, sums.squares, rtol=1e-4, err_msg=name)
        assert of_pieces[name].counts.tolist() == sums.counts.tolist(), name
