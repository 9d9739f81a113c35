"""Reading a strange file in a process of its own, which may take 4 seconds and 200 MB.

    with Warden() as warden:
        outcome = warden.read("gguf", path)

One process imports everything once and forks for each file, so a read takes milliseconds, and its memory can
be measured alone. Seconds are processor time, so a busy machine doesn't fail a test.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

CPU_SECONDS = 4
"""Twice what the largest honest file takes on a slow machine, and four times what it takes on a fast one."""
MEMORY_BYTES = 200_000_000
HANGS_AFTER_SECONDS = 30
"""Seconds by the clock, for a child that waits without working, such as on a pipe."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of reading a file.

    how      "opened", "refused" (a ToolkitError), or "failed" (another error, or a limit exceeded)
    error    type of the error, "" if there is none
    text     message of the error
    memory   bytes by which the process grew at most
    """

    how: Literal["opened", "refused", "failed"]
    error: str = ""
    text: str = ""
    memory: int = 0


class Warden:
    """A process that reads files in children of its own. Use it in a with-block."""

    def __enter__(self) -> Warden:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()
        _pipe(self._process.stdout).close()

    def read(self, target: str, path: Path) -> Outcome:
        """Read `path`, a file or a folder, with `tests.fuzz.targets.TARGETS[target]`."""
        request, reply = _pipe(self._process.stdin), _pipe(self._process.stdout)
        request.write(json.dumps([target, str(path)]) + "\n")
        request.flush()
        return Outcome(**json.loads(reply.readline()))


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _serve() -> None:
    from tests.fuzz.targets import TARGETS

    for target in TARGETS.values():
        target.warm_up()
    for line in sys.stdin:
        name, path = json.loads(line)
        receiving, sending = os.pipe()
        child = os.fork()
        if not child:
            os.close(receiving)
            _read_within_limits(name, Path(path), sending)
        os.close(sending)
        print(json.dumps(_outcome_of(child, receiving)), flush=True)
        os.close(receiving)


def _outcome_of(child: int, receiving: int) -> dict[str, object]:
    """Wait for the child's report; if the child dies or hangs, make the report for it."""
    ready, _, _ = select.select([receiving], [], [], HANGS_AFTER_SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    report = b"".join(iter(lambda: os.read(receiving, 1 << 16), b""))
    _, status = os.waitpid(child, 0)
    if report:
        return json.loads(report)
    reasons = {signal.SIGXCPU: f"more than {CPU_SECONDS} s", signal.SIGKILL: "hangs"}
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"how": "failed", "error": reasons.get(killed_by, f"killed by signal {killed_by}")}


def _read_within_limits(name: str, path: Path, sending: int) -> None:
    from gguf_tools.errors import ToolkitError
    from tests.fuzz.targets import TARGETS

    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    grown_from = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    how, error, text = "opened", "", ""
    try:
        TARGETS[name].read(path)
    except ToolkitError as caught:
        how, error, text = "refused", type(caught).__name__, str(caught)
    except BaseException as caught:
        how, error, text = "failed", type(caught).__name__, str(caught)[:1000]
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_from)
    os.write(sending, json.dumps({"how": how, "error": error, "text": text, "memory": memory}).encode())
    os._exit(0)


if __name__ == "__main__":
    _serve()
