"""Work shared among threads: order, errors, and how far ahead it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from imatrix.forward.workers import Workers, threads_for  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_parts(n_threads: int) -> None:
    def slower_first(part: int) -> int:
        time.sleep(0.02 if part % 5 == 0 else 0)
        return part * part

    with Workers(n_threads) as workers:
        assert list(workers.each(slower_first, range(23))) == [part * part for part in range(23)]
        assert list(workers.each(slower_first, [])) == []


def test_parts_are_taken_a_few_at_a_time() -> None:
    taken: list[int] = []

    def parts() -> Iterator[int]:
        for part in range(100):
            taken.append(part)
            yield part

    with Workers(2) as workers:
        for result in workers.each(lambda part: part, parts()):
            assert len(taken) <= result + 6


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_more_are_begun_than_may_be_at_once(at_once: int) -> None:
    begun: list[int] = []

    def begin(part: int) -> int:
        begun.append(part)
        return part

    with Workers(4) as workers:
        for result in workers.each(begin, range(20), gradients=True, at_once=at_once):
            assert len(begun) <= result + at_once


def test_the_error_of_the_first_part_that_fails_ends_it() -> None:
    begun: list[int] = []

    def fail(part: int) -> None:
        begun.append(part)
        time.sleep(0.01)
        if part >= 3:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 3"), Workers(2) as workers:
        for _ in workers.each(fail, range(1000)):
            pass
    assert len(begun) < 12


def test_tasks_run_together_and_without_gradients() -> None:
    both_here = threading.Barrier(2, timeout=10)

    def meet(_: int) -> bool:
        both_here.wait()
        return torch.is_inference_mode_enabled()

    with Workers(2) as workers:
        assert list(workers.each(meet, range(2))) == [True, True]


@pytest.mark.parametrize(
    ("n_threads", "n_parts", "n_workers", "of_an_operation"),
    [(1, 9, 1, 1), (4, 9, 4, 1), (4, 2, 2, 2), (5, 2, 2, 2)],
)
def test_torch_gets_the_threads_that_parts_leave(
    n_threads: int, n_parts: int, n_workers: int, of_an_operation: int
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        with threads_for(n_parts, CPU) as found, Workers(found) as workers:
            assert found == n_workers
            counts = list(workers.each(lambda _: torch.get_num_threads(), range(9)))
            assert counts == [of_an_operation] * 9
        assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
