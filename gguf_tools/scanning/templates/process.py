"""Starts the processes that read and run chat templates of strangers."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from gguf_tools.system.locks import least_environment

EXIT_BREAKOUT = 86
"""Exit code of a worker whose template had Python do what no prompt needs."""


def start_worker(module: str) -> subprocess.Popen[bytes]:
    """Start a module of ours in a process without our environment, with pipes for input and output."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/",
        env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **least_environment()},
        start_new_session=True,
    )  # fmt: skip


def end_worker(process: subprocess.Popen[bytes]) -> None:
    """End a worker, whatever it does, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not sent yet has no reader any more
                pipe.close()
