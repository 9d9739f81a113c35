"""The accumulator as an observer: the obvious sums, however rows are dealt to threads and calls."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf_tools.errors import BadActivation  # noqa: E402
from imatrix.forward.observe import Accumulator, sums_of  # noqa: E402
from tests.imatrix.forward.observers import NaiveSums  # noqa: E402

GATE, UP, DOWN = (f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))


def show(observer: Accumulator | NaiveSums, dtype: torch.dtype) -> None:
    """Show an observer three chunks, each through an observer of its own: matrices, heads, and experts."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.randn((300, 4 * 40), generator=generator).to(dtype)
        one = observer.fresh()
        one.rows(("a", "b"), x)
        one.heads("all heads", 0, 4, x.unflatten(-1, (4, 40))[..., :24])
        by_head = x.unflatten(-1, (4, 40))
        for head in (0, 3):
            for start in (0, 256):
                one.heads("some heads", head, 4, by_head[start : start + 256, head : head + 3])
        observer.merge(one)
    for expert, n_rows in ((2, 7), (0, 0), (2, 300), (4, 1)):
        x = torch.randn((n_rows, 24), generator=generator).to(dtype)
        one = observer.fresh()
        one.expert((GATE, UP), expert, 6, x)
        one.expert((DOWN,), expert, 6, x[:, :8])
        observer.merge(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_adds_up_squares(dtype: torch.dtype) -> None:
    accumulator, naive = Accumulator(), NaiveSums()
    show(accumulator, dtype)
    show(naive, dtype)
    accumulator.refuse_nonfinite()
    sums = accumulator.sums()
    assert list(sums) == list(naive.sums)
    for name, expected in naive.sums.items():
        np.testing.assert_allclose(sums[name].squares, expected.squares, rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(sums[name].counts, expected.counts, err_msg=name)


def test_the_work_folder_gives_back_what_it_got() -> None:
    accumulator = Accumulator()
    show(accumulator, torch.float32)
    stored = sums_of(accumulator.arrays())
    sums = accumulator.sums()
    assert stored.keys() == sums.keys()
    for name, expected in sums.items():
        np.testing.assert_array_equal(stored[name].squares, expected.squares)
        np.testing.assert_array_equal(stored[name].counts, expected.counts)


def test_entries_have_heads_end_to_end_and_experts_in_rows() -> None:
    accumulator = Accumulator()
    show(accumulator, torch.float32)
    sums = accumulator.sums()
    assert sums["all heads"].importance().shape == (1, 4 * 24)
    assert sums[GATE].importance().shape == (6, 24)
    assert sums[GATE].importance().counts.tolist() == [0, 0, 307, 0, 1, 0]


@pytest.mark.parametrize("name", ["a", GATE])
def test_nan_names_the_tensor(name: str) -> None:
    accumulator = Accumulator()
    x = torch.ones((5, 3))
    x[2, 1] = torch.nan
    if name == "a":
        accumulator.rows((name,), x)
    else:
        accumulator.expert((name,), 1, 4, x)
    with pytest.raises(BadActivation, match=f"{name}: its input has NaN"):
        accumulator.refuse_nonfinite()


def test_an_observer_of_one_expert_has_no_memory_of_the_others() -> None:
    accumulator = Accumulator()
    accumulator.expert((GATE,), 200, 256, torch.ones((4, 8)))
    assert len(accumulator._experts[GATE].seen) == 1
