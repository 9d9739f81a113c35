"""Connecting to a scheduler, or starting one with workers on this machine; which workers may do a job."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gguf_tools.cluster.address import ADDRESS, n_local_workers
from gguf_tools.cluster.job import Job, PostedJob, posted
from gguf_tools.cluster.worker import examine, forget
from gguf_tools.errors import BadRequest, ClusterError

CONNECT_SECONDS = 15.0
"""Time in which a scheduler has to answer; some networks take seconds."""

WORKER_SECONDS = 60.0
"""Time in which a worker has to appear, or to answer when it is asked what it sees."""

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
        """Raise ClusterError, naming it, for a worker that can't do a job: other code, or other files."""
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
        return ClusterError(f"{self.address}: the scheduler is gone; start it, and workers")

    def _ask_all(self, function: Callable[..., str], *arguments: Any) -> dict[str, str]:
        """Call a function in every worker and return its answers; an exception there becomes a line."""
        answers: dict[str, Any] = {}
        addresses = self.workers()

        def ask() -> None:
            try:
                answers.update(self.client.run(function, *arguments, on_error="return"))
            except Exception as error:
                answers.update(dict.fromkeys(addresses, error))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(WORKER_SECONDS)
        if asking.is_alive():
            raise ClusterError(f"{self.address}: a worker has not answered for {WORKER_SECONDS:g} s")
        self.workers()  # where the scheduler is gone, that is what there is to say
        return {address: _line(answer) for address, answer in answers.items()}


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
        stack.enter_context(_silence())
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


def _line(answer: object) -> str:
    if isinstance(answer, ModuleNotFoundError):
        return f"lacks the module {answer.name}"
    if isinstance(answer, BaseException):
        return " ".join(f"{type(answer).__name__}: {answer}".split())
    return str(answer)
