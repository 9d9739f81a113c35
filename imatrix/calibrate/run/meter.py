"""Tells how far a calibrated run has come, in seconds of its estimated work.

The work of each layer is known beforehand, about. Within a layer, the bar moves by what its threads have
computed. If the layers before took twice as long as they were to, a second counts half.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from gguf_tools.progress import Moves, NoReport, StartMoving
from imatrix.calibrate.work import Work


class Meter:
    """The bar of a run.

    work  of the whole run
    """

    def __init__(self, work: Work, start: StartMoving) -> None:
        self._work, self._start = work, start
        self._bar: Moves | None = None
        self._left = self._estimated = self._computed = self._pace = 0.0

    def begin(self, done: float) -> Moves:
        """Show the bar, if nothing has before; `done` seconds of the work are left from an earlier run."""
        if self._bar is None:
            self._bar = self._start(self._work.seconds, done)
        return self._bar

    def gradients(self) -> GradientsReport:
        """Begin with the pass forward and back; what this returns is told how far it comes, in layers."""
        return GradientsReport(self, self._work)

    def embeddings(self) -> AbstractContextManager[None]:
        """Count what is computed meanwhile as rounding of the embeddings."""
        return self._part(self._work.embeddings, "embeddings", self._work.before(0))

    def layer(self, number: int) -> AbstractContextManager[None]:
        """Count what is computed meanwhile as a layer's work."""
        work = self._work
        remark = f"layer {number + 1} of {len(work.layers)}"
        return self._part(work.layers[number], remark, work.before(number))

    def end(self) -> AbstractContextManager[None]:
        """Count what is computed meanwhile as the work after the last layer."""
        return self._part(self._work.end, "divergence", self._work.before(len(self._work.layers)))

    @contextmanager
    def _part(self, seconds: float, remark: str, done: float) -> Iterator[None]:
        bar = self.begin(done)
        bar.remark(remark)
        self._left, before = seconds, self._computed
        yield
        bar.advance(self._left)
        self._left = 0.0
        if seconds and self._computed > before:
            self._estimated += seconds
        if self._estimated:
            self._pace = self._computed / self._estimated

    def computed(self, seconds: float) -> None:
        """Take in that a thread has computed for so long."""
        self._computed += seconds
        moved = min(self._left, seconds / (self._pace or 1.0))
        if self._bar is not None and moved:
            self._left -= moved
            self._bar.advance(moved)


class GradientsReport(NoReport):
    """A Reporter of the pass forward and back, which is the first part of a run's work."""

    def __init__(self, meter: Meter, work: Work) -> None:
        self._meter, self._work, self._of_layer = meter, work, 0.0

    def start(self, work: float, done: float) -> None:
        self._of_layer = self._work.gradients / work
        self._meter.begin(self._work.others + self._of_layer * done).remark("gradients")

    def advance(self, amount: float) -> None:
        self._meter.begin(0).advance(self._of_layer * amount)
