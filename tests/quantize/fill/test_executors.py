from __future__ import annotations

import threading

import pytest

from gguf_tools.errors import BadWeights, ExecutionError
from quantize.fill.chunks import ChunkTask
from quantize.fill.executors import Executor, make_executor

TASKS = [ChunkTask("t", i, i + 1, i * 4, 4) for i in range(200)]


@pytest.fixture(params=[1, 2, 5], ids="{} threads".format)
def executor(request: pytest.FixtureRequest) -> Executor:
    return make_executor(request.param)


def test_every_task_runs_once(executor: Executor) -> None:
    done: list[ChunkTask] = []
    executor.run(iter(TASKS), done.append)
    assert sorted(done, key=lambda task: task.row_start) == TASKS


def test_a_failure_names_its_task_keeps_its_cause_and_stops_the_rest(executor: Executor) -> None:
    done: list[ChunkTask] = []

    def work(task: ChunkTask) -> None:
        if task.row_start == 20:
            raise BadWeights("t: weight at row 20 is nan")
        done.append(task)

    with pytest.raises(ExecutionError, match="t: weight at row 20 is nan") as caught:
        executor.run(iter(TASKS), work)
    assert caught.value.task == TASKS[20]
    assert isinstance(caught.value.__cause__, BadWeights)
    assert len(done) < len(TASKS) - 1


def test_an_unforeseen_error_says_where_it_happened(executor: Executor) -> None:
    def work(task: ChunkTask) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ExecutionError, match=r"t rows \d+\.\.\d+: OSError: .*No space left"):
        executor.run(iter(TASKS), work)


def test_a_source_of_tasks_that_breaks_is_an_error_not_a_short_run(executor: Executor) -> None:
    def tasks():  # type: ignore[no-untyped-def]
        yield TASKS[0]
        raise RuntimeError("broken plan")

    with pytest.raises((ExecutionError, RuntimeError), match="broken plan"):
        executor.run(tasks(), lambda task: None)


def test_no_thread_outlives_a_run() -> None:
    before = threading.active_count()
    make_executor(4).run(iter(TASKS), lambda task: None)
    assert threading.active_count() == before
