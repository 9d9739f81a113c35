"""Inputs that change while a command runs, or between a kill and the same command again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from tests.attack import places
from tests.attack.children import Disturbance, Ended
from tests.attack.places import Failure, Tree
from tests.attack.trials import LINE, NOT_REACHED, SAME, Trial


def under_a_run(trial: Trial) -> str:
    """Change an input at some moment of a run.

    The outputs must be those of the input as it was or as it is, or the command must say that it has changed.
    """
    if not trial.command.inputs:
        return NOT_REACHED
    name = _some_input(trial)
    change = trial.rng.choice(sorted(CHANGES))
    seconds = trial.rng.uniform(0, trial.reference.seconds)
    rng = random.Random(trial.rng.random())
    done: list[bool] = []

    def midway() -> None:
        CHANGES[change](trial.folder / name, rng)
        done.append(True)

    ended = trial.run(
        Disturbance(midway=midway, midway_after=seconds), f"{change} {name} after {seconds:.3f} s"
    )
    if not done:
        return NOT_REACHED
    trial.n_hits += 1
    return _judge(trial, name, ended)


def between_runs(trial: Trial) -> str:
    """Kill the command, change an input, and run the command again."""
    if not trial.command.inputs:
        return NOT_REACHED
    name = _some_input(trial)
    change = trial.rng.choice(sorted(CHANGES))
    seconds = trial.rng.uniform(0, trial.reference.seconds)
    ended = trial.run(Disturbance(signal_after=(signal.SIGKILL, seconds)), f"kill after {seconds:.3f} s")
    if ended.code >= 0:
        return NOT_REACHED
    trial.n_hits += 1
    CHANGES[change](trial.folder / name, random.Random(trial.rng.random()))
    ended = trial.run(step=f"{change} {name}, resumed")
    return _judge(trial, name, ended)


def _judge(trial: Trial, name: str, ended: Ended) -> str:
    """Raise Failure unless outputs are the old input's, or the new one's, or nothing is published.

    name  the input that was changed
    """
    now = trial.tree()
    before = trial.reference.before | {name: now.get(name, "gone")}
    if now.get(name) is None:
        before.pop(name)
    places.check_unharmed(trial.command, before, now, trial.reference)
    published = _published(trial, now, name)
    old = _published(trial, trial.reference.after, name)
    if ended.code:
        places.check_told(trial.command, ended)
        if not published.items() <= old.items():
            new = _undisturbed(trial, name)
            if new is None or not published.items() <= new.items():
                raise Failure(f"published: {', '.join(sorted(published))}, of a mixture")
        return LINE
    if published == old or published == _undisturbed(trial, name):
        return SAME
    raise Failure("succeeded, and the outputs are of neither input, or of both")


def _undisturbed(trial: Trial, name: str) -> Tree | None:
    """Return what is published for the changed input; None if the command fails with it."""
    with trial.bench.folder(trial.command) as folder:
        (folder / name).unlink()
        if (trial.folder / name).exists():
            (folder / name).write_bytes((trial.folder / name).read_bytes())
        if trial.bench.run(trial.command, folder).code not in ((0, 1) if trial.command.finds else (0,)):
            return None
        return _published(trial, places.tree(folder), name)


def _published(trial: Trial, found: Tree, name: str) -> Tree:
    """Return the outputs that were made; files that are edited in place are outputs once they are changed."""
    before = trial.reference.before
    return {
        output: found[output]
        for output in trial.reference.published
        if output in found and output != name and found[output] != before.get(output)
    }


def _some_input(trial: Trial) -> str:
    return trial.rng.choice(
        [name for name in trial.reference.before if name.startswith(trial.command.inputs)]
    )


# ---- changes


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _zero(path: Path, rng: random.Random) -> None:
    """Write zeros over a part, and put the time stamps back."""
    _overwrite(path, rng, lambda data: bytes(len(data)))


def _flip(path: Path, rng: random.Random) -> None:
    """Turn bits around in a few bytes, and put the time stamps back."""
    _overwrite(path, rng, lambda data: bytes(byte ^ 0x55 for byte in data[:4]) + data[4:])


def _overwrite(path: Path, rng: random.Random, change: Callable[[bytes], bytes]) -> None:
    status = path.stat()
    start = rng.randrange(status.st_size)
    with path.open("r+b") as file:
        file.seek(start)
        data = file.read(rng.choice((64, 4096, 1 << 20)))
        file.seek(start)
        file.write(change(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replace(path: Path, rng: random.Random) -> None:
    """Rename another file of the same size over it, with its time stamps."""
    status = path.stat()
    other = path.with_name(f"{path.name}.other")
    other.write_bytes(path.read_bytes())
    _flip(other, rng)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def _remove(path: Path, _rng: random.Random) -> None:
    path.unlink()


CHANGES = {"truncate": _truncate, "zero": _zero, "flip": _flip, "replace": _replace, "remove": _remove}
