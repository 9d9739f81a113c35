"""One run: all models go through the texts in step, then their logits are compared.

In memory are one layer of one model, and hidden states per model, in files where these are too large. Logits
are formed for slices of the vocabulary, and are never kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf_tools.choices import spoken
from gguf_tools.errors import BadRequest
from gguf_tools.files.leftovers import forget
from gguf_tools.files.named_files import AnyPath
from gguf_tools.files.run_lock import in_use
from gguf_tools.findings import Finding, Level, tell_all
from gguf_tools.progress import Reporter
from imatrix.evaluate.against import with_stock
from imatrix.evaluate.bases.base import ComputedBase, Entrant, Lockstep
from imatrix.evaluate.bases.logits_file import write_logits
from imatrix.evaluate.bases.open_base import OpenBase, SharedPass, noise_entrants, open_base
from imatrix.evaluate.divergence import Divergence, Drafts, TokenValues, measure
from imatrix.evaluate.evaluation import Check, ClassEvaluation, EvaluatedModel, Evaluation
from imatrix.evaluate.likeness import Likeness, PassageValues
from imatrix.evaluate.noise_floor import NoiseFloor
from imatrix.evaluate.options import EvaluateOptions, LogitsFile
from imatrix.evaluate.visitor import DivergenceVisitor
from imatrix.evaluate.worst_layer import WorstLayers
from imatrix.forward.device import to_numpy
from imatrix.forward.logits import SCORED, LogitSource, sweep_vocabulary
from imatrix.forward.network import Pooling
from imatrix.forward.open import ModelSource, open_model, refuse_encoder
from imatrix.forward.pooled import pooled
from imatrix.forward.run import ForwardPass
from imatrix.forward.workers import torch_threads
from imatrix.texts.chunks import Chunks
from imatrix.texts.quality import judge
from imatrix.texts.suite import Suite
from imatrix.texts.tokenise import ClassChunks
from quantize.importances.text_sketch import PASSAGE, TextSketch

_LASTING = Path("/var/tmp")
"""Folder for large temporary files: /tmp may be in memory, which hidden states are to spare."""


@contextmanager
def open_evaluation(
    base: Path | LogitsFile,
    texts: Suite | Path | None,
    quants: Sequence[AnyPath],
    options: EvaluateOptions,
    report: Reporter,
    check: Check,
) -> Iterator[Evaluation]:
    """Give an evaluation; see `imatrix.evaluate.pipeline.evaluating`."""
    with open_comparison(base, texts, quants, options, report, check) as planned:
        models, source, read, chunks = planned.models, planned.base, planned.read, planned.chunks
        noise, entrants = planned.noise, [*map(Entrant, models), *planned.noise]
        with _work_folders(options, source.is_computed, len(entrants)) as folders, ExitStack() as passes:
            steps = source.begin(SharedPass(chunks, options, report, passes), entrants, folders)
            heads = 0.0 if source.pooling is not None else _head_layers(steps.models)
            drafts = _head_layers(steps.drafting)
            report.start(steps.n_layers_in_all + heads + drafts, steps.n_layers_done)
            steps.run()
            suite = texts if isinstance(texts, Suite) else None
            if source.pooling is not None:
                by_text = zip(*_pooled_models(steps, source.pooling), strict=True)
                by_class = {
                    text.name: ClassEvaluation(text, None, of_text)
                    for text, of_text in zip(read, by_text, strict=True)
                }
                _refuse_changed(source, models)
                yield Evaluation(source.path, by_class, planned.stock, suite)
                return
            head = steps.base_head()
            visitor = _compare_logits(source, [head, *steps.heads()], steps.models, report, heads)
            drafted = None
            if steps.drafting:
                drafted = _compare_logits(source, steps.draft_heads(), steps.drafting, report, drafts)
            if options.logits is not None:
                first = steps.models[0]
                write_logits(head, first.load.device, chunks, options.logits, first.n_workers)
            models_by_text = zip(*_models(steps, visitor, drafted, len(models)), strict=True)
            floors = _noise_floors(visitor, len(models), noise, chunks)
            _refuse_changed(source, models)
            by_class = {
                text.name: ClassEvaluation(text, of_text[0].divergence.base_ppl, of_text, floor)
                for text, of_text, floor in zip(read, models_by_text, floors, strict=True)
            }
            yield Evaluation(source.path, by_class, planned.stock, suite)


def _refuse_changed(base: OpenBase, models: Sequence[ModelSource]) -> None:
    """Raise InputChanged for a file that is not as it was when its weights were read."""
    base.refuse_changed()
    for model in models:
        model.watch.refuse_changed()


@dataclass(frozen=True)
class PlannedEvaluation:
    """An evaluation of which headers and texts were read, and nothing is computed yet.

    read   the classes of a suite, or a text alone
    noise  the base as other files of it would be
    stock  number of the file that others are to beat
    """

    base: OpenBase
    models: Sequence[ModelSource]
    read: Sequence[ClassChunks]
    noise: Sequence[Entrant]
    stock: int | None

    @cached_property
    def chunks(self) -> Chunks:
        """All texts, one after the other."""
        return Chunks.joined([text.chunks for text in self.read])


@contextmanager
def open_comparison(
    base: Path | LogitsFile,
    texts: Suite | Path | None,
    quants: Sequence[AnyPath],
    options: EvaluateOptions,
    report: Reporter,
    check: Check,
) -> Iterator[PlannedEvaluation]:
    """Open what an evaluation reads; raises what `evaluating` refuses before it computes."""
    with ExitStack() as opened:
        opened.enter_context(torch_threads(options.forward.n_threads))
        paths, stock = with_stock(quants, options.against)
        models = [opened.enter_context(open_model(path, predicts=False)) for path in paths]
        source = open_base(base, options, opened)
        source.known.admit(models, report.tell)
        if source.pooling is not None:
            _refuse_of_predictions(source.path, options)
        for model in models if source.pooling is None else ():
            refuse_encoder(model.path, model.network)
        read = source.read(texts, models[0].vocab())
        tell_all(_findings_of(models, max(text.chunks.longest for text in read)), report.tell)
        for text in read:
            _tell_doubts(text, models, report)
            check(text, [each.infos for each in models])
        noise = noise_entrants(source) if options.noise_floor else ()
        yield PlannedEvaluation(source, models, read, noise, stock)


@contextmanager
def _work_folders(options: EvaluateOptions, has_base: bool, n_models: int) -> Iterator[list[Path]]:
    """Give each model a name for its work folder; the folders go unless an error ends the run.

    Whatever else is in the folder that they are in stays there.

    has_base  whether the first is the base's
    """
    models = [f"model-{number}" for number in range(1, n_models + 1)]
    names = ["base", *models] if has_base else models
    if options.work is None:
        with TemporaryDirectory(prefix="evaluate-", dir=temporary_folder()) as folder:
            try:
                yield [Path(folder, name) for name in names]
            except KeyboardInterrupt as error:
                error.__notes__ = [spoken("nothing is kept without --json, --html or --work DIR")]
                raise
        return
    with in_use(options.work):
        yield [options.work / name for name in names]
        forget(options.work)


def temporary_folder() -> Path | None:
    """Choose where temporary folders go: $TMPDIR, or /var/tmp; None: Python decides."""
    if os.environ.get("TMPDIR") or not os.access(_LASTING, os.W_OK):
        return None
    return _LASTING


def _findings_of(models: Sequence[ModelSource], chunk_size: int) -> Iterator[Finding]:
    """Yield what is to be said of the models, and of what they have in common once."""
    said = set[str]()
    for model in models:
        for finding in model.findings(chunk_size):
            if finding.kind not in said:
                yield finding
            said.add(finding.kind)


def _tell_doubts(text: ClassChunks, models: Sequence[ModelSource], report: Reporter) -> None:
    """Say of a text that numbers from it show next to nothing, or flatter files calibrated on it."""
    where, name = ("", "the text") if text.is_alone else (f"class {text.name}: ", f"class {text.name}")
    for finding in judge(text.chunks).findings():
        if finding.is_bad:
            said = f"{where}{finding.text}: these numbers say nothing of ordinary texts"
            report.tell(replace(finding, text=said))
    for model in models:
        sketch = TextSketch.read(model.metadata)
        shared = 0.0 if sketch is None else sketch.shared(text.chunks.tokens)
        if shared:
            percent = f"about {100 * shared:.0f} %" if shared >= 0.005 else "less than 1 %"
            said = (
                f"{model.path.name} was calibrated on {percent} of {name}, by passages of {PASSAGE} tokens:"
                " it is better there than elsewhere, and so are these numbers"
            )
            report.tell(Finding("calibrated on this", said, Level.WARNING))


def _head_layers(models: Sequence[ForwardPass]) -> float:
    """Estimate how many layers the logits of models and of their base take as long as."""
    return SCORED * sum(each.source.head_layers for each in (*models, *models[:1]))


def _compare_logits(
    base: OpenBase,
    heads: Sequence[LogitSource],
    models: Sequence[ForwardPass],
    report: Reporter,
    work: float,
) -> DivergenceVisitor:
    """Compare the logits of models with the base's, which is as much work as so many layers.

    heads  the base's, then those of the models
    """
    first = models[0]
    paths = [base.path, *(each.source.path for each in models)]

    def comparing(chunk: int, n_chunks: int) -> None:
        report.remark(f"comparing logits, chunk {chunk} of {n_chunks}")

    visitor = DivergenceVisitor(first.chunks, paths, first.load.device, comparing, base.floor)

    def told(share: float) -> None:
        report.advance(work * share)

    sweep_vocabulary(heads, visitor.positions, [visitor], first.n_workers, told)
    return visitor


def _models(
    steps: Lockstep,
    visitor: DivergenceVisitor,
    drafted: DivergenceVisitor | None,
    n_models: int,
) -> Iterator[tuple[EvaluatedModel, ...]]:
    """Yield what was measured of each of the first `n_models` on each text.

    drafted  of the drafts, where some have been compared
    """
    for number, model in enumerate(steps.models[:n_models], 1):
        tokens, drafts = visitor.values(number), None
        if drafted is not None and model in steps.drafting:
            drafts = drafted.values(1 + steps.drafting.index(model))
        yield tuple(_of_texts(steps, model, tokens, drafts))


def _pooled_models(steps: Lockstep, pooling: Pooling) -> Iterator[tuple[EvaluatedModel, ...]]:
    """Yield how like the base's the vectors of each model are, on each text."""
    assert isinstance(steps.base, ComputedBase)
    base = to_numpy(pooled(steps.base.forward, pooling))
    for model in steps.models:
        vectors = to_numpy(pooled(model, pooling))
        if vectors.shape != base.shape:
            raise BadRequest(
                f"{model.source.path}: vectors of {vectors.shape[1]} columns, the base's have {base.shape[1]}"
            )
        yield tuple(_of_texts(steps, model, PassageValues.of(base, vectors)))


def _of_texts(
    steps: Lockstep,
    model: ForwardPass,
    values: TokenValues | PassageValues,
    drafts: TokenValues | None = None,
) -> Iterator[EvaluatedModel]:
    """Yield what was measured of a model on each text."""
    source, worst = model.source, WorstLayers(steps.weights, model)
    n_bytes = sum(digest.n_bytes for digest in source.watch.digests.values())
    for part, chunks in enumerate(model.chunks.parts):
        here, layers = values.of_chunks(chunks), steps.drift(model, part)
        found: Divergence | Likeness
        drafted = None
        if isinstance(here, PassageValues):
            found = Likeness.over([here])
        else:
            found = measure(here)
            drafted = None if drafts is None else Drafts.of(here, drafts.of_chunks(chunks))
        yield EvaluatedModel(
            path=source.path,
            n_bytes=n_bytes,
            bits_per_weight=source.bits_per_weight,
            divergence=found,
            layers=layers,
            worst_layer=worst.of(layers),
            tokens=here,
            tensors=source.infos,
            drafts=drafted,
        )


def _refuse_of_predictions(base: Path, options: EvaluateOptions) -> None:
    """Raise BadRequest for what is measured of predictions, where a model is for embeddings."""
    for name, is_wanted in (
        ("--keep", options.keep is not None),
        ("--kl-divergence-base", options.logits is not None),
        ("--against", options.against is not None),
        ("--noise-floor", options.noise_floor),
    ):
        if is_wanted:
            raise BadRequest(f"{base}: is for embeddings, and {name} is for models that predict tokens")


def _noise_floors(
    visitor: DivergenceVisitor, n_models: int, entrants: Sequence[Entrant], chunks: Chunks
) -> list[NoiseFloor | None]:
    """Measure the floor on each text by the models behind the first `n_models`; None where there are none."""
    tokens = {each.rounded: visitor.values(number) for number, each in enumerate(entrants, n_models + 1)}
    if not tokens:
        return [None] * len(chunks.parts)
    found = [{name: measure(each.of_chunks(part)) for name, each in tokens.items()} for part in chunks.parts]
    return [NoiseFloor(each["activations"], each.get("weights")) for each in found]
