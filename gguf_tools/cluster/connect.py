"""Connecting to a scheduler, or starting one with workers on this machine; which workers may do a job."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gguf_tools.cluster.address import ADDRESS, n_local_workers
from gguf_tools.cluster.job import Job, PostedJob, posted
from gguf_tools.cluster.worker import examine, forget
from gguf_tools.errors import BadRequest, ClusterError
from gguf_tools.system.settings import SharedContext

CONNECT_SECONDS = 15.0
"""Time in which a scheduler has to answer; some networks take seconds."""

WORKER_SECONDS = 60.0
"""Time in which a worker has to appear, or to answer when it is asked what it sees."""

_NOTICE_SECONDS = 0.1
"""Time after which a scheduler is asked again whether it has noticed that a worker is lost."""

_FORGET_SECONDS = 2.0
"""Time in which workers close a job: one that hangs never does."""

_TALKATIVE = ("distributed", "tornado", "asyncio")
"""Packages that log tracebacks of connections that are lost."""


class Cluster:
    """A scheduler and its workers.

    client   Dask's, connected
    address  as the user gave it
    """

    def __init__(self, client: Any, address: str) -> None:
        self.client, self.address = client, address

    def workers(self) -> dict[str, int]:
        """Return how many threads each worker has, by address; raises ClusterError."""
        try:
            threads: dict[str, int] = dict(self.client.nthreads())
        except Exception as error:
            raise self.lost() from error
        return threads

    def examine(self, job: PostedJob) -> None:
        """Raise ClusterError, naming it, for a worker that can't do a job: other code, or other files.

        One that is lost while it is asked is none: `Farm` gives what it had to do to others.
        """
        answers = self._ask_all(examine, job)
        refusals = [f"worker {address}: {answer}" for address, answer in answers.items() if answer]
        if refusals:
            more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
            raise ClusterError(f"{self.address}: {refusals[0]}{more}")

    @contextmanager
    def offer(self, job: Job, output: Path) -> Iterator[PostedJob]:
        """Post a job beside an output, for the time of this block, if all workers can do it.

        raises  ClusterError, naming it, for a worker that can't; OutputError if the job can't be posted
        """
        with posted(job, output) as place:
            self.examine(place)
            try:
                yield place
            finally:
                self._forget(place)

    def _forget(self, job: PostedJob) -> None:
        """Let the workers close a job; who does not hear it in time closes it with the next one."""

        def tell() -> None:
            with suppress(Exception):
                self.client.run(forget, job.digest, wait=False, on_error="ignore")

        if self.client.status == "running":
            telling = threading.Thread(target=tell, daemon=True)
            telling.start()
            telling.join(_FORGET_SECONDS)

    def lost(self) -> ClusterError:
        """Return the error for a scheduler that no longer answers."""
        return ClusterError(f"{self.address}: the scheduler has stopped; start it and its workers again")

    def _ask_all(self, function: Callable[..., str], *arguments: Any) -> dict[str, str]:
        """Call a function in every worker and return its answers; an exception there becomes a line.

        Left out is who is lost meanwhile, and who says nothing in time while others do. Who stays connected
        to the scheduler and can't be reached by it has its answer: how it can't.
        """
        answers: dict[str, str] = {}
        deadline = time.monotonic() + WORKER_SECONDS
        while unasked := self.workers().keys() - answers.keys():
            found = self._ask(unasked, deadline - time.monotonic(), function, *arguments)
            is_late = time.monotonic() >= deadline
            unreached = {address for address, answer in found.items() if isinstance(answer, OSError)}
            for address in found.keys() - (set() if is_late else unreached):
                answers[address] = _line(found[address])
            if is_late:
                break
            if unreached:
                time.sleep(_NOTICE_SECONDS)
        if unasked and not answers:
            raise ClusterError(f"{self.address}: a worker has not answered for {WORKER_SECONDS:g} s")
        return answers

    def _ask(
        self, addresses: Iterable[str], seconds: float, function: Callable[..., str], *arguments: Any
    ) -> dict[str, Any]:
        """Return the answers, or exceptions, of those workers that have one in time."""
        found: dict[str, Any] = {}

        async def ask(address: str) -> None:
            try:
                found.update(
                    await self.client.run(function, *arguments, workers=[address], on_error="return")
                )
            except Exception as error:
                found[address] = error

        async def ask_each() -> None:
            asking = [asyncio.ensure_future(ask(address)) for address in addresses]
            _, silent = await asyncio.wait(asking, timeout=max(0.0, seconds))
            for one in silent:
                one.cancel()

        asyncio.run_coroutine_threadsafe(ask_each(), self.client.loop.asyncio_loop).result()
        return found


_open: dict[str, Cluster] = {}


@contextmanager
def open_cluster(address: str) -> Iterator[Cluster]:
    """Connect to a scheduler that has workers, for the time of this block, or share the connection around it.

    address  of a running one, such as tcp://10.0.0.1:8786; or local:N for N processes on this machine
    raises   BadRequest for something else, or without `distributed`; ClusterError if nothing answers there
    """
    if address in _open:
        yield _open[address]
        return
    n_local = n_local_workers(ADDRESS.parse(address))
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise BadRequest("--scheduler needs Dask: pip install 'gguf-tools[dask]'") from error
    with ExitStack() as stack:
        stack.enter_context(_SILENCE)
        try:
            where: Any = address
            if n_local:
                with _deaf_children():
                    local = LocalCluster(
                        n_workers=n_local,
                        threads_per_worker=1,
                        memory_limit=None,
                        dashboard_address=":0",
                        silence_logs=logging.CRITICAL + 1,
                    )
                where = stack.enter_context(local)
            else:
                _knock(address)
            client = stack.enter_context(
                Client(where, timeout=CONNECT_SECONDS, set_as_default=False, name="gguf-tools")
            )
            client.wait_for_workers(1, timeout=WORKER_SECONDS)
        except TimeoutError as error:
            if "connect" in str(error):
                raise ClusterError(f"{address}: no scheduler answers there") from error
            raise ClusterError(f"{address}: no worker there; `dask worker {address}` starts one") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise ClusterError(f"{address}: no scheduler answers there ({_line(error)})") from error
        _open[address] = Cluster(client, address)
        try:
            yield _open[address]
        finally:
            del _open[address]


def _knock(address: str) -> None:
    """Raise ClusterError if nothing that speaks Dask's language answers at an address.

    A Client that fails while it is made waits for half a minute when it goes, and prints a traceback.
    """
    from distributed import Security
    from distributed.comm import connect

    async def knock() -> None:
        arguments = Security().get_connection_args("client")
        comm = await connect(address, timeout=CONNECT_SECONDS, **arguments)
        await comm.close()

    try:
        with ThreadPoolExecutor(1) as pool:  # there may be a loop in this thread
            pool.submit(asyncio.run, knock()).result()
    except Exception as error:
        raise ClusterError(f"{address}: no scheduler answers there ({_line(error)})") from error


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Have processes that are started in this block ignore ctrl-C, which is for who keeps the journal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what Dask logs and warns from a terminal: what matters becomes an error of the toolkit."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _TALKATIVE]
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in (*names, *_TALKATIVE)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


_SILENCE = SharedContext(_silence)


def _line(answer: object) -> str:
    if isinstance(answer, ModuleNotFoundError):
        return f"lacks the module {answer.name}"
    if isinstance(answer, BaseException):
        return " ".join(f"{type(answer).__name__}: {answer}".split())
    return str(answer)
