"""Shared by the scripts of this folder: arguments, facts about the machine, timed commands, results."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from tests.support.memory import high_water

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


def parser_of(doc: str, numbers: Mapping[str, float], *, folder: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a script: numbers with these defaults, where files go, and --json."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    for option, default in numbers.items():
        parser.add_argument(option, type=type(default), default=default, help="default: %(default)s")
    if folder:
        parser.add_argument("--folder", type=Path, help="where the files go (removed afterwards)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def command(name: str, *words: object) -> list[str]:
    """Return the words that run a command of the library."""
    return [sys.executable, "-m", "gguf_tools", name, *map(str, words)]


def machine() -> dict[str, str]:
    """Return the facts about this machine that the numbers depend on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in fields.items()}
    flags = cpu.get("flags", "").split()
    target = os.environ.get("NUMBA_CPU_NAME")
    vectors = next((name for name in ("avx512f", "avx2", "sse2") if name in flags), platform.machine())
    packages = [name for name in ("numpy", "numba", "llvmlite", "torch", "xllamacpp") if find_spec(name)]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu.get("model name", platform.processor()),
        "vectors": f"those of {target}" if target else vectors,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


@dataclass(frozen=True)
class Run:
    """One command, or several of the same kind: times are added up, and memory is the largest.

    seconds, cpu_seconds  by the clock, and of its processes
    peak_bytes            the largest resident memory of its process
    of                    what it went through, by the title of a column
    ended                 False: it was killed when its time was over
    """

    what: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    of: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = True


def run(
    what: str, words: Sequence[str], of: Mapping[str, Any] | None = None, limit: float | None = None
) -> Run:
    """Run a command to its end, or for at most `limit` seconds.

    raises  CalledProcessError with the command's output when it fails
    """
    started, used = time.perf_counter(), cpu_seconds()
    peak_bytes, ended = 0, True
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        # rusage won't do: the command is a fork of this process, and its maximum includes this one's memory.
        while process.poll() is None:
            peak_bytes = max(peak_bytes, high_water(process.pid))
            if limit is not None and ended and time.perf_counter() - started > limit:
                process.kill()
                ended = False
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        if ended and process.returncode:
            log.seek(0)
            raise subprocess.CalledProcessError(process.returncode, words, log.read())
    return Run(what, seconds, cpu_seconds() - used, peak_bytes, of or {}, ended)


def cpu_seconds() -> float:
    """Return the CPU time of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(
    args: argparse.Namespace, runs: Sequence[Run], more: Mapping[str, Callable[[Run], str]] | None = None
) -> None:
    """Print runs as a Markdown table, or as JSON.

    more  further columns by their titles
    """
    more = more or {}
    if args.json:
        print(json.dumps({"machine": machine(), "runs": [asdict(one) for one in runs]}, indent=1))
        return
    given = {name: value for name, value in vars(args).items() if name in ("threads", "layers")}
    print(", ".join(f"{name} {value}" for name, value in {**machine(), **given}.items()), end="\n\n")
    titles = ["run", *runs[0].of, "seconds", "CPU seconds", *more, "peak memory"]
    print(_row(titles), "|---" * len(titles) + "|", sep="\n")
    for one in runs:
        seconds = f"{one.seconds:.2f}" if one.ended else f"killed after {one.seconds:.0f}"
        others = (show(one) for show in more.values())
        print(
            _row(
                [one.what, *one.of.values(), seconds, f"{one.cpu_seconds:.1f}", *others, _mb(one.peak_bytes)]
            )
        )


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.0f} MB"


def measured(
    args: argparse.Namespace, head: Sequence[str], timings: Iterable[T], line: Callable[[T], str]
) -> list[T]:
    """Return all timings; print a line of each when it is there, unless they will be printed as JSON."""
    if not args.json:
        print(", ".join(f"{key} {value}" for key, value in machine().items()), *head, sep="\n")
    found = []
    for timing in timings:
        found.append(timing)
        if not args.json:
            print(line(timing).rstrip(), flush=True)
    return found
