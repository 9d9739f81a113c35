"""How many experts are made at a time: as many as have a use, and memory for their statistics."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from imatrix.calibrate.run.experts import experts_at_once, statistics_cols


@pytest.mark.parametrize(
    ("n_rows", "sizes", "n_batches", "expected"),
    [
        (2048, (2048, 768), 0, 16),
        (2048, (2048, 768), 64, 42),  # 16 threads have memory for so many
        (7168, (7168, 2048), 64, 3),
        (7167, (7168, 2048), 64, 42),  # gate and up are encoded under what all experts see
        (7167, (7168, 2048), 0, 16),
        (1, (4096, 14336), 0, 1),  # downs are wider
    ],
)
def test_experts_at_a_time(n_rows: int, sizes: tuple[int, int], n_batches: int, expected: int) -> None:
    assert experts_at_once(statistics_cols(n_rows, *sizes), 16, n_batches) == expected
