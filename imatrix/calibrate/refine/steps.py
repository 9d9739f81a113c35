"""The steps of a descent: scales move batch by batch, and the best ones on chunks held back are kept.

They are saved once a minute, with the best ones so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.progress import Reporter
from imatrix.calibrate.refine.descent import Descent
from imatrix.calibrate.refine.gradients import Original, Student
from imatrix.calibrate.refine.options import RefineOptions
from imatrix.calibrate.statistics.inputs import HoldoutSplit
from imatrix.forward.gradients.backward import BACKWARD_WORK
from imatrix.forward.work_folder import WorkFolder
from imatrix.forward.workers import give_back

_SAVE_SECONDS = 60.0

LOOKS = 8
"""How many times the chunks that are held back are looked at while scales move."""


@dataclass
class Best:
    """The scales with the smallest divergence on chunks held back, and those divergences.

    before, after  float64 (n_tokens,)
    """

    before: npt.NDArray[np.float64]
    after: npt.NDArray[np.float64]
    changes: dict[str, npt.NDArray[np.float32]]
    step: int = 0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        kept = {f"best:{name}": values for name, values in self.changes.items()}
        return {**kept, "before": self.before, "after": self.after, "best": np.array(self.step)}

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Best:
        kept = {key.removeprefix("best:"): arrays[key] for key in arrays if key.startswith("best:")}
        return cls(arrays["before"], arrays["after"], kept, int(arrays["best"]))


class Shares:
    """Turns shares of layers into what a bar of steps counts."""

    def __init__(self, report: Reporter) -> None:
        self.report = report
        self.per_layer = 0.0

    def advance(self, share: float) -> None:
        self.report.advance(share * self.per_layer)


@dataclass(frozen=True)
class Steps:
    """The steps of a descent, and looks at what they are worth."""

    descent: Descent
    student: Student
    original: Original
    folder: WorkFolder
    options: RefineOptions
    shares: Shares
    split: HoldoutSplit

    def run(self) -> tuple[Best, int]:
        """Make all steps that are left; return the best scales, and how many steps there were."""
        descent, chosen = self.descent, summed(self.split)
        n_steps, best = self._begin(len(chosen))
        saved, n_saved, report = time.monotonic(), descent.n_steps, self.shares.report
        report.start(n_steps, descent.n_steps)
        self.shares.per_layer = 1 / (self.student.network.n_layers * (1 + BACKWARD_WORK))
        try:
            while descent.n_steps < n_steps:
                number = descent.n_steps
                batch = batch_of(chosen, self.options, number)
                divergence, gradients = self.student.gradients(self.original, batch)
                descent.step(gradients, self._rate(number, n_steps))
                report.remark(f"KLD {divergence:.4f} on the text, {best.after.mean():.4f} held back")
                is_last = descent.n_steps == n_steps
                if is_last or number * LOOKS // n_steps < descent.n_steps * LOOKS // n_steps:
                    best = self._looked(best)
                if is_last or time.monotonic() - saved > _SAVE_SECONDS:
                    self._save(best, n_steps)
                    saved, n_saved = time.monotonic(), descent.n_steps
                give_back()
        except KeyboardInterrupt as error:
            error.add_note(f"{n_saved} of {n_steps} steps are kept: the same command resumes from there")
            raise
        return best, n_steps

    def _begin(self, n_summed: int) -> tuple[int, Best]:
        """Take up what an earlier run has left, or look at the file as it is and decide on the steps."""
        if self.folder.done >= 0:
            arrays = self.folder.arrays(0)
            self.descent.load(arrays)
            return int(arrays["n_steps"]), Best.load(arrays)
        began = time.monotonic()
        before = self._held()
        best = Best(before, before, self.descent.changes())
        if self.options.steps is not None:
            return self.options.steps, best
        if self.options.minutes is None:
            return max(1, n_summed // self.options.batch), best
        # A look is a forward pass, and a step as much as five.
        n_held = len(self.split.held)
        of_chunk = (time.monotonic() - began) / n_held
        of_step = of_chunk * self.options.batch * (1 + BACKWARD_WORK)
        seconds = 60 * self.options.minutes - LOOKS * of_chunk * n_held
        return max(1, math.floor(seconds / of_step)), best

    def _looked(self, best: Best) -> Best:
        """Return the best state so far, the present one included."""
        now = self._held()
        if now.mean() >= best.after.mean():
            return best
        return Best(best.before, now, self.descent.changes(), self.descent.n_steps)

    def _held(self) -> npt.NDArray[np.float64]:
        advance, self.shares.per_layer = self.shares.per_layer, 0.0
        found = held_divergences(self.student, self.original, self.split, self.options.batch)
        self.shares.per_layer = advance
        return found

    def _rate(self, step: int, n_steps: int) -> float:
        warm = min(1.0, (step + 1) / 3)
        return self.options.rate * warm * 0.5 * (1 + math.cos(math.pi * step / n_steps))

    def _save(self, best: Best, n_steps: int) -> None:
        arrays = {**self.descent.arrays(), **best.arrays(), "n_steps": np.array(n_steps)}
        self.folder.finish_layer(0, arrays)


def held_divergences(
    student: Student, original: Original, split: HoldoutSplit, batch: int
) -> npt.NDArray[np.float64]:
    """Compute the divergence at each token of the chunks held back, batch by batch; float64 (n_tokens,)."""
    batches = [split.held[at : at + batch] for at in range(0, len(split.held), batch)]
    return np.concatenate([student.divergences(original, each) for each in batches])


def summed(split: HoldoutSplit) -> npt.NDArray[np.int64]:
    """Return the chunks that are not held back."""
    return np.array([chunk for chunk in range(split.n_chunks) if split.is_summed(chunk)])


def batch_of(chunks: npt.NDArray[np.int64], options: RefineOptions, step: int) -> list[int]:
    """Return the chunks of a step: all come once before any comes again, in an order that a seed decides."""
    size = min(options.batch, len(chunks))
    per_pass = len(chunks) // size
    order = np.random.default_rng([options.seed, step // per_pass]).permutation(chunks)
    at = step % per_pass * size
    return sorted(order[at : at + size].tolist())
