"""A calibrated run: layer after layer, what its matrices multiply is gathered, and they are made.

Everything the run needs of the model is in what it fills: the metadata of the outputs say how layers are put
together, and the job's sources have the weights under the names of the outputs. So folders and files of any
format are calibrated in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash

from calibrate.choices import Choices
from calibrate.coverage import Coverage
from calibrate.footprint import Shapes, heads_of
from calibrate.rounding.base import Effort
from calibrate.run.context import Model, RunContext
from calibrate.run.encode import Conditions, Encoder, RowGroup, conditions_of
from calibrate.run.final_divergence import final_divergence
from calibrate.run.layers import LayerRun
from calibrate.run.partial_model import PartialTensor, open_partial_model
from calibrate.run.records import Records
from calibrate.run.report import Report, report_lines
from calibrate.run.streams import open_streams
from calibrate.statistics.gradient_factors import GradientFactors, embedding_statistics, open_gradients
from calibrate.statistics.gradients import Gradients, forget_folders
from calibrate.statistics.inputs import Activations, HoldoutSplit, gather
from calibrate.statistics.shrinkage import Trust
from forward.device import device_name
from forward.families import EMBEDDINGS, OUTPUT
from forward.layers.load import Loader
from forward.layers.matmul_backend import fast_products
from forward.open import ModelSource
from forward.text.quality import admit
from forward.work.work_folder import EMBEDDING, WorkFolder, forget
from forward.workers import Workers
from gguf_tools.files.inputs import AnyInput, InputWatch
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.system.files import read_at
from quantize.fill.chunks import CHUNK_ELEMS, ChunkTable, ChunkTask
from quantize.fill.encode import FillJob
from quantize.fill.executors import Done
from quantize.fill.fingerprint import describe_run
from quantize.fill.options import FillOptions
from quantize.fill.session import Output
from quantize.plan.plan import Plan
from quantize.roles import layer_of

_RECORDS = "records.jsonl"

VERSION = 3
"""Number of the method; it goes up whenever a run could give other bytes."""


class CalibratedRun:
    """A Calibrator, and a context manager that deletes the work folder when the run has succeeded.

    text  that it calibrates with
    """

    def __init__(
        self,
        choices: Choices,
        plan: Plan,
        outputs: Sequence[Output],
        job: FillJob,
        inputs: Sequence[AnyInput],
        options: FillOptions,
    ) -> None:
        self._choices, self._outputs, self._job, self._options = choices, outputs, job, options
        path, metadata = outputs[0].path, outputs[0].layout.metadata
        self._coverage = Coverage.of(path, metadata, plan.infos)
        self.text = choices.read(metadata, self._coverage)
        self._quality = admit(self.text, str(choices.text), options.tell, any_text=choices.any_text)
        self._trust = Trust.of(self.text, self._quality)
        self._all_infos = plan.infos
        self._device = device_name(choices.forward.device)
        self._infos = {
            tensor.name: tensor.info
            for tensor in plan.tensors
            if self._coverage.makes(tensor, embedding=choices.embedding)
        }
        self._table = ChunkTable.of([each.layout for each in outputs], job.rows_per_weights(), CHUNK_ELEMS)
        self._inputs = tuple(inputs)
        self._report = Report()
        self._records: Records | None = None
        self.names = frozenset(self._infos)
        self.about: Mapping[str, Any] = {
            "version": VERSION,
            "text": self.text.digest(),
            "chunks": self.text.n_chunks,
            "context": self.text.chunk_size,
            "dtype": choices.forward.dtype,
            "device": self._device,
            "sequential": choices.sequential,
            "two-sided": choices.two_sided,
            "embedding": choices.embedding,
            "effort": asdict(Effort()),
            "trust": asdict(self._trust),
        }
        self._watch = InputWatch(inputs)
        self.digest = self._digest()

    def _digest(self) -> int:
        layouts = {output.path.name: output.layout for output in self._outputs}
        facts = describe_run(layouts, self._job, self._watch) | dict(self.about)
        del facts["output"]  # what the file is called
        if not self._choices.sequential:
            del facts["type of"]  # each tensor's own is in its provenance, and others have no effect
        return xxhash.xxh3_64_intdigest(json.dumps(facts, sort_keys=True).encode()) or 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            forget(self._outputs[0].path)
            forget_folders(self._outputs[0].path)

    def run(self, tasks: Iterable[ChunkTask], partials: Mapping[int, Path], done: Done) -> None:
        """See `quantize.fill.calibrated.Calibrator`."""
        missing: dict[str, list[ChunkTask]] = {}
        for task in tasks:
            missing.setdefault(task.rows.tensor, []).append(task)
        about = {"run": f"{self.digest:016x}", **self.about}
        with ExitStack() as opened:
            folder, records = self._open_folder(about, missing, opened)
            self._records = records
            opened.enter_context(fast_products(self._device))
            gradients = self._gradients(missing, opened)
            workers = opened.enter_context(_workers(self._options.threads, self._device))
            tensors = opened.enter_context(open_partial_model(self._outputs, partials, self._job.sources))
            for chunks in self._table.tensors.values():
                for task in chunks:
                    tensors[task.rows.tensor].written[task.rows.start : task.rows.stop] = True
            for task in (task for group in missing.values() for task in group):
                tensors[task.rows.tensor].written[task.rows.start : task.rows.stop] = False
            files = {number: opened.enter_context(PartialFile(path)) for number, path in partials.items()}
            gradient_factors = GradientFactors(
                gradients if self._choices.two_sided else None, self._trust.output_damp
            )
            encoder = Encoder(
                self._job, tensors, missing, files, done, records, workers, gradient_factors, Effort()
            )
            if gradients is not None and self._is_missing(EMBEDDINGS, missing):
                info = self._infos[EMBEDDINGS]
                shown = [(embedding_statistics(gradients), None)]
                (conditions,) = conditions_of(shown, EMBEDDINGS, workers, self._trust)
                encoder.make([RowGroup(info, 0, info.n_rows, conditions)])
            context = self._context(folder, tensors, encoder, workers, opened)
            for layer in range(folder.done + 1, self._coverage.network.n_layers):
                LayerRun.of(context, layer).run()
                self._make_unseen(context, [name for name in missing if layer_of(name) == layer])
                states = [model.stream.save(layer) for model in context.models]
                folder.finish_layer(layer, {}, states)
            self._finish(context)
            self._make_unseen(context, list(missing))
            n_threads = self._options.threads if self._device == "cpu" else 1
            divergence = final_divergence(context, self._coverage.network, self.text, n_threads)
            self._report = Report.of(
                self._infos.values(), records, context.holdout, divergence, self._quality
            )

    def _is_missing(self, name: str, missing: Iterable[str]) -> bool:
        return name in self._infos and name in missing

    def _gradients(self, missing: Iterable[str], opened: ExitStack) -> Gradients | None:
        """Return the gradients that the choices need for the tensors that are missing."""
        if not missing:
            return None
        path, metadata = self._outputs[0].path, self._outputs[0].layout.metadata
        vocab = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        source = ModelSource(
            path, self._coverage.network, self._job.sources, lambda: vocab, self._inputs, ExitStack()
        )
        torch.set_num_threads(self._options.threads)
        shapes = Shapes(self._coverage.network, self._all_infos, (), 1, heads_of(metadata))
        at_once = shapes.chunks_at_once(self.text.chunk_size, self._options.threads)
        passes = self._choices, source, self.text, path, self._options, at_once
        return opened.enter_context(open_gradients(*passes))

    def _open_folder(
        self, about: Mapping[str, Any], missing: Iterable[str], opened: ExitStack
    ) -> tuple[WorkFolder, Records]:
        """Open the work folder and its records; start over where chunks of an earlier layer are missing."""
        path = self._outputs[0].path
        restart = self._options.restart
        with ExitStack() as first:
            folder = first.enter_context(WorkFolder(path, about, restart=restart, watch=self._watch))
            expected = folder.done > EMBEDDING
            records = Records(folder.folder / _RECORDS, about["run"], expected=expected)
            first.callback(records.close)
            layers = [layer_of(name) for name in missing]
            if all(layer is None or layer > folder.done for layer in layers):
                opened.push(first.pop_all())
                return folder, records
        folder = opened.enter_context(WorkFolder(path, about, restart=True, watch=self._watch))
        kept, records = records, Records(folder.folder / _RECORDS, about["run"])
        opened.callback(records.close)
        records.take_over(kept)
        return folder, records

    def _context(
        self,
        folder: WorkFolder,
        tensors: Mapping[str, PartialTensor],
        encoder: Encoder,
        workers: Workers,
        opened: ExitStack,
    ) -> RunContext:
        network, text, forward = self._coverage.network, self.text, self._choices.forward
        device, dtype = torch.device(self._device), getattr(torch, forward.dtype)
        original = Loader(self._outputs[0].path, self._job.sources, device, dtype)
        loaders = [original]
        if self._choices.sequential:
            loaders.append(replace(original, tensors=tensors))
        streams = open_streams(loaders, text, network, folder, forward.memory_bytes, opened)
        rotate = network.rope.rotation(text.chunk_size, device)
        models = (Model(network, load, rotate, stream) for load, stream in zip(loaders, streams, strict=True))
        holdout = HoldoutSplit.of(text.n_chunks, text.chunk_size)
        tokens = torch.from_numpy(text.inputs).flatten()
        return RunContext(
            tuple(models), holdout, device, dtype, self._infos, encoder, workers, tokens, self._trust
        )

    def _make_unseen(self, context: RunContext, names: Iterable[str]) -> None:
        """Make tensors that the forward pass does not show, as they are made without importances."""
        for name in names:
            if context.is_missing(name):
                info = self._infos[name]
                conditions = Conditions.nothing(info.n_cols)
                context.encoder.make([RowGroup(info, 0, info.n_rows, conditions)])

    def _finish(self, context: RunContext) -> None:
        """Make the output matrix."""
        if not context.is_missing(OUTPUT):
            return
        network, size = self._coverage.network, context.holdout.chunk_size
        ends = [network.load_end(model.load) for model in context.models]
        states = [model.stream.after(network.n_layers - 1) for model in context.models]

        def take(chunk: int) -> list[Activations]:
            rows = chunk * size, (chunk + 1) * size
            pairs = zip(states, ends, strict=True)
            inputs = (end(each.read(*rows).to(context.device)).to(context.dtype) for each, end in pairs)
            return [{(OUTPUT,): x[:, None]} for x in inputs]

        inputs = gather(context.holdout, take, context.workers, crossed=context.makes_up)
        context.make(inputs, (OUTPUT,), (OUTPUT,))

    def damaged_row(self, tensor: str, path: Path) -> int | None:
        """See `quantize.fill.calibrated.Calibrator`."""
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

    def lines(self) -> Iterator[str]:
        """See `quantize.fill.calibrated.Calibrator`."""
        yield from report_lines(self._report)


@contextmanager
def _workers(n_threads: int, device: str) -> Iterator[Workers]:
    """Give threads that take whole tasks, each of which is computed by one thread, however many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Workers(n_threads if device == "cpu" else 1) as workers:
            yield workers
    finally:
        torch.set_num_threads(before)
