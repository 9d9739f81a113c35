"""A command in a forked child of this process, which has everything imported, and what disturbs it there.

`strace` is attached to a child that waits for it; that takes a hundredth of a second, and a call that it lets
fail, or at which it kills, may be one of Python, of a library in C, or of another thread.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tqdm import tqdm

import gguf_tools.commands.command
from tests.attack.commands import Command
from tests.attack.material import main_of

PATIENCE_SECONDS = 60.0
_MAX_SAID = 1 << 16
_MAX_PRINTED = 1 << 22
CALLS = (
    "openat", "read", "pread64", "preadv", "write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate",
    "fallocate", "fadvise64", "flock", "rename", "renameat", "unlink", "unlinkat", "mkdir", "rmdir", "statfs",
    "copy_file_range", "sendfile", "newfstatat",
)  # fmt: skip
"""Calls of the system that are counted, and let fail."""

CHANGES = (
    "write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "fallocate", "rename", "renameat",
    "unlink", "unlinkat", "mkdir", "rmdir", "copy_file_range", "sendfile",
)  # fmt: skip
"""Those at which a kill is worth trying."""


KEPT = "kept"
STREAMS = ("closed", "broken", "full")
"""What may be wrong with a stream: it is closed, nobody reads the other end of the pipe, the disk is full."""

NO_FLUSH = 120
"""Exit code of a Python whose streams can't be flushed in the end."""


@dataclass(frozen=True)
class Disturbance:
    """What happens to a child; nothing by default.

    signal_after  a signal and the seconds after which it comes
    inject        what strace does: "pwrite64:error=ENOSPC:when=3", "rename:signal=KILL:when=1"
    limits        limits of the process: numbers of the resource module -> value
    trace         have strace count its calls
    midway        called by the parent after `midway_after` seconds
    stdout        KEPT, or one of STREAMS
    stderr        KEPT, or one of STREAMS; what it says then is not known
    memory        most bytes of address space that it may take beyond those that it begins with; 0: any
    again         begin again and again, until SIGTERM comes or it fails
    """

    signal_after: tuple[int, float] | None = None
    inject: str = ""
    limits: tuple[tuple[int, int], ...] = ()
    trace: bool = False
    midway: Callable[[], object] | None = None
    midway_after: float = 0.0
    stdout: str = KEPT
    stderr: str = KEPT
    memory: int = 0
    again: bool = False


UNDISTURBED = Disturbance()


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    code      exit code, or minus the signal that killed it
    said      standard error
    printed   standard output
    seconds   by the clock
    calls     how often it made each call of CALLS, if it was traced
    injected  the call that strace disturbed, as it prints it; empty if there was none
    touched   names of files and folders that it made, in its folder, if it was traced
    hung      it was killed because it took too long
    """

    code: int
    said: str
    seconds: float
    calls: Counter[str]
    injected: str = ""
    touched: frozenset[str] = frozenset()
    hung: bool = False
    printed: str = ""


def has_strace() -> bool:
    return shutil.which("strace") is not None


def run(command: Command, folder: Path, scratch: Path, how: Disturbance = UNDISTURBED) -> Ended:
    """Run `command` in `folder` and wait for it; files with what it says are in `scratch`."""
    child = start(command, folder, scratch, how)
    return child.wait()


def start(command: Command, folder: Path, scratch: Path, how: Disturbance = UNDISTURBED) -> Child:
    """Start `command` in `folder`."""
    traced = bool(how.inject) or how.trace
    files = Path(scratch, f"{command.name}-{time.monotonic_ns()}")
    said = mmap.mmap(-1, _MAX_SAID)
    held = {signal.SIGINT, signal.SIGTERM} if how.again else {signal.SIGINT}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    pid = os.fork()
    if not pid:
        _be_child(command, folder, files, said, how, traced)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    tracer = _attach(pid, files.with_suffix(".calls"), how) if traced else None
    return Child(pid, folder, files, said, how, tracer)


class Child:
    """A command that runs."""

    def __init__(
        self,
        pid: int,
        folder: Path,
        files: Path,
        said: mmap.mmap,
        how: Disturbance,
        tracer: subprocess.Popen[bytes] | None,
    ) -> None:
        self._pid, self._folder, self._files, self._said = pid, folder, files, said
        self._how, self._tracer = how, tracer
        self._began = time.monotonic()

    def wait(self, patience: float | None = None) -> Ended:
        """Wait until it ends, with what is to happen meanwhile; kill it after so many seconds."""
        patience = PATIENCE_SECONDS if patience is None else patience
        handle = os.pidfd_open(self._pid)
        hung = False
        try:
            if self._how.midway is not None and not self._ended(handle, self._how.midway_after):
                self._how.midway()
            if self._how.signal_after is not None:
                number, seconds = self._how.signal_after
                if not self._ended(handle, seconds):
                    signal.pidfd_send_signal(handle, number)
            if not self._ended(handle, patience):
                hung = True
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        seconds = time.monotonic() - self._began
        trace = _Trace(Counter(), "", frozenset())
        if self._tracer is not None:
            self._tracer.communicate()
            trace = _read_trace(self._files.with_suffix(".calls"), self._folder)
        said = self._said[:].rstrip(b"\0").decode(errors="replace")
        out = self._files.with_suffix(".out")  # not there if the child was killed at once
        printed = out.read_bytes()[:_MAX_PRINTED].decode(errors="replace") if out.exists() else ""
        for suffix in (".err", ".out", ".calls"):
            self._files.with_suffix(suffix).unlink(missing_ok=True)
        return Ended(code, said, seconds, *trace, hung, printed)

    def stop(self) -> Ended:
        """Have one that begins again and again end after this time, and wait for it."""
        os.kill(self._pid, signal.SIGTERM)
        return self.wait()

    def ends_within(self, seconds: float) -> bool:
        """Wait until so many seconds after it began; return whether it has ended by then."""
        handle = os.pidfd_open(self._pid)
        try:
            return self._ended(handle, seconds)
        finally:
            os.close(handle)

    def _ended(self, handle: int, seconds: float) -> bool:
        return bool(select.select([handle], [], [], max(0.0, self._began + seconds - time.monotonic()))[0])


class _Shared(io.StringIO):
    """Standard error in memory that the parent sees too: no failing call keeps a message back."""

    def __init__(self, said: mmap.mmap) -> None:
        super().__init__()
        self._said = said

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        room = _MAX_SAID - self._said.tell()
        self._said.write(data[:room])
        return len(text)


def _be_child(
    command: Command, folder: Path, files: Path, said: mmap.mmap, how: Disturbance, traced: bool
) -> NoReturn:
    code = 1
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(files.with_suffix(suffix), os.O_RDWR | os.O_CREAT, 0o600), number)
        _hold_ctrl_c()
        # All forks share tqdm's default lock, and one that is killed while holding it keeps it forever.
        tqdm.set_lock(threading.RLock())
        sys.stdout = sys.__stdout__ = _stream(1, how.stdout)
        sys.stderr = sys.__stderr__ = _Shared(said) if how.stderr == KEPT else _stream(2, how.stderr)
        if not traced:
            os.fsync = os.fdatasync = lambda fd: None  # they guard against a crash of the machine
        main = main_of(command.program)
        limits = how.limits
        if how.memory:
            limits += ((resource.RLIMIT_AS, _address_space() + how.memory),)
        for which, value in limits:
            resource.setrlimit(which, (value, value))
        if traced:
            os.kill(os.getpid(), signal.SIGSTOP)
        code = _again_and_again(main, command.words) if how.again else main(command.words)
    except BaseException:
        if sys.stderr is not None:
            traceback.print_exc()
    finally:
        os._exit(code if _flush() else code or NO_FLUSH)


def _stream(number: int, what: str) -> Any:
    """Return the stream of a descriptor as Python makes it, after doing to it what is wrong with it."""
    if what == "closed":
        os.close(number)
        return None
    if what == "broken":
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, number)
    elif what == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    return open(number, "w", encoding="utf-8", buffering=1 if number == 2 else -1, closefd=False)


def _flush() -> bool:
    """Flush the streams as Python does in the end; return whether that went well."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:
        return False
    return True


def _again_and_again(main: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a command once and until SIGTERM waits, or it fails; return the last exit code."""
    code = main(words)
    while not code and signal.SIGTERM not in signal.sigpending():
        code = main(words)
    return code


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _hold_ctrl_c() -> None:
    """Let ctrl-C wait until a command has read its arguments: before that, Python itself would answer."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command = gguf_tools.commands.command.run

    def run(parser: Any, body: Any, *more: Any, **options: Any) -> int:
        def interruptible(args: Any) -> Any:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return body(args)

        return run_command(parser, interruptible, *more, **options)

    gguf_tools.commands.command.run = run


def _attach(pid: int, log: Path, how: Disturbance) -> subprocess.Popen[bytes]:
    os.waitpid(pid, os.WUNTRACED)
    names = how.inject.partition(":")[0] if how.inject else ",".join(CALLS)
    words = [
        "strace",
        "-f",
        "-q",
        "-y",
        "-s",
        "0",
        "-o",
        str(log),
        "-e",
        "signal=none",
        "-e",
        f"trace={names}",
    ]
    if how.inject:
        words += ["-e", f"inject={how.inject}"]
    tracer = subprocess.Popen([*words, "-p", str(pid)], stderr=subprocess.PIPE)
    status = Path(f"/proc/{pid}/status")
    while "TracerPid:\t0\n" in status.read_text():
        if tracer.poll() is not None:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"strace can't be attached to a child: {tracer.communicate()[1].decode()}")
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)
    return tracer


_MADE = re.compile(r'openat\([^"]*"(.*?)", [^ ]*O_CREAT|mkdir\("(.*?)"|rename\("(.*?)", "(.*?)"')
"""A line of strace with names that a process makes."""


class _Trace(NamedTuple):
    """What strace saw: calls, injected and touched of Ended."""

    calls: Counter[str]
    injected: str
    touched: frozenset[str]


def _read_trace(log: Path, folder: Path) -> _Trace:
    by_thread: Counter[tuple[str, str]] = Counter()
    injected = ""
    touched = set()
    for line in log.read_text(errors="replace").splitlines():
        if found := re.match(r"(\d+) +(\w+)\(", line):
            by_thread[found.group(1), found.group(2)] += 1
        if found := _MADE.search(line):
            touched |= {Path(folder, name) for name in found.groups() if name}
        if "(INJECTED)" in line and not injected:
            injected = line.partition(" ")[2].strip()
    calls: Counter[str] = Counter()
    for (_, name), count in by_thread.items():
        calls[name] = max(calls[name], count)
    here = (str(path.relative_to(folder)) for path in touched if path.is_relative_to(folder))
    return _Trace(calls, injected, frozenset(here))
