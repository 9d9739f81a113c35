"""A small process that forks the children which tests kill.

A fork copies the tables of the whole process. Late in a test run that has gigabytes, and a fork takes 0.1 s;
here it takes a hundredth of it. The server imports the module of a work once, and calls the module's
`warm_up` if it has one, so that children find loaded what they need.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

Work = Callable[[], object]
_ROOT = Path(__file__).parents[2]


def in_served_child(work: Work) -> int:
    """Call `work` in a child of the server. Return 0, 1 if it raised, or minus the signal that killed it.

    work  is pickled, so it is a function of a module, a method, or a `partial` of one of these. What tests
          have patched in this process is not patched there; nothing is synced
    """
    process = _server()
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process.stdin, pickle.dumps((_modules(work), os.getcwd(), pickle.dumps(work))))
    return int(process.stdout.readline())


def _modules(work: object) -> list[str]:
    """Return the modules of a function, and of those that it is a `partial` with."""
    if isinstance(work, functools.partial):
        return [module for part in (work.func, *work.args) for module in _modules(part)]
    return [work.__module__] if callable(work) else []


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.communicate()


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.fsync = os.fdatasync = lambda fd: None
    ready: set[str] = set()
    while header := sys.stdin.buffer.read(8):
        modules, folder, work = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        for name in {*modules} - ready:
            module = importlib.import_module(name)
            getattr(module, "warm_up", lambda: None)()
            ready.add(name)
        pid = os.fork()
        if not pid:
            os.dup2(nothing, 0)
            replies.detach()
            _work(work, folder)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies, flush=True)


def _work(work: bytes, folder: str) -> None:
    from tests.support.killing import finish_child

    os.chdir(folder)
    finish_child(lambda: pickle.loads(work)())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the tests, which then close the pipe
    _serve()
