"""Somebody else's files, and links, under the names that a command uses beside its outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.attack import places
from tests.attack.places import Failure
from tests.attack.trials import LINE, SAME, Trial

_RANDOM = re.compile(r"\.[0-9a-f]{24}\.partial$")


def beside(trial: Trial) -> str:
    """Put something under one of the names that the command uses, run it, and look whether it is still there.

    An output may replace a file of its name. Nothing else is replaced, and nothing is written through a link.
    """
    # Nobody else's file has a name with random digits.
    touched = [name for name in sorted(trial.reference.touched) if not _RANDOM.search(name)]
    name = trial.rng.choice(touched or trial.reference.outputs)
    is_output = name in trial.reference.outputs
    what = trial.rng.choice(sorted(PLANTS if not is_output else PLANTS.keys() - {"file", "folder", "pipe"}))
    path = trial.folder / name
    if path.exists():  # what is edited in place
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    target = Path(trial.folder, trial.rng.choice(sorted(trial.reference.before)))
    if target == path:
        target = trial.folder / "mine.txt"
    PLANTS[what](path, target)
    trial.n_hits += 1
    planted = trial.tree()
    ended = trial.run(step=f"{what} ({target.name}) as {name}")
    now = trial.tree()
    expected = {other: digest for other, digest in planted.items() if not (is_output and other == name)}
    places.check_unharmed(trial.command, expected, now, trial.reference)
    if ended.code:
        places.check_one_line(ended)
        places.check_published(trial.reference, planted, now)
        return LINE
    if not places.is_complete(trial.reference, now):
        raise Failure("succeeded, and the outputs are others")
    return SAME


def _file(path: Path, _target: Path) -> None:
    path.write_bytes(b"somebody's own work\n")


def _folder(path: Path, _target: Path) -> None:
    path.mkdir()
    (path / "own.txt").write_bytes(b"somebody's own work\n")


def _symbolic(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


def _hard(path: Path, target: Path) -> None:
    path.hardlink_to(target)


def _dangling(path: Path, _target: Path) -> None:
    path.symlink_to("nowhere")


def _pipe(path: Path, _target: Path) -> None:
    os.mkfifo(path)


PLANTS = {
    "file": _file,
    "folder": _folder,
    "symbolic link": _symbolic,
    "hard link": _hard,
    "dangling link": _dangling,
    "pipe": _pipe,
}
