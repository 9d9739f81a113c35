"""Estimates what commands take that show a text to models: imatrix, evaluate, sensitivity and refine.

Work is counted from shapes and tokens, in seconds of one thread, and each kind of it costs what `Probe`
measures of this machine. A run takes that over its threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir

import torch

from gguf_tools.files.early_checks import refuse_small_disk
from gguf_tools.files.owned_folder import work_path
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.estimate import START, Cost, cost_lines, passing_bytes
from imatrix.calibrate.probe import Probe
from imatrix.calibrate.refine.layers import N_TRIALS, STEP_WORK
from imatrix.calibrate.refine.options import RefineOptions
from imatrix.calibrate.refine.run import RefinementRun
from imatrix.calibrate.refine.scales import row_scales
from imatrix.calibrate.refine.steps import LOOKS, summed
from imatrix.calibrate.shapes import Shapes
from imatrix.evaluate.options import EvaluateOptions
from imatrix.evaluate.run import PlannedEvaluation, temporary_folder
from imatrix.forward.device import threads_on
from imatrix.forward.gradients.backward import BACKWARD_WORK
from imatrix.forward.gradients.backward import state_bytes as bytes_both_ways
from imatrix.forward.open import ModelSource
from imatrix.forward.options import ForwardOptions
from imatrix.forward.run import state_bytes
from imatrix.run import Collection
from imatrix.sensitivities.options import SensitivityOptions
from imatrix.sensitivities.run import Measurement
from imatrix.sensitivities.type_errors import CANDIDATES
from imatrix.texts.chunks import Chunks
from quantize.roles import layer_of

_ENCODING_RATES = (("IQ1", 70e6), ("IQ2", 30e6), ("IQ3", 28e6), ("Q", 100e6), ("IQ4", 250e6))
"""Weights a second that one thread encodes, by the beginning of the type's name: scripts/bench/kernels.py,
2026-11-21, with importances."""

_OTHER_RATE = 2e9

_DECODING_RATE = 400e6
"""Weights a second that one thread decodes."""

_COPIES = 2
"""Copies of what a matrix multiplies when its squares are summed up."""


@dataclass(frozen=True)
class TextPasses:
    """Costs of a text's way through a model, in seconds of one thread."""

    probe: Probe
    chunks: Chunks

    @classmethod
    def of(cls, source: ModelSource, chunks: Chunks, forward: ForwardOptions) -> TextPasses:
        """Measure this machine with a model, and with chunks of the mean length."""
        shapes = Shapes.of(source.network, source.infos, (), source.metadata)
        return cls(Probe(shapes, chunks.n_tokens // chunks.n_chunks, forward), chunks)

    @property
    def shapes(self) -> Shapes:
        return self.probe.shapes

    @cached_property
    def layers(self) -> float:
        """All layers, once."""
        return self.probe.pass_seconds(self.chunks)

    @property
    def head(self) -> float:
        """The logits of the tokens that are scored, and what is made of them."""
        return self.probe.logit_seconds(self.chunks.n_scored)

    @property
    def _all_logits(self) -> float:
        return self.probe.logit_seconds(self.chunks.n_tokens)

    def reading(self, infos: Sequence[TensorInfo]) -> float:
        """Read the weights of a model once."""
        move = self.probe.speeds.move
        return sum(
            info.n_elems * (1 / _DECODING_RATE if info.type.is_quantized else 4 * move) for info in infos
        )

    def collection(self, *, perplexity: bool = True) -> float:
        """Collect importances."""
        seconds = self.layers + self.reading(self.shapes.infos) + (self.head if perplexity else 0.0)
        return seconds + 4 * _COPIES * self.probe.speeds.move * sum(
            rows * info.n_cols for info, rows in self._seen
        )

    def comparison(self, models: Sequence[Sequence[TensorInfo]]) -> float:
        """Compare models, of which these are the tensors; the base is one of them if it is computed."""
        return sum(self.layers + self.head + self.reading(infos) for infos in models)

    def measurement(self, options: SensitivityOptions) -> float:
        """Measure what each tensor costs at each type."""
        seconds = (
            (1 + BACKWARD_WORK) * self.layers + 3 * self.reading(self.shapes.infos) + 2 * self._all_logits
        )
        types, speeds, n_chunks = options.types or CANDIDATES, self.probe.speeds, self.chunks.n_chunks
        encoding = sum(1 / encoding_rate(by_name(name)) for name in types)
        for info, rows in self._seen:
            sampled = max(options.least_rows * info.n_mats, min(info.n_rows, options.rows))
            n_weights = sampled * info.n_cols
            moved = len(types) * n_chunks * self.shapes.share(info)
            seconds += n_weights * (encoding + rows / info.n_mats * speeds.product + 8 * moved * speeds.move)
        return seconds

    def refinement(
        self, options: RefineOptions, infos: Sequence[TensorInfo], n_summed: int, n_held: int
    ) -> float:
        """Refine a file.

        infos     of the file
        n_summed  chunks that steps are made of
        n_held    chunks that are held back
        """
        by_chunk, n_chunks = self.layers / self.chunks.n_chunks, self.chunks.n_chunks
        logits = self._all_logits / n_chunks
        first = self.layers + self._all_logits + self.reading(self.shapes.infos)
        if options.passes:
            first += 2 * self.layers + self.reading(infos) * 2
            n_steps = options.passes * n_summed * (1 + (N_TRIALS - 1) / self.shapes.network.n_layers)
            first += n_steps * (STEP_WORK * by_chunk + 2 * self.reading(infos))
        if options.minutes is not None:
            return first + 60 * options.minutes * torch.get_num_threads()
        look = n_held * (by_chunk + 3 * logits) + self.reading(infos)
        n_steps = options.steps or max(1, n_summed // options.batch)
        n_refined = sum(info.n_elems for info in infos if row_scales(info.type, info.n_cols))
        changing = 2 * self.reading(infos) + 2 * n_refined / _DECODING_RATE
        step = options.batch * ((1 + BACKWARD_WORK) * by_chunk + 5 * logits) + changing
        return first + n_steps * step + (1 + min(LOOKS, n_steps)) * look

    @property
    def _seen(self) -> Iterator[tuple[TensorInfo, float]]:
        """Yield the matrices in layers, and how many tokens each shows to all of its blocks."""
        for info in self.shapes.infos:
            if layer_of(info.name) is not None and len(info.shape) > 1:
                yield info, self.chunks.n_tokens * self.shapes.share(info) * info.n_mats

    def cost(
        self, seconds: float, n_bytes: int, infos: Sequence[Sequence[TensorInfo]], *, back: bool = False
    ) -> Cost:
        """Put together what a run takes.

        seconds  of one thread
        n_bytes  on the disk
        infos    tensors of the models that go through the text in step
        back     whether gradients come back
        """
        states, _ = state_bytes(self.shapes.network, self.chunks, self.probe.forward)
        memory = len(infos) * states
        memory += passing_bytes(self.shapes, self.chunks.longest, self.n_threads, len(infos), back=back)
        return Cost(n_bytes, START + seconds / self.n_threads, memory=memory)

    @property
    def n_threads(self) -> int:
        """Threads that a run would have."""
        return threads_on(self.probe.device, torch.get_num_threads())


@dataclass(frozen=True)
class Foreseen:
    """Estimate of a run.

    what   it does
    place  where it keeps what is finished
    """

    what: str
    passes: TextPasses
    cost: Cost
    place: Path

    def lines(self) -> Iterator[str]:
        """Tell memory, disk and time; raises OutputError for a disk that is too small."""
        refuse_small_disk(
            [self.place], self.cost.n_bytes, "hidden states", "use fewer chunks, or another disk"
        )
        where = f"in {self.place}"
        yield from cost_lines(self.what, self.passes.chunks, self.cost, self.passes.n_threads, where)


def foresee_collection(planned: Collection, output: Path) -> Foreseen:
    """Estimate a collection of importances."""
    source, options = planned.source, planned.options
    passes = TextPasses.of(source, planned.text.chunks, options.forward)
    _, n_bytes = state_bytes(source.network, passes.chunks, options.forward)
    cost = passes.cost(passes.collection(perplexity=options.perplexity), n_bytes, [source.infos])
    return Foreseen("importances", passes, cost, work_path(output))


def foresee_comparison(planned: PlannedEvaluation, options: EvaluateOptions) -> Foreseen:
    """Estimate an evaluation."""
    base, sources = planned.base, [*planned.models, *(each.source for each in planned.noise)]
    if base.is_computed and base.source is not None:
        sources.append(base.source)
    forward = replace(options.forward, memory_bytes=options.forward.memory_bytes // len(sources))
    passes = TextPasses.of(sources[-1], planned.chunks, forward)
    n_bytes = sum(state_bytes(each.network, planned.chunks, forward)[1] for each in sources)
    infos = [each.infos for each in sources]
    cost = passes.cost(passes.comparison(infos), n_bytes, infos)
    return Foreseen("evaluation", passes, cost, options.work or temporary_folder() or Path(gettempdir()))


def foresee_measurement(planned: Measurement, output: Path) -> Foreseen:
    """Estimate a measurement of sensitivities."""
    source, options = planned.source, planned.options
    passes = TextPasses.of(source, planned.text.chunks, options.forward)
    n_bytes = bytes_both_ways(source.network, passes.chunks.n_tokens)
    cost = passes.cost(passes.measurement(options), n_bytes, [source.infos], back=True)
    return Foreseen("sensitivities", passes, cost, work_path(output))


def foresee_refinement(planned: RefinementRun) -> Foreseen:
    """Estimate a refinement."""
    base, options, file, split = planned.base, planned.options, planned.source, planned.split
    passes = TextPasses.of(base, planned.text.chunks, options.forward)
    n_bytes = (1 + bool(options.passes)) * state_bytes(base.network, passes.chunks, options.forward)[1]
    seconds = passes.refinement(options, file.infos, len(summed(split)), len(split.held))
    cost = passes.cost(seconds, n_bytes, [base.infos, file.infos], back=True)
    return Foreseen("refinement", passes, cost, work_path(planned.output))


def encoding_rate(type_: GGMLType) -> float:
    """Weights of a type that one thread encodes in a second, about."""
    return next((rate for start, rate in _ENCODING_RATES if type_.name.startswith(start)), _OTHER_RATE)
