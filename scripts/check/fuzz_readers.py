"""Read very many nearly valid files with all readers, and keep the files that make a reader fail.

    python scripts/check/fuzz_readers.py --inputs 1000000
    python scripts/check/fuzz_readers.py --inputs 50000 --targets gguf imatrix --processes 2 --seed 7

A reader may succeed or raise a ToolkitError, within 2 seconds of processor time and 200 MB more than its
process had before. An input that fails is written to --out with its traceback, and so is an input that kills
a process or makes it hang. Input number i of a target depends on the target, the seed and i alone. The exit
code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_tools.errors import ToolkitError
from tests.fuzz import scratch
from tests.fuzz.targets import TARGETS

CPU_SECONDS = 2.0
MEMORY_BYTES = 200_000_000
HANGS_AFTER_SECONDS = 60.0
CHUNK_INPUTS = 2000

#: Inputs out of a thousand for each reader: more for readers that are used most or are fast.
SHARES = {
    "gguf": 260, "gguf_set": 100, "safetensors": 200, "checkpoint": 60, "config_json": 120,
    "tokenizer_json": 70, "tokenizer_config": 40, "tokenizer_model": 70, "model_card": 40, "imatrix": 40,
}  # fmt: skip


class TookTooLongError(BaseException):
    """A reader ran out of time. It is no Exception, so that no reader catches it as one of its own."""


@dataclass(frozen=True)
class Chunk:
    """The inputs start..stop of a target, read by one process."""

    target: str
    seed: int
    start: int
    stop: int

    def input(self, index: int) -> bytes:
        return TARGETS[self.target].make(random.Random(f"{self.target} {self.seed} {index}"))


@dataclass
class Tally:
    """How the inputs ended: counts by ending, the names of failed inputs, and the seconds that all took."""

    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.endings += other.endings
        self.failures += other.failures
        self.seconds += other.seconds


# --- in a process of its own ----------------------------------------------------------------------------


def run_chunk(chunk: Chunk, out: Path, place: Any, results: Connection) -> None:
    """Read the inputs of `chunk`, and send a Tally.

    out    folder for inputs that fail
    place  number of the input that is being read, shared with the main process
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries print about an input
    signal.signal(signal.SIGPROF, _raise_took_too_long)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MEMORY_BYTES,) * 2)
    tally = Tally()
    begun = time.monotonic()
    try:
        for index in range(chunk.start, chunk.stop):
            place.value = index
            _read(chunk, index, out, tally)
    finally:
        scratch.remove()
    tally.seconds = time.monotonic() - begun
    results.send(tally)


def _read(chunk: Chunk, index: int, out: Path, tally: Tally) -> None:
    data = chunk.input(index)
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        TARGETS[chunk.target].one_input(data)
        ending = "read"
    except ToolkitError as error:
        ending = type(error).__name__
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ending = f"FAILED: {type(error).__name__}"
        tally.failures.append(keep(out, chunk, index, data, traceback.format_exc()))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    tally.endings[ending] += 1


def _raise_took_too_long(_signal: int, _frame: FrameType | None) -> None:
    raise TookTooLongError(f"more than {CPU_SECONDS} s")


def keep(out: Path, chunk: Chunk, index: int, data: bytes, why: str) -> str:
    """Write an input, and the reason why it failed; return its name."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"{chunk.target}-{chunk.seed}-{index}"
    (out / name).write_bytes(data)
    (out / f"{name}.txt").write_text(why)
    return name


# --- in the main process --------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process that reads a chunk."""

    chunk: Chunk
    process: Any
    place: Any
    seen: int = -1
    seen_at: float = 0.0

    def hangs(self) -> bool:
        """Return whether it has been reading the same input for a minute."""
        now = time.monotonic()
        if self.place.value != self.seen:
            self.seen, self.seen_at = self.place.value, now
        return now - self.seen_at > HANGS_AFTER_SECONDS


def run(chunks: deque[Chunk], n_processes: int, out: Path) -> Iterator[tuple[str, Tally]]:
    """Read all chunks and yield (target, Tally). If a process dies, another resumes after the fatal input."""
    workers: dict[Connection, Worker] = {}
    while chunks or workers:
        while chunks and len(workers) < n_processes:
            receiving, worker = start(chunks.popleft(), out)
            workers[receiving] = worker
        for receiving in wait(list(workers), timeout=1):
            worker = workers.pop(receiving)  # type: ignore[call-overload]
            try:
                yield worker.chunk.target, receiving.recv()  # type: ignore[union-attr]
            except EOFError:
                worker.process.join()
                yield worker.chunk.target, died(worker, out)
                chunks.appendleft(replace(worker.chunk, start=worker.place.value + 1))
            worker.process.join()
        for worker in workers.values():
            if worker.hangs():
                worker.process.kill()


def start(chunk: Chunk, out: Path) -> tuple[Connection, Worker]:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    place = multiprocessing.Value(ctypes.c_long, chunk.start)
    process = multiprocessing.Process(target=run_chunk, args=(chunk, out, place, sending))
    process.start()
    sending.close()
    return receiving, Worker(chunk, process, place)


def died(worker: Worker, out: Path) -> Tally:
    """Return the tally of a chunk whose process died.

    The last input killed the process. How the inputs before it ended is lost.
    """
    chunk, index = worker.chunk, worker.place.value
    why = f"the process ended with code {worker.process.exitcode}\n"
    name = keep(out, chunk, index, chunk.input(index), why)
    return Tally(Counter({"not counted": index - chunk.start, "FAILED: process died": 1}), [name])


def chunks_of(n_inputs: int, targets: list[str], seed: int) -> deque[Chunk]:
    """Return `n_inputs` inputs in chunks, shared out among the targets, which take turns."""
    whole = sum(SHARES[target] for target in targets)
    chunks = []
    for target in targets:
        share = round(n_inputs * SHARES[target] / whole)
        chunks += [
            Chunk(target, seed, start, min(start + CHUNK_INPUTS, share))
            for start in range(0, share, CHUNK_INPUTS)
        ]
    return deque(sorted(chunks, key=lambda chunk: chunk.start))


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the results."""
    yield "| reader | inputs | a second | read | refused | failed |"
    yield "|---|---|---|---|---|---|"
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    for name, tally in [*tallies.items(), ("all", total)]:
        n_inputs, n_read = tally.endings.total(), tally.endings["read"]
        n_failed = sum(count for ending, count in tally.endings.items() if ending.startswith("FAILED"))
        rate = f"{n_inputs / tally.seconds:.0f}" if tally.seconds else ""
        n_refused = n_inputs - n_read - n_failed
        yield f"| {name} | {n_inputs} | {rate} | {n_read} | {n_refused} | {n_failed} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="of all targets together")
    parser.add_argument("--targets", nargs="+", choices=SHARES, default=list(SHARES), metavar="TARGET")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder for what fails")
    args = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for target in args.targets:
        TARGETS[target].warm_up()
    tallies = {target: Tally() for target in args.targets}
    begun = time.monotonic()
    for target, tally in run(chunks_of(args.inputs, args.targets, args.seed), args.processes, args.out):
        tallies[target].add(tally)
        for name in tally.failures:
            print(f"failed: {args.out / name}", flush=True)
    print("\n".join(table(tallies)))
    print(f"{datetime.date.today()}, seed {args.seed}, {time.monotonic() - begun:.0f} s")
    failed = [name for tally in tallies.values() for name in tally.failures]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
