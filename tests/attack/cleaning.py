"""`clean --remove` again and again beside a run, its kills and other people's files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.attack import children, places
from tests.attack.children import Disturbance
from tests.attack.commands import Command
from tests.attack.places import Failure
from tests.attack.trials import LINE, SAME, Trial

CLEAN = Command("clean-remove", "gguf-tools clean . --remove -q")

_PLANTS: dict[str, Callable[[Path], object]] = {
    "theirs.partial": lambda path: path.write_bytes(b"GGUF, they say, is a fine name for a file\n"),
    "photo.0123abcd.partial": lambda path: path.write_bytes(b"half a photo"),
    "empty.89abcdef.partial": lambda path: path.write_bytes(b""),
    "list.journal": lambda path: path.write_bytes(b"GGUF and I met on Monday\n"),
    "tedious.job": lambda path: path.write_bytes(b"GGUFJOB: to be done by Friday\n"),
    "homework.work": lambda path: _folder(path),
    "layers.work": lambda path: _folder(path, "layer.00000.0123abcd.before"),
    "mine.work": lambda path: path.symlink_to("notes"),
    "mine.partial": lambda path: path.symlink_to("mine.txt"),
    "nowhere.journal": lambda path: path.symlink_to("nowhere"),
    "pipe.partial": lambda path: os.mkfifo(path),
    "old.undo": lambda path: path.write_bytes(b"GGUF: what I would take back\n"),
    "linked": lambda path: path.symlink_to(path.parent.parent / "elsewhere"),
}
"""Names that look like ours -> how to make what is not."""


def cleaned(trial: Trial) -> str:
    """Clean the folder again and again while the command runs, is killed, resumed, beside foreign files."""
    names = trial.rng.sample(sorted(_PLANTS), 4)
    for name in names:
        _PLANTS[name](trial.folder / name)
    elsewhere = trial.folder.parent / "elsewhere"
    _folder(elsewhere, "theirs.partial")
    outside, planted = places.tree(elsewhere), places.tree(trial.folder)
    plants = {name: digest for name, digest in planted.items() if name not in trial.reference.before}
    n_kills = trial.rng.choice((0, 0, 1, 2))
    cleaner = children.start(CLEAN, trial.folder, trial.bench.scratch, Disturbance(again=True))
    try:
        for _ in range(n_kills):
            seconds = trial.rng.uniform(0, 1.5 * trial.reference.seconds)
            ended = trial.run(
                Disturbance(signal_after=(signal.SIGKILL, seconds)), f"kill after {seconds:.3f} s"
            )
            trial.n_hits += ended.code == -signal.SIGKILL
            if ended.code != -signal.SIGKILL:
                break
        ended = trial.run(step=f"run beside clean and {', '.join(names)}")
    finally:
        cleaning = cleaner.stop()
    trial.n_hits += 1
    if cleaning.code or "Traceback" in cleaning.said:
        raise Failure(f"clean ended with {cleaning.code} and {cleaning.said[-700:]!r}")
    now = trial.tree()
    for name, digest in plants.items():
        if now.pop(name, None) != digest:
            raise Failure(f"clean removed {name}, which is not ours")
    if places.tree(elsewhere) != outside:
        raise Failure("clean removed something through a link")
    places.check_unharmed(trial.command, trial.reference.before, now, trial.reference)
    if ended.code:
        # A killed run has published all outputs, or some and what it knew of them is cleaned away. An edit
        # that was done before the kill can't be done again.
        places.check_one_line(ended)
        places.check_published(trial.reference, trial.reference.before, now)
        is_done = trial.command.edits and places.is_complete(trial.reference, now)
        if not n_kills or not (is_done or "exists already" in ended.said):
            raise Failure(f"did not end beside clean: {ended.said[-700:]!r}")
        return LINE
    places.check_same(trial.reference, now)
    return SAME


def _folder(path: Path, name: str = "own.txt") -> None:
    path.mkdir()
    (path / name).write_bytes(b"somebody's own work\n")
