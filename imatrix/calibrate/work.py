"""Estimates the work of a calibrated run, from shapes and one short measurement; tells how far it has come.

It is counted in seconds of one thread, from what `Probe` measures of this machine. Expect it to be right
within a factor of 1.5 on a machine that does nothing else.

A run's progress is in seconds of that work. The work of each layer is known beforehand, about. Within a
layer, the bar moves by what its threads have computed. If the layers before took twice as long as they were
to, a second counts half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import NoReport, Reporter
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.plan import CalibrationPlan
from imatrix.calibrate.probe import Probe
from imatrix.calibrate.statistics.gradient_factors import gradient_text
from imatrix.calibrate.statistics.gradients import row_pieces
from imatrix.calibrate.statistics.inputs import HELD_ROWS, is_wide
from imatrix.forward.gradients.backward import BACKWARD_WORK
from imatrix.forward.network import EMBEDDINGS, OUTPUT
from imatrix.texts.tokens import Text
from quantize.roles import layer_of

_COPIES = 8
"""Copies of a matrix' inputs on the way into sums: they are kept, joined, widened and weighed."""

_HELD_PRODUCTS = 5
"""Products with the held-out rows, for each matrix."""

_STOCK_RATE = 50e6
"""Weights a second that one thread encodes as the stock encoder does: scripts/bench/kernels.py."""


@dataclass(frozen=True)
class Work:
    """Work of a run, in seconds of one thread.

    others      of tensors that are encoded by themselves, which come first
    gradients   of the pass forward and back
    embeddings  of rounding them
    layers      of each layer: its passes, moments, factors and rounding
    end         of the output matrix, and of the divergence
    """

    others: float
    gradients: float
    embeddings: float
    layers: tuple[float, ...]
    end: float

    @property
    def seconds(self) -> float:
        return self.before(len(self.layers)) + self.end

    def before(self, layer: int) -> float:
        """The work before a layer."""
        return self.others + self.gradients + self.embeddings + sum(self.layers[:layer])


def planned_work(plan: CalibrationPlan, text: Text) -> Work:
    """Estimate the work of a planned run with this text."""
    return work_of(plan.options, plan.probe, text, is_first=plan.is_first, is_in_step=plan.is_in_step)


def work_of(
    options: CalibrationOptions,
    probe: Probe,
    text: Text,
    *,
    is_first: bool = True,
    is_in_step: bool = True,
) -> Work:
    """Estimate the work of a run from shapes, and from what was measured of this machine.

    is_first    whether the run collects the gradients that it needs, and no run before it
    is_in_step  whether the run before it computes the original, too
    """
    shapes = probe.shapes
    work = _RunWork(options, probe, text, computes_original=is_first or not is_in_step)
    made = {info.name: info for info in shapes.made}
    layers = tuple(
        work.layer(number, [info for info in infos if info.name in made])
        for number, infos in enumerate(shapes.by_layer())
    )
    others = (info for info in shapes.infos if info.name not in made and info.type.is_quantized)
    outside = {name: work.rounding(made[name]) if name in made else 0.0 for name in (EMBEDDINGS, OUTPUT)}
    return Work(
        sum(info.n_elems / _STOCK_RATE for info in others),
        work.gradients() if is_first and options.needs_gradients else 0.0,
        outside[EMBEDDINGS],
        layers,
        outside[OUTPUT] + probe.logit_seconds(options.n_models * text.inputs.size / 2),
    )


def encoding_seconds(options: CalibrationOptions, probe: Probe, text: Text) -> float:
    """Estimate the part of the work that workers of a scheduler take: rounding."""
    return sum(map(_RunWork(options, probe, text).encoding, probe.shapes.made))


@dataclass(frozen=True)
class _RunWork:
    """Times of the parts of a run, in seconds of one thread.

    computes_original  whether no other run does
    """

    options: CalibrationOptions
    probe: Probe
    text: Text
    computes_original: bool = True

    def gradients(self) -> float:
        """Estimate the pass forward and back, with the covariances of the gradients at each matrix."""
        probe, some = self.probe, gradient_text(self.text)
        seconds = (1 + BACKWARD_WORK) * probe.pass_seconds(some) + 2 * probe.logit_seconds(some.inputs.size)
        for info in probe.shapes.infos:
            if layer_of(info.name) is not None and len(info.shape) > 1:
                rows = some.inputs.size * probe.shapes.share(info) * info.n_mats
                seconds += rows * _sum_of_powers(info, 2) * probe.speeds.product
        return seconds

    def layer(self, number: int, made: Sequence[TensorInfo]) -> float:
        """Estimate the work of a layer: what goes through it, what is summed up, and rounding.

        Each model is computed once. The attention of the model that is written is computed up to each input,
        too. Its experts are computed once to see what down multiplies, and once as they are written.

        made  its tensors that are calibrated
        """
        options, times = self.options, self.probe.layer(number)
        n_chunks, n_tokens = self.text.n_chunks, self.text.inputs.size
        names = {info.name for info in made}
        stages = sum(seconds for group, seconds in times.stages.items() if names.intersection(group))
        n_models = options.n_models - (not self.computes_original)
        seconds = n_chunks * (n_models * (times.attention + times.block) + options.sequential * stages)
        seconds += (
            (options.n_models + options.sequential) * n_tokens * self.probe.shapes.n_used * times.expert
        )
        sharing = {name: group[0] for group in times.stages for name in group}
        seen = set[str]()
        for info in made:
            key = sharing.get(info.name, info.name.replace("ffn_up", "ffn_gate"))
            if key not in seen:  # those with the same input share its moments
                seen.add(key)
                seconds += self.moments(info)
            seconds += self.rounding(info)
        return seconds

    def moments(self, info: TensorInfo) -> float:
        """Estimate sums of products of a tensor's inputs, and their factors."""
        options, speeds, n_cols = self.options, self.probe.speeds, info.n_cols
        rows = self.text.inputs.size * self.probe.shapes.share(info) * info.n_mats
        copied = 4 * _COPIES * options.n_models * rows * n_cols * speeds.move
        # What rounding reads is lifted by an inverse, and factored; making up for drift takes another factor.
        factors = info.n_mats * n_cols**3 * (options.n_models + 1) * speeds.factor
        # A product of x and x is symmetric, one of t - x and x is not. W (t - x) x^T takes two with W's rows.
        drift = 2 * info.n_rows * n_cols if is_summed_through(info) else n_cols**2
        products = rows * (n_cols**2 / 2 + (options.n_models - 1) * drift)
        return products * speeds.product + copied + factors

    def rounding(self, info: TensorInfo) -> float:
        """Estimate the rounding of a tensor, with what goes before and after it."""
        seconds = self.encoding(info)
        if self.options.rounding.needs_gradients and layer_of(info.name) is not None:
            seconds += info.n_mats * _sum_of_powers(info, 3) * self.probe.speeds.factor
        return seconds

    def encoding(self, info: TensorInfo) -> float:
        """Estimate how long the strips of a tensor take, see `imatrix.calibrate.run.strips`."""
        method, speeds = self.options.rounding, self.probe.speeds
        products = _HELD_PRODUCTS * min(HELD_ROWS, self.text.inputs.size)
        products += 3 * info.n_cols if self.options.sequential else 0
        seconds = info.n_elems * (products * speeds.product + 1 / _STOCK_RATE)
        if method.can_encode(info.type):
            seconds += speeds.rounding * method.rates(info.type).seconds(info)
        return seconds


def is_summed_through(info: TensorInfo) -> bool:
    """Whether drift is summed up through a matrix' rows: wide downs of blocks, see `Moments.through`."""
    return ".ffn_down" in info.name and info.n_mats == 1 and is_wide(info.n_rows, info.n_cols)


def _sum_of_powers(info: TensorInfo, power: int) -> int:
    """Add up a power of the rows of each piece that a matrix is cut into for its gradients."""
    return sum((stop - start) ** power for start, stop in row_pieces(info.n_rows // info.n_mats))


class Meter(NoReport):
    """The bar of a run; a Reporter of the pass forward and back, which is the first part of its work.

    work  of the whole run
    bar   shows its seconds
    """

    def __init__(self, work: Work, bar: Reporter) -> None:
        self._work, self._bar, self._is_shown = work, bar, False
        self._left = self._estimated = self._computed = self._pace = self._of_layer = 0.0

    def begin(self, done: float) -> Reporter:
        """Show the bar, if nothing has before; `done` seconds of the work are left from an earlier run."""
        if not self._is_shown:
            self._bar.start(self._work.seconds, done)
            self._is_shown = True
        return self._bar

    def start(self, work: float, done: float) -> None:
        """Begin with the pass forward and back; see `Reporter`."""
        self._of_layer = self._work.gradients / work
        self.begin(self._work.others + self._of_layer * done).remark("gradients")

    def advance(self, amount: float) -> None:
        """Take in how far the pass has come, in layers."""
        self.begin(0).advance(self._of_layer * amount)

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
        if moved:
            self._left -= moved
            self._bar.advance(moved)
