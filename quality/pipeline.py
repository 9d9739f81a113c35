"""Evaluate models against their base: all of them go through the text in step.

In memory are one layer of one model, and hidden states per model, in files where these are too large. Logits
are formed for slices of the vocabulary, and are never kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from forward.options import require_torch
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadArgument, BadRequest, OutputError
from gguf_tools.files.named_files import output_path
from gguf_tools.progress import NoReport, Reporter
from quality.options import SHORTEST_CHUNK, EvaluateChoices, EvaluateOptions, LogitsFile

if TYPE_CHECKING:
    from forward.logits import LogitSource
    from forward.open import ModelSource
    from forward.text.tokens import Text
    from quality.bases.open_base import OpenBase
    from quality.evaluation import EvaluatedText, Evaluation, TensorSize
    from quality.lockstep import Lockstep
    from quality.visitor import DivergenceVisitor


AnyPath = str | os.PathLike[str]

Check = Callable[["EvaluatedText", Sequence[tuple["TensorSize", ...]]], None]
"""Given the text and the tensors of each file, raises BadRequest for what can't be done with their result."""


def evaluate(
    base: str | os.PathLike[str] | LogitsFile,
    text: str | os.PathLike[str] | None,
    quants: Sequence[str | os.PathLike[str]],
    options: EvaluateOptions | None = None,
    report: Reporter | None = None,
    **choices: Unpack[EvaluateChoices],
) -> Evaluation:
    """Return how well `base` predicts a text, and how far every other model is from it.

        evaluate("lite-bf16.gguf", "wiki.test.raw", ["lite-Q4_K_M.gguf"], n_chunks=40)

    base     Hugging Face folder, or GGUF file; it may be gone if `options.keep` has its states. Or a file of
             log probabilities that llama-perplexity has written
    text     UTF-8 file; with a file of log probabilities it may be None
    quants   GGUF files made of the base; a folder can be compared, too
    report   is told how far it has come
    choices  fields of EvaluateOptions, and of the Cut and ForwardOptions in it, as keyword arguments:
             chunk_size=512, device="cpu". They replace those of `options`
    raises   ToolkitError; BadRequest, before anything is computed, for a model with another vocabulary,
             number of layers or hidden size, or a text without a whole chunk; BadActivation naming model,
             layer and tensor for NaN or infinity; OutputError for a file that can't be written
    """
    options = with_choices(options or EvaluateOptions(), choices)
    with evaluating(base, text, quants, options, report) as evaluation:
        return evaluation


@contextmanager
def evaluating(
    base: AnyPath | LogitsFile,
    text: AnyPath | None,
    quants: Sequence[AnyPath],
    options: EvaluateOptions | None = None,
    report: Reporter | None = None,
    check: Check = lambda text, files: None,
) -> Iterator[Evaluation]:
    """Give what `evaluate` returns. Finished layers stay until the block has ended without an error.

    So what is made of the evaluation can be written there, and a run that is killed meanwhile can go on.

    check  called before anything is computed
    """
    require_torch("evaluating models")
    import torch

    from forward.open import open_model
    from quality.bases.base import refuse_strangers
    from quality.bases.logits_file import write_logits
    from quality.bases.open_base import SharedPass, open_base
    from quality.work_folders import work_folders

    options, report = options or EvaluateOptions(), report or NoReport()
    if not quants:
        raise BadRequest("no model to compare with the base")
    if options.logits is not None and not output_path(options.logits).parent.is_dir():
        raise OutputError(f"{options.logits}: can't be written (no such folder)")
    if options.forward.n_threads is not None:
        torch.set_num_threads(options.forward.n_threads)
    with ExitStack() as opened:
        models = [opened.enter_context(open_model(path)) for path in quants]
        source = open_base(base if isinstance(base, LogitsFile) else Path(base), options, opened)
        refuse_strangers(source.path, source.facts, models)
        path = None if text is None else Path(text)
        chunks = source.text(path, models[0].vocab())
        if chunks.chunk_size < SHORTEST_CHUNK:
            raise BadArgument(f"a context of {chunks.chunk_size} tokens, expected {SHORTEST_CHUNK} or more")
        _tell_nonsense(chunks, report)
        about, tensors = _about_text(path, chunks, models[0]), [_tensors(each) for each in models]
        check(about, tensors)
        with work_folders(options, source.is_computed, len(models)) as folders, ExitStack() as passes:
            steps = source.begin(SharedPass(chunks, options, report, passes), models, folders)
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
    from forward.text.quality import judge

    for finding in judge(text).findings():
        if finding.is_bad:
            report.tell(replace(finding, text=f"{finding.text}: these numbers say nothing of ordinary texts"))


def _compare_logits(
    base: OpenBase, head: LogitSource, steps: Lockstep, report: Reporter
) -> DivergenceVisitor:
    from forward.logits import sweep_vocabulary
    from quality.visitor import DivergenceVisitor

    first = steps.models[0]
    paths = [base.path, *(each.source.path for each in steps.models)]

    def comparing(chunk: int, n_chunks: int) -> None:
        report.remark(f"comparing logits, chunk {chunk} of {n_chunks}")

    visitor = DivergenceVisitor(first.text, paths, first.load.device, comparing, base.floor)
    sweep_vocabulary([head, *steps.heads()], visitor.positions, [visitor], first.n_workers)
    return visitor


def _about_text(path: Path | None, text: Text, model: ModelSource) -> EvaluatedText:
    from forward.perplexity import predicted_positions
    from quality.evaluation import EvaluatedText
    from quality.spelling import spelled

    positions = predicted_positions(text)
    return EvaluatedText(
        path=path,
        sha256=None if path is None else hashlib.sha256(path.read_bytes()).hexdigest(),
        n_chunks=text.n_chunks,
        chunk_size=text.chunk_size,
        n_tokens_measured=text.n_chunks * (positions.stop - positions.first),
        tokens=text.tokens,
        spelled=spelled(model.vocab()),
        first=positions.first,
    )


def _tensors(source: ModelSource) -> tuple[TensorSize, ...]:
    from quality.evaluation import TensorSize

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
    from quality.divergence import measure, perplexity
    from quality.evaluation import EvaluatedModel, Evaluation
    from quality.worst_layer import find_worst_layer

    models: list[EvaluatedModel] = []
    for number, each in enumerate(steps.models, 1):
        tokens = visitor.values(number)
        source, layers = each.source, steps.drift(each)
        models.append(
            EvaluatedModel(
                path=source.path,
                n_bytes=sum(digest.n_bytes for digest in source.watch.digests.values()),
                bits_per_weight=_bits_per_weight(source),
                divergence=measure(tokens, visitor.positions.first),
                layers=layers,
                worst_layer=find_worst_layer(steps.weights, each, layers),
                tokens=tokens,
                tensors=tensors[number - 1],
            )
        )
    base_ppl = perplexity(-visitor.log_prob(0).ravel())
    return Evaluation(text, base.path, base_ppl, tuple(models))


def _bits_per_weight(source: ModelSource) -> float:
    n_weights = sum(prod(tensor.shape) for tensor in source.tensors.values())
    n_bytes = sum(tensor.type.tensor_bytes(tensor.shape) for tensor in source.tensors.values())
    return 8 * n_bytes / n_weights
