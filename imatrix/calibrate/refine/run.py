"""One refinement: codes layer by layer, steps downhill for scales, and a file of the same types and size.

    OUT.work/original.work  a forward pass of the original over the whole text, for the last hidden states
    OUT.work/codes.work     a pass of the file in step with it, and the codes of its layers, where codes move
    OUT.work/descent.work   where the scales have come, once a minute

A run that was interrupted goes on from there, and makes the same file. The scales are written that were best
on chunks held back. If no step was of use there, the scales stay as they were, and the run says so.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest, ToolkitError
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.files.inputs import gguf_inputs
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.run_lock import in_use
from gguf_tools.findings import Finding, Level, tell_all
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.progress import Reporter
from gguf_tools.text import counted
from imatrix.calibrate.refine.descent import Descent, RefinedTensor
from imatrix.calibrate.refine.gradients import Original, Student
from imatrix.calibrate.refine.layers import N_TRIALS, STEP_WORK, KeptCodes, LayerByLayer
from imatrix.calibrate.refine.options import Refinement, RefineOptions
from imatrix.calibrate.refine.scales import row_scales
from imatrix.calibrate.refine.steps import Best, Shares, Steps, batch_of, held_divergences, summed
from imatrix.calibrate.statistics.inputs import HoldoutSplit
from imatrix.evaluate.bases.same_model import KnownModel
from imatrix.evaluate.divergence import mean_of
from imatrix.forward.device import device_name, fast_products
from imatrix.forward.logits import Head
from imatrix.forward.observe import Silent
from imatrix.forward.open import ModelSource, open_model
from imatrix.forward.run import forward_pass
from imatrix.forward.work_folder import WorkFolder, paths_of_parts, run_identity
from imatrix.forward.workers import give_back, threads_for, torch_threads, workers_for
from imatrix.texts.mixture import read_text
from imatrix.texts.quality import admit
from imatrix.texts.tokens import Text
from quantize.fill.encode import RowSources
from quantize.fill.provenance import PROVENANCE_KEY
from quantize.fill.scaled import refuse_scales
from quantize.fill.sources import GGUFTensor, OpenSources, SourceTensor
from quantize.importances.text_sketch import TextSketch
from quantize.options import REFINED_KEY
from quantize.plan.decide import Decider, TensorPlan
from quantize.plan.plan import Plan
from quantize.prepare import Preparation, lay_out, parts_of
from quantize.roles import tensor_role
from quantize.run import Run
from quantize.run_options import RunOptions


def run_refinement(
    file: Path, original: Path, path: Path, output: Path, options: RefineOptions, report: Reporter
) -> Refinement:
    """Refine a file on the text at `path`; see `imatrix.calibrate.refine.pipeline`."""
    started = time.monotonic()
    with open_refinement(file, original, path, output, options, report) as run, ExitStack() as opened:
        source, base, text = run.source, run.base, run.text
        if not options.force and was_refined(output) == run.digest:
            forget(work_path(output))  # of a run that was killed at its end
            return Refinement(output, is_found=True)
        refuse_to_replace([output], force=options.force)
        opened.enter_context(in_use(work_path(output)))
        tensors, best, n_steps = _descend(run, _find_codes(run) if options.passes else {})
        for each in (source, base):
            each.watch.refuse_changed()
        sketch, known = TextSketch.of(text.tokens.ravel(), text.sha256), run.known
        if known is not None:
            sketch = known.joined(sketch)
        keys = {REFINED_KEY: Value.string(run.digest), **sketch.metadata()}
        _write(file, output, tensors, keys, options)
        forget(work_path(output))
    before, after, seconds = mean_of(best.before), mean_of(best.after), time.monotonic() - started
    return Refinement(output, before, after, n_steps, best.step, seconds)


@contextmanager
def open_refinement(
    file: Path, original: Path, path: Path, output: Path, options: RefineOptions, report: Reporter
) -> Iterator[RefinementRun]:
    """Open what a refinement reads; raises what `gguf_tools.refine` refuses before it computes."""
    with ExitStack() as opened:
        opened.enter_context(torch_threads(options.forward.n_threads))
        opened.enter_context(fast_products(device_name(options.forward.device)))
        source = opened.enter_context(open_model(file))
        base = opened.enter_context(open_model(original))
        _refuse_unrefinable(source)
        KnownModel.of(base).admit([source], report.tell)
        text = read_text(path, source.vocab(), source.network.vocab_size, options.cut)
        admit(text, str(path), report.tell, any_text=options.any_text)
        tell_all(source.findings(text.chunk_size), report.tell)
        yield RefinementRun(source, base, text, output, options, report)


def _refuse_unrefinable(source: ModelSource) -> None:
    """Raise BadRequest for weights that have scales of their own, or none that can be refined."""
    refuse_scales(source.path, source.tensors, source.network.own_scales)
    if not any(row_scales(each.type, each.shape[-1]) for each in source.tensors.values()):
        raise BadRequest(f"{source.path}: has no tensor of a type whose scales can be refined")


def was_refined(output: Path) -> str | None:
    """Read what decided the scales of a refined file; None for no such file."""
    try:
        with open_gguf(output) as there:
            digest: str | None = there.get(REFINED_KEY)
            return digest
    except (OSError, ToolkitError):
        return None


@dataclass(frozen=True)
class RefinementRun:
    """A refinement at work: what its phases share."""

    source: ModelSource
    base: ModelSource
    text: Text
    output: Path
    options: RefineOptions
    report: Reporter

    @cached_property
    def about_original(self) -> dict[str, Any]:
        """Facts that decide the original's hidden states."""
        watch = self.base.watch
        return {"original": watch.recognised_by(), **run_identity(self.text.chunks, self.options.forward)}

    @cached_property
    def about_descent(self) -> dict[str, Any]:
        """Facts that decide where the scales go."""
        options = self.options
        how = {"batch": options.batch, "rate": options.rate, "seed": options.seed}
        length = {"steps": options.steps, "minutes": options.minutes}
        classes = {"classes": list(self.text.classes)} if self.text.classes else {}
        codes = self.about_codes if options.passes else {}
        file = self.source.watch.recognised_by()
        return {**self.about_original, "file": file, **codes, **how, **length, **classes}

    @cached_property
    def about_codes(self) -> dict[str, Any]:
        """Facts that decide where the codes go."""
        options = self.options
        how = {
            "passes": options.passes,
            "code rate": options.code_rate,
            "memory": options.forward.memory_bytes,
        }
        order = {"seed": options.seed, "classes": list(self.text.classes)}
        return {**self.about_original, "file": self.source.watch.recognised_by(), **how, **order}

    @property
    def known(self) -> TextSketch | None:
        """The texts that the file was made with, if it tells."""
        return TextSketch.read(self.source.metadata)

    @property
    def digest(self) -> str:
        """Digest of the facts that decide the file, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.about_descent, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def split(self) -> HoldoutSplit:
        """The chunks held back: some that the file was not calibrated on.

        On those it was, all that moves looks bad. Of a text that is known throughout, those chunks are held
        back that a calibration with it holds back.
        """
        text, sketch = self.text, self.known
        known = [chunk for chunk, tokens in enumerate(text.tokens) if sketch and sketch.shared(tokens)]
        if len(known) == text.n_chunks:
            why = (
                "the file was calibrated on all of these chunks: new ones do better (--from-chunk), and those"
                " held back are fair judges only if the calibration held them back, too, as it does with the"
                " same -c and --chunks"
            )
            self.report.tell(Finding("known text", why, Level.WARNING))
        return HoldoutSplit.of(text.n_chunks, text.chunk_size, text.classes, known)

    @property
    def parts(self) -> tuple[Path, ...]:
        """Path with which to open the work folder of the original's pass, of codes and of the descent."""
        return paths_of_parts(self.output, "original", "codes", "descent")


def _find_codes(run: RefinementRun) -> Mapping[str, SourceTensor]:
    """Move the codes of all layers; return the tensors that have others."""
    _, of_codes, _ = run.parts
    source, restart, split = run.source, run.options.restart, run.split
    with WorkFolder(of_codes, run.about_codes, restart=restart, watch=source.watch) as own:
        if own.done < source.network.n_layers - 1:
            _move_codes(run, own, split)
        return KeptCodes(own).tensors(source.tensors, source.network.n_layers)


def _move_codes(run: RefinementRun, own: WorkFolder, split: HoldoutSplit) -> None:
    """Move the codes of the layers that are not in the folder yet."""
    options, chunks, report = run.options, run.text.chunks, run.report
    # Few and long steps follow the noise of their chunks: one chunk a step.
    one, chosen = replace(options, batch=1), summed(split)
    steps = [batch_of(chosen, one, step) for step in range(options.passes * len(chosen))]
    n_layers, of_steps = run.source.network.n_layers, STEP_WORK * len(steps) / split.n_chunks
    # The first layer is moved at more than one rate.
    total, n_done = (2 + of_steps) * n_layers + (N_TRIALS - 1) * of_steps, max(0, own.done + 1)
    tensors, advance = dict(run.source.tensors), report.advance
    report.start(total, (2 + of_steps) * n_done + (N_TRIALS - 1) * of_steps * min(1, n_done))
    report.remark("codes")
    with _original_in_step(run, own) as there, ExitStack() as opened:
        enter, forward = opened.enter_context, options.forward
        n_workers = workers_for(chunks.n_chunks, run.base.loader_for(forward).device)
        original = enter(forward_pass(run.base, chunks, forward, there, advance, n_workers))
        moved = replace(run.source, tensors=tensors)
        student = enter(forward_pass(moved, chunks, forward, own, advance, n_workers))
        by_layer = LayerByLayer(original, student, tensors, run.base.tensors, steps, options, split, advance)
        for layer in by_layer.layers():
            report.remark(f"codes of layer {layer + 1} of {n_layers}")
    if left := by_layer.left_out:
        why = f"the codes of {counted(len(left), 'tensor')} stay: more --memory is needed to move them"
        report.tell(Finding("codes", why, Level.NOTE, tuple(left)))


def _original_in_step(run: RefinementRun, own: WorkFolder) -> WorkFolder:
    """Open the work folder of the original's pass, which may be one layer ahead of the file's own."""
    path, about, watch = run.parts[0], run.about_original, run.base.watch
    folder = WorkFolder(path, about, restart=run.options.restart, watch=watch)
    if folder.done > own.done + 1:
        folder.start_over(None)
    return folder


@contextmanager
def _open_original(run: RefinementRun) -> Iterator[Original]:
    """Give the original's end, once its last hidden states are there.

    All threads are free again by then: a batch has fewer chunks to share them than the text.
    """
    forward, base, chunks, report = run.options.forward, run.base, run.text.chunks, run.report
    restart = run.options.restart and not run.options.passes  # moving codes has begun it anew already
    work = WorkFolder(run.parts[0], run.about_original, restart=restart, watch=base.watch)
    with work as folder, ExitStack() as opened:
        if folder.done < base.network.n_all_layers - 1:
            report.start(base.network.n_all_layers, max(0, folder.done + 1))
            report.remark("the original")
        with threads_for(chunks.n_chunks, base.loader_for(forward).device) as n_workers:
            own = forward_pass(base, chunks, forward, folder, report.advance, n_workers)
            passing = opened.enter_context(own)
            for _ in passing.layers(Silent):
                give_back()
            head = Head.of(base.network, passing.load, passing.last())
            original = Original.of(head, chunks, n_workers)
        yield original


def _descend(
    run: RefinementRun, recoded: Mapping[str, SourceTensor]
) -> tuple[dict[str, SourceTensor], Best, int]:
    """Move scales.

    recoded  tensors with other codes, which stay if they are of use
    returns  the tensors that have others, how good these are, and the steps made
    """
    options, source, split = run.options, run.source, run.split
    load = source.loader_for(options.forward)
    work = WorkFolder(
        run.parts[2], run.about_descent, restart=options.restart, may_skip=True, watch=source.watch
    )
    threads = threads_for(options.batch, load.device)
    with work as folder, _open_original(run) as original, threads as n_workers:
        shares = Shares(run.report)

        def student(moving: dict[str, RefinedTensor], *others: Mapping[str, SourceTensor]) -> Student:
            tensors = {name: tensor for each in (*others, moving) for name, tensor in each.items()}
            loads = replace(load, tensors=tensors)
            return Student(source.network, loads, moving, run.text.chunks, n_workers, shares.advance)

        before = None
        if recoded:
            before = held_divergences(student({}, source.tensors), original, split, options.batch)
            moved = student({}, source.tensors, recoded)
            after = held_divergences(moved, original, split, options.batch)
            recoded = recoded if after.mean() < before.mean() else {}
        tensors = {
            name: RefinedTensor(tensor, scales)
            for name, tensor in {**source.tensors, **recoded}.items()
            if (scales := row_scales(tensor.type, tensor.shape[-1])) is not None
        }
        descent, own = Descent(tensors), student(tensors, source.tensors, recoded)
        best, n_steps = Steps(descent, own, original, folder, options, shares, split).run()
    descent.set_changes(best.changes)
    best = best if before is None else replace(best, before=before)
    return {**recoded, **tensors}, best, n_steps


def _write(
    file: Path, output: Path, tensors: Mapping[str, SourceTensor], keys: Metadata, options: RefineOptions
) -> None:
    """Write the file with other scales; all else stays, but the provenance of other bytes."""
    with open_gguf(file) as opened:
        metadata = {key: value for key, value in opened.metadata.items() if key != PROVENANCE_KEY}
        plan = Plan("refine", tuple(map(_kept, opened.tensors.values())))
        parts = parts_of(opened, ((info, info.name) for info in plan.infos), keep_split=len(opened.paths) > 1)
        outputs = lay_out(output, {**metadata, **keys}, parts, opened.endian)
        sources: dict[str, SourceTensor] = {
            name: tensors.get(name) or GGUFTensor(opened, name) for name in opened.tensors
        }
        rows = RowSources(sources, {}, OpenSources(sources))
        n_bytes = sum(info.n_bytes for info in plan.infos)
        planned = Run(Preparation(plan, outputs, n_bytes), rows, gguf_inputs(opened), time.monotonic())
        planned.execute(RunOptions(options.forward.n_threads, restart=True, force=True))


def _kept(info: TensorInfo) -> TensorPlan:
    role = tensor_role(info.name, info.shape).role
    types = info.type, info.type
    return TensorPlan(info.name, info.shape, role, info.name, *types, Decider.KEPT, "as it is")
