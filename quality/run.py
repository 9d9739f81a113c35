"""One evaluation: all models go through the text in step, then their logits are compared.

In memory are one layer of one model, and hidden states per model, in files where these are too large. Logits
are formed for slices of the vocabulary, and are never kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from forward.logits import LogitSource, sweep_vocabulary
from forward.open import ModelSource, open_model
from forward.text.quality import judge
from forward.text.tokens import Text
from gguf_tools.errors import BadArgument
from gguf_tools.progress import Reporter
from quality.bases.base import Lockstep, refuse_strangers
from quality.bases.logits_file import write_logits
from quality.bases.open_base import OpenBase, SharedPass, open_base
from quality.calibration_overlap import overlap_findings
from quality.divergence import measure, perplexity
from quality.evaluation import Check, EvaluatedModel, EvaluatedText, Evaluation, TensorSize
from quality.options import SHORTEST_CHUNK, AnyPath, EvaluateOptions, LogitsFile
from quality.spelling import spelled
from quality.visitor import DivergenceVisitor
from quality.work_folders import work_folders
from quality.worst_layer import find_worst_layer


@contextmanager
def evaluated(
    base: Path | LogitsFile,
    text: Path | None,
    quants: Sequence[AnyPath],
    options: EvaluateOptions,
    report: Reporter,
    check: Check,
) -> Iterator[Evaluation]:
    """Do what `quality.pipeline.evaluating` says."""
    if options.forward.n_threads is not None:
        torch.set_num_threads(options.forward.n_threads)
    with ExitStack() as opened:
        models = [opened.enter_context(open_model(path)) for path in quants]
        source = open_base(base, options, opened)
        refuse_strangers(source.path, source.facts, models)
        chunks = source.text(text, models[0].vocab())
        if chunks.chunk_size < SHORTEST_CHUNK:
            raise BadArgument(f"a context of {chunks.chunk_size} tokens, expected {SHORTEST_CHUNK} or more")
        _tell_nonsense(chunks, report)
        for finding in overlap_findings(models, chunks.tokens.ravel()):
            report.tell(finding)
        about, tensors = _about_text(text, chunks, models[0]), [_tensors(each) for each in models]
        check(about, tensors)
        with work_folders(options, source.is_computed, len(models)) as folders, ExitStack() as passes:
            steps = source.begin(SharedPass(chunks.chunks, options, report, passes), models, folders)
            report.start(steps.n_layers_in_all, steps.n_layers_done)
            steps.run()
            head = steps.base_head()
            visitor = _compare_logits(source, head, steps, report)
            if options.logits is not None:
                first = steps.models[0]
                write_logits(head, first.load.device, chunks, options.logits, first.n_workers)
            evaluation = _evaluation(source, steps, visitor, about, tensors)
            source.refuse_changed()
            for model in models:
                model.watch.refuse_changed()
            yield evaluation


def _tell_nonsense(text: Text, report: Reporter) -> None:
    """Say of a text that shows next to nothing that numbers from it say next to nothing."""
    for finding in judge(text).findings():
        if finding.is_bad:
            report.tell(replace(finding, text=f"{finding.text}: these numbers say nothing of ordinary texts"))


def _compare_logits(
    base: OpenBase, head: LogitSource, steps: Lockstep, report: Reporter
) -> DivergenceVisitor:
    first = steps.models[0]
    paths = [base.path, *(each.source.path for each in steps.models)]

    def comparing(chunk: int, n_chunks: int) -> None:
        report.remark(f"comparing logits, chunk {chunk} of {n_chunks}")

    visitor = DivergenceVisitor(first.chunks, paths, first.load.device, comparing, base.floor)
    sweep_vocabulary([head, *steps.heads()], visitor.positions, [visitor], first.n_workers)
    return visitor


def _about_text(path: Path | None, text: Text, model: ModelSource) -> EvaluatedText:
    return EvaluatedText(
        path=path,
        sha256=None if path is None else hashlib.sha256(path.read_bytes()).hexdigest(),
        chunks=text.chunks,
        spelled=spelled(model.vocab()),
    )


def _tensors(source: ModelSource) -> tuple[TensorSize, ...]:
    return tuple(
        TensorSize(tensor.name, tensor.type, tensor.type.tensor_bytes(tensor.shape))
        for tensor in source.tensors.values()
    )


def _evaluation(
    base: OpenBase,
    steps: Lockstep,
    visitor: DivergenceVisitor,
    text: EvaluatedText,
    tensors: Sequence[tuple[TensorSize, ...]],
) -> Evaluation:
    models: list[EvaluatedModel] = []
    for number, each in enumerate(steps.models, 1):
        tokens = visitor.values(number)
        source, layers = each.source, steps.drift(each)
        models.append(
            EvaluatedModel(
                path=source.path,
                n_bytes=sum(digest.n_bytes for digest in source.watch.digests.values()),
                bits_per_weight=_bits_per_weight(source),
                divergence=measure(tokens),
                layers=layers,
                worst_layer=find_worst_layer(steps.weights, each, layers),
                tokens=tokens,
                tensors=tensors[number - 1],
            )
        )
    base_ppl = perplexity(-visitor.log_prob(0))
    return Evaluation(text, base.path, base_ppl, tuple(models))


def _bits_per_weight(source: ModelSource) -> float:
    n_weights = sum(prod(tensor.shape) for tensor in source.tensors.values())
    n_bytes = sum(tensor.type.tensor_bytes(tensor.shape) for tensor in source.tensors.values())
    return 8 * n_bytes / n_weights
