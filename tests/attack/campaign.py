"""Which trials a campaign has, and how processes share them."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

from tests.attack.commands import COMMANDS, READERS, Command
from tests.attack.trials import FAILED, Result

SHARES = {
    "kill": 42, "fault": 24, "limit": 8, "interrupt": 5, "twice": 3, "changed-input": 6, "changed-between": 5,
    "beside": 7, "cleaned": 8, "streams": 9, "names": 9,
}  # fmt: skip
"""Trials for each kind of disturbance, in proportion."""

OF_READERS = {"streams", "names"}
"""Kinds that commands are disturbed with that write nothing, too."""

SPECIAL_TRIALS = {
    "worker": 8,
    "killed-worker": 40,
    "nonsense": 15,
    "hostile": 300,
    "numbers": 250,
    "cache": 15,
    "secrets": 100,
    "hub": 2000,
}
"""Trials of the others in a whole campaign of 1000."""

_WHOLE = ("killed-worker", "hub", "cache")
"""Those that one process does alone, because they begin with something that takes long."""

_PATIENCE_SECONDS = 60.0
"""Seconds without a result after which processes are looked at: one may have died without a word."""

_SELDOM = 3  # a command that takes long gets one trial where others get so many


@dataclass(frozen=True)
class Plan:
    """The trials of one process.

    numbered  (kind, command, number), in order
    special   (kind, range of numbers)
    """

    numbered: tuple[tuple[str, str, int], ...]
    special: tuple[tuple[str, range], ...]
    seed: int
    deadline: float | None
    """Time of time.time() after which none begins."""


def plan(n_trials: int, seed: int, only: Sequence[str], n_jobs: int, minutes: float | None) -> list[Plan]:
    """Return the plan of each of `n_jobs` processes, which have commands of their own.

    only  "kill", "quantize", "kill:quantize" or "kill:quantize:17"; nothing: all
    """
    wanted = _numbered(n_trials, only)
    special = _special(n_trials, only)
    jobs: list[list[tuple[str, str, int]]] = [[] for _ in range(n_jobs)]
    loads = [0.0] * n_jobs
    weight = {command.name: 4.0 if command.seldom else 1.0 for command in (*COMMANDS, *READERS)}
    for command in sorted((*COMMANDS, *READERS), key=lambda command: -weight[command.name]):
        trials = [trial for trial in wanted if trial[1] == command.name]
        job = loads.index(min(loads))
        jobs[job] += trials
        loads[job] += weight[command.name] * len(trials)
    for number, trials in enumerate(jobs):
        random.Random(f"{seed} {number}").shuffle(trials)
    deadline = None if minutes is None else time.time() + 60 * minutes
    return [
        Plan(tuple(trials), tuple(_share(special, number, n_jobs)), seed, deadline)
        for number, trials in enumerate(jobs)
    ]


def _share(special: Sequence[tuple[str, range]], job: int, n_jobs: int) -> Iterator[tuple[str, range]]:
    """Yield what one of the processes does of `special`: its share of each, or the whole."""
    for kind, numbers in special:
        if kind not in _WHOLE:
            mine = numbers[job::n_jobs]
        else:
            mine = numbers if _WHOLE.index(kind) % n_jobs == job else range(0)
        if mine:
            yield kind, mine


def _numbered(n_trials: int, only: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return (kind, command, number) of all trials that are asked for."""
    exact = [one.split(":") for one in only if one.count(":") == 2]
    found = [(kind, command, int(number)) for kind, command, number in exact if kind in SHARES]
    broad = [one for one in only if one.count(":") < 2]
    if only and not broad:
        return found
    counts: dict[tuple[str, str], int] = defaultdict(int)
    pairs = [
        (kind, command)
        for kind in SHARES
        for command in (*COMMANDS, *(READERS if kind in OF_READERS else ()))
        if not broad or any(_matches(one, kind, command.name) for one in broad)
    ]
    shares = {(kind, command): SHARES[kind] / (_SELDOM if command.seldom else 1) for kind, command in pairs}
    whole = sum(shares.values())
    for (kind, command), share in shares.items():
        counts[kind, command.name] = max(1, round(n_trials * share / whole))
    return found + [(*pair, number) for pair, count in counts.items() for number in range(count)]


def _matches(one: str, kind: str, command: str) -> bool:
    return one in (kind, command, f"{kind}:{command}")


def _special(n_trials: int, only: Sequence[str]) -> list[tuple[str, range]]:
    found = []
    for kind, whole in SPECIAL_TRIALS.items():
        for one in only or [kind]:
            if one == kind:
                found.append((kind, range(max(1, round(whole * n_trials / 1000)))))
            elif one.startswith(f"{kind}:") and one.count(":") == 2:
                number = int(one.rpartition(":")[2])
                found.append((kind, range(number, number + 1)))
    return found


def unknown(only: Sequence[str]) -> list[str]:
    """Return what of `only` names neither a kind nor a command."""
    names = {*SHARES, *SPECIAL_TRIALS, "upload"} | {command.name for command in (*COMMANDS, *READERS)}
    return [one for one in only if not {*one.split(":")[:2]} <= names]


def run(plans: Sequence[Plan]) -> Iterator[Result]:
    """Run the plans in a process each, and yield how trials end."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Result | None] = context.Queue()
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    processes = []
    for number, one in enumerate(plans):
        processes.append(context.Process(target=_work, args=(one, folder / str(number), results)))
        processes[-1].start()
    try:
        n_running = len(processes)
        while n_running:
            try:
                result = results.get(timeout=_PATIENCE_SECONDS)
            except Empty:
                dead = [process for process in processes if process.exitcode]
                for process in dead:
                    why = f"a process of the campaign ended with {process.exitcode}"
                    yield Result("campaign", "", 0, 0, FAILED, 0, why)
                    processes.remove(process)
                n_running -= len(dead)
                continue
            if result is None:
                n_running -= 1
            else:
                yield result
    finally:
        for process in processes:
            process.terminate()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _work(one: Plan, folder: Path, results: Queue[Result | None]) -> None:
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that schedulers and workers go too
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)  # of the children, which are forked
    try:
        for result in run_here(one, folder):
            results.put(result)
    except BaseException as error:
        results.put(Result("campaign", "", 0, one.seed, FAILED, 0, f"{type(error).__name__}: {error}"))
        raise
    finally:
        results.put(None)


def run_here(one: Plan, folder: Path) -> Iterator[Result]:
    """Run a plan in this process, which should have one thread alone; `folder` is made for it."""
    from tests.attack.kinds import KINDS
    from tests.attack.specials import SPECIALS
    from tests.attack.trials import Bench, one_trial

    bench = Bench(folder / "material", folder / "scratch")
    bench.scratch.mkdir(parents=True)
    commands: dict[str, Command] = {command.name: command for command in (*COMMANDS, *READERS)}
    for kind, name, number in one.numbered:
        if one.deadline is not None and time.time() > one.deadline:
            return
        yield one_trial(bench, kind, KINDS[kind], commands[name], number, one.seed)
    for kind, numbers in one.special:
        for result in SPECIALS[kind](bench, numbers, one.seed):
            yield result
            if one.deadline is not None and time.time() > one.deadline:
                return
