"""A calibrated run: layer after layer, what its matrices multiply is gathered, and they are encoded.

Everything the run needs of the model is in what it fills: the metadata of the outputs say how layers are put
together, and the job's tensors have the weights under the names of the outputs. So folders and files of any
format are calibrated in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash

from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.files.run_lock import in_use
from gguf_tools.system.files import read_at
from gguf_tools.system.settings import ONE_BLAS_THREAD
from imatrix.calibrate.plan import CalibrationPlan
from imatrix.calibrate.run.cluster import StripsJob, open_cluster_strips
from imatrix.calibrate.run.context import Model, RunContext, StateSaver, open_streams
from imatrix.calibrate.run.encode import GroupEncoder, RowGroup
from imatrix.calibrate.run.kept import Kept
from imatrix.calibrate.run.layers import LayerRun
from imatrix.calibrate.run.original import OriginalPass
from imatrix.calibrate.run.output import Records, Writer, open_partial_model
from imatrix.calibrate.run.report import (
    FinalDivergence,
    Report,
    class_findings,
    final_divergence,
    report_lines,
)
from imatrix.calibrate.run.strips import StripExecutor, ThreadStrips
from imatrix.calibrate.statistics.conditions import Conditions, conditions_of
from imatrix.calibrate.statistics.gradient_factors import (
    GradientFactors,
    TokenWeights,
    embedding_statistics,
    gradient_chunks,
    gradient_text,
)
from imatrix.calibrate.statistics.gradients import (
    GradientOptions,
    Gradients,
    chunks_at_once,
    collect_gradients,
)
from imatrix.calibrate.statistics.inputs import Activations, HoldoutSplit, gather
from imatrix.calibrate.work import Meter, Work, planned_work
from imatrix.forward.device import fast_products, threads_on, to_torch
from imatrix.forward.layers.load import Loader
from imatrix.forward.logits import Head
from imatrix.forward.mtp import draft_head
from imatrix.forward.network import EMBEDDINGS, OUTPUT, Network
from imatrix.forward.open import ModelSource
from imatrix.forward.work_folder import EMBEDDING, WorkFolder
from imatrix.forward.workers import Workers, torch_threads
from imatrix.texts.tokens import Vocabulary
from quantize.fill.chunks import ChunkTable, ChunkTask
from quantize.fill.executors import Done
from quantize.fill.filling import FillJob
from quantize.fill.provenance import describe_run
from quantize.roles import layer_of
from quantize.run_options import RunOptions

_RECORDS = "records.jsonl"


class CalibratedRun:
    """A Calibrator, and a context manager that deletes the work folder when the run has succeeded."""

    def __init__(self, plan: CalibrationPlan, job: FillJob, options: RunOptions) -> None:
        self._plan, self._job, self._options = plan, job, options
        self._tensors = job.sources.tensors
        self._report = Report()
        self._records: Records | None = None
        self.names = frozenset(plan.made)
        self.about = plan.about
        self._watch = InputWatch(job.inputs)
        self._opened = ExitStack()
        self.digest = self._digest()

    def _digest(self) -> int:
        facts = describe_run(self._job, self._watch) | dict(self.about)
        del facts["output"]  # what the file is called
        if not self._plan.options.sequential:
            del facts["type of"]  # each tensor's own is in its provenance, and others have no effect
        return xxhash.xxh3_64_intdigest(json.dumps(facts, sort_keys=True).encode()) or 1

    def __enter__(self) -> Self:
        self._opened.enter_context(in_use(work_path(self._plan.path)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened:
            if error is None:
                forget(work_path(self._plan.path))

    def steps(
        self, tasks: Iterable[ChunkTask], partials: Mapping[int, Path], done: Done
    ) -> Generator[int, None, None]:
        """See `quantize.fill.filling.Calibrator`; after the first step, yield the layers that are done."""
        plan = self._plan
        missing: dict[str, list[ChunkTask]] = {}
        for task in tasks:
            missing.setdefault(task.rows.tensor, []).append(task)
        with ExitStack() as opened:
            opened.enter_context(plan.together)
            folder, records = self._open_folder(missing, opened)
            self._records = records
            meter = self._meter(missing)
            yield EMBEDDING - 1  # all tell their work before the first begins
            work = self._open_work(missing, folder, records, partials, done, meter, opened)
            with torch_threads(1):
                _make_embeddings(work)
                context = _open_context(work, opened)  # once embeddings are as they are written
            # The workers of a scheduler serve one run at a time.
            is_in_step = plan.is_in_step and self._options.scheduler is None
            if is_in_step:
                yield folder.done
            for layer in _make_layers(work, context):
                if is_in_step:
                    yield layer
            with torch_threads(1):
                divergence = _make_end(work, context)
            n_cols = {name: plan.n_cols(info) for name, info in plan.made.items()}
            self._report = Report.of(n_cols, records, context.holdout, divergence, plan.quality)
        for finding in class_findings(self._report.classes):
            self._options.tell(finding)

    def _open_work(
        self,
        missing: Mapping[str, Sequence[ChunkTask]],
        folder: WorkFolder,
        records: Records,
        partials: Mapping[int, Path],
        done: Done,
        meter: Meter,
        opened: ExitStack,
    ) -> _Work:
        """Open what all phases need; the gradients are collected before anything else is in memory."""
        plan, enter = self._plan, opened.enter_context
        enter(fast_products(plan.device.type))
        gradients = self._gradients(missing, meter)
        workers = enter(_workers(self._options.threads, plan.device.type, meter.computed))
        tensors = enter(open_partial_model(self._job.outputs, partials, self._tensors))
        for task in (task for group in missing.values() for task in group):
            tensors[task.rows.tensor].written[task.rows.start : task.rows.stop] = False
        files = {number: enter(PartialFile(path)) for number, path in partials.items()}
        writer = Writer(self._tensors, tensors, missing, files, done, records)
        factors = GradientFactors(gradients if plan.options.rounding.needs_gradients else None, plan.trust)
        strips = enter(self._strips(folder, workers, meter))
        encoder = GroupEncoder(strips, factors, workers, writer)
        n_threads = threads_on(plan.device, self._options.threads)
        return _Work(plan, folder, missing, n_threads, meter, gradients, factors, encoder)

    def _meter(self, missing: Collection[str]) -> Meter:
        """Return the meter of the run's work."""
        plan = self._plan
        nothing = Work(0, 0, 0, (0,) * plan.network.n_all_layers, 0)
        expected = planned_work(plan, plan.text) if missing else nothing
        return Meter(expected, plan.together.bar(self._options.calibrating, expected.seconds))

    def _gradients(self, missing: Iterable[str], meter: Meter) -> Gradients | None:
        """Collect the gradients that the options need for the tensors that are missing."""
        plan, options, n_threads = self._plan, self._plan.options, self._options.threads
        if not missing or not options.needs_gradients:
            return None
        vocab = Vocabulary(plan.metadata, plan.path)
        source = ModelSource(
            plan.path, plan.network, self._tensors, lambda: vocab, self._job.inputs, ExitStack()
        )
        at_once = chunks_at_once(plan.shapes, plan.text.chunk_size, n_threads)
        restart = self._options.restart and plan.collects_gradients
        how = GradientOptions(options.forward, options.seed, restart=restart, at_once=at_once)
        text, at = gradient_text(plan.text), plan.together.paths[0]
        with torch_threads(n_threads):
            return plan.together.opened_once(
                Gradients, lambda: collect_gradients(source, text, at, how, meter)
            )

    def _open_folder(self, missing: Iterable[str], opened: ExitStack) -> tuple[WorkFolder, Records]:
        """Open the work folder and its records; start over where chunks of an earlier layer are missing."""
        path, restart = self._plan.path, self._options.restart
        about: dict[str, Any] = {"run": f"{self.digest:016x}", **self.about}
        folder = WorkFolder(path, about, restart=restart, watch=self._watch, may_skip=True)
        opened.enter_context(folder)
        records = Records(folder.folder / _RECORDS, about["run"], expected=folder.done > EMBEDDING)
        opened.callback(records.close)
        layers = [layer_of(name) for name in missing]
        if any(layer is not None and layer <= folder.done for layer in layers):
            folder.start_over(None)
        return folder, records

    def _strips(
        self, folder: WorkFolder, workers: Workers, meter: Meter
    ) -> AbstractContextManager[StripExecutor]:
        """Give what encodes strips: threads, or the workers of a scheduler."""
        method, sources, scheduler = self._plan.options.rounding, self._job.sources, self._options.scheduler
        if scheduler is None:
            return nullcontext(ThreadStrips(method, sources, workers))
        job = StripsJob.of(method, sources, self._plan.device.type)
        return open_cluster_strips(scheduler, job, folder.folder, meter.computed)

    def damaged_row(self, tensor: str, path: Path) -> int | None:
        """See `quantize.fill.filling.Calibrator`."""
        chunks = self._table.tensors[tensor]
        numbers = chunks.numbers
        sample = sorted({numbers[(len(numbers) - 1) * part // 7] for part in range(8)}) if numbers else []
        with path.open("rb") as file:
            for task in map(chunks.task, sample):
                expected = None if self._records is None else self._records.chunks.get(task.number)
                data = read_at(file.fileno(), task.n_bytes, task.offset)
                if expected is not None and xxhash.xxh3_64_intdigest(data) != expected:
                    return task.rows.start
        return None

    @cached_property
    def _table(self) -> ChunkTable:
        return self._job.table()

    def lines(self) -> Iterator[str]:
        """See `quantize.fill.filling.Calibrator`."""
        yield from report_lines(self._report)


@dataclass(frozen=True)
class _Work:
    """A run at work: what its phases share.

    missing    chunks to be made, by tensor
    n_threads  for the end
    gradients  those that the options need; None: none
    """

    plan: CalibrationPlan
    folder: WorkFolder
    missing: Mapping[str, Sequence[ChunkTask]]
    n_threads: int
    meter: Meter
    gradients: Gradients | None
    factors: GradientFactors
    encoder: GroupEncoder


def _make_embeddings(work: _Work) -> None:
    """Encode the embeddings under the covariance of the gradients there."""
    if work.gradients is None:
        return
    plan, workers = work.plan, work.encoder.workers
    with work.meter.embeddings():
        info = plan.made.get(EMBEDDINGS)
        if info is not None and EMBEDDINGS in work.missing:
            statistics = [(embedding_statistics(work.gradients), None)]
            n_real = plan.real_cols.get(EMBEDDINGS)
            (conditions,) = conditions_of(statistics, EMBEDDINGS, workers, plan.trust, n_real)
            work.encoder.make([RowGroup(info, 0, info.n_rows, conditions)])


def _open_context(work: _Work, opened: ExitStack) -> RunContext:
    """Open the models and their hidden states, after the layer that an earlier run has finished."""
    plan, writer = work.plan, work.encoder.writer
    network, text = plan.network, plan.text
    original = Loader(plan.path, writer.sources, plan.device, plan.dtype)
    loaders = [original]
    if plan.options.sequential:
        loaders.append(replace(original, tensors=writer.tensors))
    streams = open_streams(plan, loaders, work.folder, opened)
    rotate = network.rope.rotation(text.chunk_size, plan.device)
    models = (Model(network, load, rotate, stream) for load, stream in zip(loaders, streams, strict=True))
    return RunContext(
        models=tuple(models),
        holdout=HoldoutSplit.of(text.n_chunks, text.chunk_size, text.classes),
        device=plan.device,
        dtype=plan.dtype,
        wanted=plan.made,
        real_cols=plan.real_cols,
        encoder=work.encoder,
        workers=work.encoder.workers,
        tokens=to_torch(text.inputs).flatten(),
        trust=plan.trust,
        weights=TokenWeights(work.factors, gradient_chunks(text), text.chunk_size, text.inputs.size),
        passed=_passed(plan),
    )


def _passed(plan: CalibrationPlan) -> OriginalPass:
    """Return how far the original has come: in common with the runs that go in step with this one."""
    if not plan.is_in_step:
        return OriginalPass(Kept(plan.kept_bytes))
    is_shared = len(plan.together.paths) > 1
    return plan.together.once(OriginalPass, lambda: OriginalPass(Kept(plan.kept_bytes), is_shared))


def _make_layers(work: _Work, context: RunContext) -> Iterator[int]:
    """Encode layer after layer, and go on with the hidden states; yield each layer that is done."""
    network, saver = work.plan.network, StateSaver(work.folder, context.models)
    for layer in range(work.folder.done + 1, network.n_all_layers):
        with work.meter.layer(layer), torch_threads(1):
            LayerRun.of(context, layer).run()
            if layer == network.n_layers:
                _make_draft_output(context, network)
            _make_unseen(context, [name for name in work.missing if layer_of(name) == layer])
            if layer < network.n_layers:  # the states before the MTP layer are wanted behind it
                saver.after(layer)
        yield layer


def _make_end(work: _Work, context: RunContext) -> FinalDivergence | None:
    """Encode the output matrix and what is left, and measure how far the model has moved."""
    network, last = work.plan.network, work.plan.network.n_layers - 1
    with work.meter.end():
        if context.is_missing(OUTPUT):
            heads = [Head.of(network, each.load, each.stream.after(last)) for each in context.models]
            _make_head(context, OUTPUT, heads)
        _make_unseen(context, work.missing)
        return final_divergence(context, network, work.plan.text, work.n_threads)


def _make_draft_output(context: RunContext, network: Network) -> None:
    """Encode the MTP layer's own output matrix, if it has one."""
    last = network.n_layers
    heads = [draft_head(network, each.load, each.stream.after(last)) for each in context.models]
    if heads[0].matrix != network.output and context.is_missing(heads[0].matrix):
        _make_head(context, heads[0].matrix, heads)


def _make_unseen(context: RunContext, names: Iterable[str]) -> None:
    """Encode the tensors that the forward pass never reaches, as if there were no importances."""
    for name in names:
        if context.is_missing(name):
            info = context.wanted[name]
            context.encoder.make([RowGroup(info, 0, info.n_rows, Conditions.nothing())])


def _make_head(context: RunContext, name: str, heads: Sequence[Head]) -> None:
    """Encode an output matrix under what it multiplies; `heads` are those of the context's models."""
    size = context.holdout.chunk_size

    def take(chunk: int) -> list[Activations]:
        tokens = torch.arange(chunk * size, (chunk + 1) * size)
        return [{(name,): head.inputs(tokens)[:, None]} for head in heads]

    inputs = gather(context.holdout, take, context.workers, drifts=context.corrects_drift)
    context.make(inputs, (name,), (name,))


@contextmanager
def _workers(n_threads: int, device: str, computed: Callable[[float], object]) -> Iterator[Workers]:
    """Give threads that take whole tasks, each of which is computed by one thread, however many there are.

    computed  called with the seconds that each task took its thread
    """
    with ONE_BLAS_THREAD, Workers(threads_on(device, n_threads), computed) as workers:
        yield workers
