"""One trial: a command, a kind of disturbance, a seed, and how it ended."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack import children, material, places
from tests.attack.children import UNDISTURBED, Disturbance, Ended
from tests.attack.commands import READERS, Command
from tests.attack.places import Failure, Reference, Tree

SAME, LINE, DONE = "same bytes", "one clear line", "done"
NOT_REACHED, FAILED = "not reached", "FAILED"


@dataclass(frozen=True)
class Result:
    """How a trial ended.

    outcome  SAME, LINE, DONE (something hostile was taken for what it is, and did no harm), NOT_REACHED (the
             disturbance came too late, or not at all), or FAILED
    n_hits   how many kills, faults, changes and hostile inputs took place
    what     for a person: the steps, and what was seen
    """

    kind: str
    command: str
    number: int
    seed: int
    outcome: str
    n_hits: int
    what: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.command}:{self.number}"


@dataclass
class Bench:
    """Where the trials of one process take place.

    material  a folder for the inputs of all commands
    scratch   a folder for trials
    """

    material: Path
    scratch: Path
    _references: dict[str, Reference] = field(default_factory=dict)

    def reference(self, command: Command) -> Reference:
        """Return the undisturbed run of `command`, as `measure` does, once."""
        if command.name not in self._references:
            self._references[command.name] = self.measure(command)
        return self._references[command.name]

    def measure(self, command: Command) -> Reference:
        """Run `command` undisturbed; raises Failure if it fails, or if two runs differ."""
        # The first run is this process's own: children then find compiled what they need.
        with self.folder(command) as folder:
            before = places.tree(folder)
            _in_this_process(command, folder)
        with self.folder(command) as folder:
            plain = self.run(command, folder)
            after = places.tree(folder)
        if plain.code:
            raise Failure(f"fails undisturbed: {plain.said}")
        if command in READERS or not children.has_strace():
            return Reference(before, after, plain.seconds, printed=plain.printed)
        with self.folder(command) as folder:
            traced = self.run(command, folder, Disturbance(trace=True))
            again = places.tree(folder)
            touched = tuple(sorted(name for name in traced.touched if name not in before | after))
        if again != after:
            names = [name for name in again.keys() | after.keys() if again.get(name) != after.get(name)]
            raise Failure(f"two undisturbed runs differ in {', '.join(sorted(names))}")
        return Reference(before, after, plain.seconds, dict(traced.calls), touched, plain.printed)

    def folder(self, command: Command) -> TrialFolder:
        """Return a context with a fresh folder for the command."""
        return TrialFolder(self, command)

    def run(self, command: Command, folder: Path, how: Disturbance = UNDISTURBED) -> Ended:
        return children.run(command, folder, self.scratch, how)


class TrialFolder:
    """A folder with the inputs of a command, for the time of a block."""

    def __init__(self, bench: Bench, command: Command) -> None:
        self._bench, self._command = bench, command

    def __enter__(self) -> Path:
        self._parent = Path(tempfile.mkdtemp(dir=self._bench.scratch))
        return places.prepare(self._command, self._bench.material, self._parent / "here")

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._parent)


@dataclass
class Trial:
    """What a kind of disturbance works with.

    rng     draws everything
    n_hits  kills, faults, changes, hostile inputs so far
    steps   what has happened so far, for a person
    """

    bench: Bench
    command: Command
    folder: Path
    reference: Reference
    rng: random.Random
    n_hits: int = 0
    steps: list[str] = field(default_factory=list)

    def run(self, how: Disturbance = UNDISTURBED, step: str = "") -> Ended:
        """Run the command, disturbed or not."""
        ended = self.bench.run(self.command, self.folder, how)
        where = f" at {ended.injected}" if ended.injected else ""
        self.steps.append(f"{step or 'run'} -> {ended.code}{where}")
        return ended

    def tree(self) -> Tree:
        return places.tree(self.folder)

    def check(self, before: Tree | None = None) -> Tree:
        """Return what is in the folder, after checking that nothing was harmed or published too early."""
        before = self.reference.before if before is None else before
        now = self.tree()
        places.check_unharmed(self.command, before, now, self.reference)
        places.check_published(self.reference, before, now)
        return now

    def finish(self) -> None:
        """Run the command undisturbed; raises Failure unless everything is then as if nothing had happened.

        A command that had finished already may refuse to begin again, with one clear line. So may one that
        was killed between two small outputs, of which the first is there.
        """
        ended = self.run(step="resumed")
        if ended.code:
            places.check_one_line(ended)
            if self.command.restarts and "exists already; --force" in ended.said:
                self.check()
                return
            if not places.is_complete(self.reference, self.tree()):
                raise Failure(f"can't be resumed: {ended.said}")
        places.check_same(self.reference, self.check())

    def judged(self, kind: str, number: int, seed: int, body: Kind) -> Result:
        """Return how trial `number` of a kind ends: as `body` says, or FAILED if it raises Failure."""
        try:
            outcome, why = body(self), ""
        except Failure as failure:
            outcome, why = FAILED, f": {failure}"
        what = "; ".join(self.steps) + why
        return Result(kind, self.command.name, number, seed, outcome, self.n_hits, what)


Kind = Callable[[Trial], str]
"""Disturbs a command and returns SAME, LINE or NOT_REACHED; raises Failure."""


def one_trial(bench: Bench, kind: str, body: Kind, command: Command, number: int, seed: int) -> Result:
    """Run trial `number` of a kind on a command."""
    rng = random.Random(f"{seed} {kind} {command.name} {number}")
    try:
        reference = bench.reference(command)
    except Failure as failure:
        return Result(kind, command.name, number, seed, FAILED, 0, str(failure))
    with bench.folder(command) as folder:
        return Trial(bench, command, folder, reference, rng).judged(kind, number, seed, body)


def _in_this_process(command: Command, folder: Path) -> None:
    try:
        with material.in_folder(folder):
            material.call(command.line)
    except RuntimeError as error:
        raise Failure(f"fails undisturbed: {str(error)[-700:]}") from error
