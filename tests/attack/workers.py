"""Dask workers that lie about what they wrote, and workers that are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.attack import children, places
from tests.attack.commands import Command, find
from tests.attack.places import Failure
from tests.attack.trials import LINE, NOT_REACHED, SAME, Bench, Result, Trial
from tests.support.dask_cluster import Processes, dask_cluster

LIED_TO = ("quantize", "convert", "convert-one-pass", "quantize-parts")
KILLED = ("quantize", "quantize-calibrate", "convert", "imatrix", "evaluate-json")
"""Commands that are given --scheduler; KILLED has one for each way of sharing work."""

_LIAR = Path(__file__).with_name("liar.py")
_PATIENCE_SECONDS = 180.0
"""A worker that is killed is replaced by one that has to start, and the rest of a machine may be busy."""

_N_WORKERS = 3
_OPTIONS = ("--no-nanny",)


def lying(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Give the chunks of a command to a worker that loses what it writes, for each number of `wanted`."""
    for number in wanted:
        rng = random.Random(f"{seed} worker {number}")
        command = find(LIED_TO[number % len(LIED_TO)])
        os.environ["LIES"] = lies = rng.choice(("all", "half", "from:2", f"from:{rng.randint(3, 20)}"))
        with (
            bench.folder(command) as folder,
            dask_cluster(folder.parent / "cluster", 1, "--preload", str(_LIAR)) as cluster,
        ):
            trial = Trial(bench, _with_scheduler(command, cluster), folder, bench.reference(command), rng, 1)
            yield trial.judged("worker", number, seed, lambda trial, lies=lies: _believe(trial, lies))


def _believe(trial: Trial, lies: str) -> str:
    ended = trial.run(step=f"a worker that loses {lies} writes")
    now = trial.check()
    if ended.code:
        places.check_one_line(ended)
        return LINE
    places.check_same(trial.reference, now)
    return SAME


def killed(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Kill one of a command's workers, or two, at random moments: the same run ends with the same bytes."""
    if not len(wanted):
        return
    with dask_cluster(bench.scratch / f"cluster-{seed}-{wanted.start}", _N_WORKERS, *_OPTIONS) as cluster:
        seconds: dict[str, float] = {}
        for number in wanted:
            command = find(KILLED[number % len(KILLED)])
            asked = _with_scheduler(command, cluster)
            rng = random.Random(f"{seed} killed-worker {number}")
            if command.name not in seconds:  # workers import what they need in the first run
                seconds[command.name] = min(_seconds(bench, asked) for _ in range(2))
            with bench.folder(command) as folder:
                trial = Trial(bench, asked, folder, bench.reference(command), rng)
                longest = seconds[command.name]
                yield trial.judged(
                    "killed-worker",
                    number,
                    seed,
                    lambda trial, longest=longest: _kill(trial, cluster, longest),
                )


def _seconds(bench: Bench, command: Command) -> float:
    with bench.folder(command) as folder:
        return bench.run(command, folder).seconds


def _kill(trial: Trial, cluster: Processes, seconds: float) -> str:
    moments = sorted(trial.rng.uniform(0, seconds) for _ in range(trial.rng.choice((1, 1, 2))))
    child = children.start(trial.command, trial.folder, trial.bench.scratch)
    for moment in moments:
        if child.ends_within(moment):
            break
        worker = cluster.workers.pop(trial.rng.randrange(len(cluster.workers)))
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        cluster.start_worker(*_OPTIONS)
        trial.n_hits += 1
    ended = child.wait(_PATIENCE_SECONDS)
    trial.steps.append(
        f"{trial.n_hits} workers killed ({', '.join(f'{at:.2f} s' for at in moments)}) -> {ended.code}"
    )
    if ended.code:
        raise Failure(f"ended with {ended.said[-700:]!r}")
    places.check_same(trial.reference, trial.check())
    return SAME if trial.n_hits else NOT_REACHED


def _with_scheduler(command: Command, cluster: Processes) -> Command:
    return replace(command, line=f"{command.line} --scheduler {cluster.address}")
