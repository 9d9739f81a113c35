"""Handing out items: each is done, whatever becomes of a worker; what goes wrong is one line."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gguf_tools.cluster import connect
from gguf_tools.cluster import worker as at_work
from gguf_tools.cluster.connect import Cluster, open_cluster
from gguf_tools.cluster.job import PostedJob, job_path, posted
from gguf_tools.cluster.scheduler import Farm, ItemFailed, Pace
from gguf_tools.errors import BadRequest, ClusterError
from tests.gguf_tools.cluster import jobs
from tests.gguf_tools.cluster.jobs import Doubling


def do_all(
    cluster: Cluster, job: Doubling, output: Path, n: int, pace: Pace | None = None
) -> dict[int, list[int]]:
    """Do the items 0 to n - 1; return what came of each."""
    results: dict[int, list[int]] = {}

    def done(item: int, result: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        results.setdefault(item, []).append(result)

    with cluster.offer(job, output) as place:
        Farm(cluster, place, done, pace).run(range(n))
    return results


def test_every_item_is_done_once(cluster: Cluster, tmp_path: Path) -> None:
    job = Doubling(tmp_path / "log")
    results = do_all(cluster, job, tmp_path / "out", 1000)
    assert results == {item: [2 * item] for item in range(1000)}
    assert job.lines()[0] == "open"
    assert "settle" not in job.lines()  # it is the machine of who asked
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_batches_grow_with_what_is_left_and_end_small(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    submit = cluster.client.submit

    def watch(function: Any, job: Any, items: Any, **options: Any) -> Any:
        sizes.append(len(items))
        return submit(function, job, items, **options)

    monkeypatch.setattr(cluster.client, "submit", watch)
    do_all(cluster, Doubling(tmp_path / "log"), tmp_path / "out", 3000, Pace(batch_items=64))
    assert sum(sizes) == 3000
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 64, 1)


@pytest.mark.parametrize(
    ("error", "text"), [("BadWeights", "row 700 is bad"), ("", "ValueError: no 700 of them")]
)
def test_an_item_that_fails_is_named(cluster: Cluster, tmp_path: Path, error: str, text: str) -> None:
    with pytest.raises(ItemFailed) as caught:
        do_all(cluster, Doubling(tmp_path / "log", fails=700, told=bool(error)), tmp_path / "out", 1000)
    assert (caught.value.item, caught.value.text, caught.value.error) == (700, text, error)
    assert not job_path(tmp_path / "out").exists()


def test_who_hangs_is_not_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    job = Doubling(tmp_path / "log", hangs=500)
    try:
        results = do_all(cluster, job, tmp_path / "out", 1000, Pace(patience=1.0, batch_items=16))
    finally:
        jobs.hung.set()
    assert job.lines().count("hang") == 1
    assert results == {item: [2 * item] for item in range(1000)}


def test_slow_answers_are_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    results = do_all(cluster, Doubling(tmp_path / "log"), tmp_path / "out", 300, Pace(patience=0.001))
    assert results == {item: [2 * item] for item in range(300)}


def test_other_code_is_refused_by_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_work, "code_version", lambda: "0.0.9 (01234567)")
    address = next(iter(cluster.workers()))
    with pytest.raises(ClusterError) as caught:
        do_all(cluster, Doubling(tmp_path / "log"), tmp_path / "out", 10)
    assert str(caught.value).startswith(f"here:1: worker {address.partition(':')[0]}:")
    assert "runs gguf-tools 0.0.9 (01234567), expected 0.1.0 (" in str(caught.value)
    assert str(caught.value).endswith("(and 1 more)")
    assert not (tmp_path / "log").exists()


def test_a_worker_that_joins_late_is_asked_too(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "examine", lambda self, job: None)
    monkeypatch.setattr(at_work, "code_version", lambda: "0.0.9 (01234567)")
    with pytest.raises(ClusterError, match=r"^here:1: worker \S+: runs gguf-tools 0\.0\.9"):
        do_all(cluster, Doubling(tmp_path / "log"), tmp_path / "out", 10)


def test_other_files_are_refused_by_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, output = Doubling(tmp_path / "log"), tmp_path / "out"
    with posted(job, output) as place:
        data = place.path.read_bytes()
        place.path.unlink()
        with pytest.raises(
            ClusterError, match=r"out\.job: can't be read \(No such file or directory\); workers must"
        ):
            cluster.examine(place)
        place.path.write_bytes(data + b"x")
        with pytest.raises(ClusterError, match=r"out\.job: holds another job; workers must see"):
            cluster.examine(place)


def test_paths_reach_a_worker_as_absolute_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with posted(Doubling(Path("log")), Path("out")) as place:
        sent: PostedJob = pickle.loads(pickle.dumps(place))
        monkeypatch.chdir("/")
        job = sent.read()
        assert isinstance(job, Doubling)
        assert job.log == tmp_path / "log"
        monkeypatch.chdir(tmp_path)


def test_another_machine_has_to_see_what_is_written(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_work, "this_machine", lambda: "another")
    job = Doubling(tmp_path / "log")
    do_all(cluster, job, tmp_path / "out", 20)
    assert job.lines().count("settle") > 1


def test_a_job_is_closed_when_it_is_over_or_another_comes(cluster: Cluster, tmp_path: Path) -> None:
    killed, next_ = Doubling(tmp_path / "killed"), Doubling(tmp_path / "next")
    with posted(killed, tmp_path / "out") as place:
        assert at_work._begin(place) is at_work._begin(place)
        for _ in range(2):
            at_work._open[place.digest].n_users -= 1
    assert killed.lines() == ["open"]  # its run was killed before it said goodbye
    do_all(cluster, next_, tmp_path / "out", 5)
    assert killed.lines() == ["open", "close"]


@pytest.mark.parametrize("address", ["local:", "local:0", "local:two", "local:-1"])
def test_bad_numbers_of_processes_are_refused(address: str) -> None:
    with (
        pytest.raises(BadRequest, match=f"^'{address}' is not an address .* or local:N"),
        open_cluster(address),
    ):
        pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x:1", "127.0.0.1:1"])
def test_nobody_answers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_tools.cluster.connect.CONNECT_SECONDS", 0.5)
    with pytest.raises(ClusterError, match=rf"^{address}: no scheduler answers there"), open_cluster(address):
        pass


def test_without_dask_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(BadRequest, match=r"pip install 'gguf-tools\[dask\]'"), open_cluster("tcp://x:1"):
        pass


def test_nobody_waits_for_workers_that_never_come(cluster: Cluster, tmp_path: Path) -> None:
    class Deserted(Cluster):
        def workers(self) -> dict[str, int]:
            return {}

        def examine(self, job: PostedJob) -> None:
            pass

    deserted = Deserted(cluster.client, "here:1")
    with pytest.raises(ClusterError, match=r"^here:1: all workers have stopped$"):
        do_all(deserted, Doubling(tmp_path / "log"), tmp_path / "out", 3, Pace(idle_seconds=1.0))


class Losing(Cluster):
    """A cluster whose first worker is lost, which its scheduler notices when asked so many times."""

    def __init__(self, cluster: Cluster, noticed_at: int) -> None:
        super().__init__(cluster.client, "here:1")
        self.lost, self._left = min(cluster.workers()), noticed_at

    def workers(self) -> dict[str, int]:
        self._left -= 1
        return {
            address: n for address, n in super().workers().items() if address != self.lost or self._left > 0
        }

    def _ask(self, addresses: Iterable[str], *more: Any) -> dict[str, Any]:
        asked = set(addresses)
        found: dict[str, Any] = {}
        if self.lost in asked:
            found[self.lost] = ConnectionResetError("in <TCP (closed)>: Stream is closed")
        return found | (super()._ask(asked - {self.lost}, *more) if asked - {self.lost} else {})


def test_a_worker_that_is_lost_while_it_is_asked_is_no_refusal(cluster: Cluster, tmp_path: Path) -> None:
    for noticed_at in (2, 4):
        losing = Losing(cluster, noticed_at)
        assert do_all(losing, Doubling(tmp_path / "log"), tmp_path / "out", 5).keys() == set(range(5))


def test_a_worker_that_the_scheduler_never_reaches_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "WORKER_SECONDS", 0.2)
    losing = Losing(cluster, 1_000_000)
    with pytest.raises(ClusterError, match=rf"^here:1: worker {losing.lost}: ConnectionResetError: in <TCP"):
        do_all(losing, Doubling(tmp_path / "log"), tmp_path / "out", 5)


@pytest.mark.parametrize("n_silent", [1, 2])
def test_a_worker_that_is_silent_is_passed_over_where_another_answers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_silent: int
) -> None:
    silent = sorted(cluster.workers())[:n_silent]
    run = cluster.client.run

    async def hang(*arguments: Any, workers: list[str], **options: Any) -> dict[str, Any]:
        if workers[0] in silent:
            await asyncio.sleep(60)
        answer: dict[str, Any] = await run(*arguments, workers=workers, **options)
        return answer

    monkeypatch.setattr(cluster.client, "run", hang)
    monkeypatch.setattr(cluster, "_forget", lambda _: None)
    monkeypatch.setattr(connect, "WORKER_SECONDS", 0.2)
    if n_silent == 1:
        assert len(do_all(cluster, Doubling(tmp_path / "log"), tmp_path / "out", 5)) == 5
    else:
        with pytest.raises(ClusterError, match=r"^here:1: a worker has not answered for 0\.2 s$"):
            do_all(cluster, Doubling(tmp_path / "log"), tmp_path / "out", 5)


@pytest.mark.parametrize("status", ["lost", "pending", "cancelled"])
def test_an_answer_that_has_come_is_good_after_its_worker_is_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    take = Farm._take

    def take_late(farm: Farm[int], batch: Any, future: Any, answer: Any) -> None:
        future._state.status = status
        take(farm, batch, future, answer)

    monkeypatch.setattr(Farm, "_take", take_late)
    job = Doubling(tmp_path / "log")
    assert do_all(cluster, job, tmp_path / "out", 50) == {item: [2 * item] for item in range(50)}


def test_a_batch_whose_answer_is_lost_is_given_out_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, n_lost = Farm._take, 0

    def take_lost(farm: Farm[int], batch: Any, future: Any, answer: Any) -> None:
        nonlocal n_lost
        if not batch.n_lost:
            n_lost += 1
            answer = concurrent.futures.Future()
            answer.set_exception((ConnectionResetError(), concurrent.futures.CancelledError())[n_lost % 2])
        take(farm, batch, future, answer)

    monkeypatch.setattr(Farm, "_take", take_lost)
    job = Doubling(tmp_path / "log")
    assert do_all(cluster, job, tmp_path / "out", 20) == {item: [2 * item] for item in range(20)}
    assert n_lost
