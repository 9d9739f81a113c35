from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest

from gguf_tools.errors import BadWeights, ExecutionError
from quantize.fill.chunks import ChunkTask, RowRange
from quantize.fill.executors import Executor, ThreadExecutor

TASKS = [ChunkTask(RowRange("t", i, i + 1), 0, i * 4, 4, i) for i in range(200)]


@dataclass(frozen=True)
class Spec:
    """A spec, and the worker that it opens, which calls `work` and returns twice the number of the chunk."""

    work: Callable[[ChunkTask], object] = str

    def open(self) -> AbstractContextManager[Spec]:
        return nullcontext(self)

    def run(self, task: ChunkTask) -> int:
        self.work(task)
        return 2 * task.number


def ignore(number: int, digest: int) -> None:
    pass


@pytest.fixture(params=[1, 2, 5], ids="{} threads".format)
def executor(request: pytest.FixtureRequest) -> Executor:
    return ThreadExecutor(request.param)


def test_every_task_runs_once(executor: Executor) -> None:
    run: list[ChunkTask] = []
    done: list[tuple[int, int]] = []
    executor.run(iter(TASKS), Spec(run.append), lambda *what: done.append(what))
    assert sorted(run, key=lambda task: task.rows.start) == TASKS
    assert sorted(done) == [(task.number, 2 * task.number) for task in TASKS]


def test_a_failure_names_its_task_keeps_its_cause_and_stops_the_rest(executor: Executor) -> None:
    done: list[ChunkTask] = []

    def work(task: ChunkTask) -> None:
        if task.rows.start == 20:
            raise BadWeights("t: weight at row 20 is nan")
        done.append(task)

    with pytest.raises(ExecutionError, match="t: weight at row 20 is nan") as caught:
        executor.run(iter(TASKS), Spec(work), ignore)
    assert caught.value.task == TASKS[20]
    assert isinstance(caught.value.__cause__, BadWeights)
    assert len(done) < len(TASKS) - 1


def test_an_unforeseen_error_says_where_it_happened(executor: Executor) -> None:
    def work(task: ChunkTask) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ExecutionError, match=r"t rows \d+\.\.\d+: OSError: .*No space left"):
        executor.run(iter(TASKS), Spec(work), ignore)


def test_a_source_of_tasks_that_breaks_is_an_error_not_a_short_run(executor: Executor) -> None:
    def tasks():  # type: ignore[no-untyped-def]
        yield TASKS[0]
        raise RuntimeError("broken plan")

    with pytest.raises((ExecutionError, RuntimeError), match="broken plan"):
        executor.run(tasks(), Spec(), ignore)


def test_no_thread_outlives_a_run() -> None:
    before = set(threading.enumerate())
    ThreadExecutor(4).run(iter(TASKS), Spec(), ignore)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("enough")], ids=repr)
def test_what_done_raises_ends_the_run_as_it_is(executor: Executor, error: BaseException) -> None:
    done: list[int] = []

    def stop(number: int, digest: int) -> None:
        done.append(number)
        if len(done) == 20:
            raise error

    before = set(threading.enumerate())
    with pytest.raises(type(error)) as caught:
        executor.run(iter(TASKS), Spec(), stop)
    assert caught.value is error
    assert len(done) < len(TASKS)
    assert set(threading.enumerate()) <= before


def test_a_worker_s_interruption_is_an_interruption(executor: Executor) -> None:
    def work(task: ChunkTask) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(iter(TASKS), Spec(work), ignore)
