"""Evaluate models against their base: all of them go through the text in step.

In memory are one layer of one model, and hidden states per model, in files where these are too large. Logits
are formed for slices of the vocabulary, and are never kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from forward.device import device_name, require_torch
from forward.text import Text, read_text
from gguf_tools import keys
from gguf_tools.errors import BadRequest, OutputError
from quality.options import EvaluateOptions, NoReport, Reporter

if TYPE_CHECKING:
    from forward.open import ModelSource
    from gguf_tools.values import Metadata
    from quality.evaluation import EvaluatedModel, EvaluatedText, Evaluation
    from quality.lockstep import Lockstep
    from quality.visitor import DivergenceVisitor

AnyPath = str | os.PathLike[str]


def evaluate(
    base: AnyPath,
    text: AnyPath,
    quants: Sequence[AnyPath],
    options: EvaluateOptions | None = None,
    report: Reporter | None = None,
) -> Evaluation:
    """Return how well `base` predicts a text, and how far every other model is from it.

    base    Hugging Face folder, or GGUF file
    text    UTF-8 file
    quants  GGUF files made of the base; a folder can be compared, too
    raises  ToolkitError; BadRequest, before anything is computed, for a model with another vocabulary, number
            of layers or hidden size, or a text without a whole chunk; BadActivation naming model, layer and
            tensor for NaN or infinity; OutputError for a file that can't be written
    """
    require_torch("evaluating models")
    import torch

    from forward.open import open_model
    from quality.logits_file import write_logits

    options, report = options or EvaluateOptions(), report or NoReport()
    if not quants:
        raise BadRequest("no model to compare with the base")
    if options.logits is not None and not options.logits.parent.is_dir():
        raise OutputError(f"{options.logits}: can't be written (no such folder)")
    if options.forward.n_threads is not None:
        torch.set_num_threads(options.forward.n_threads)
    with ExitStack() as opened:
        reference = opened.enter_context(open_model(base))
        models = [opened.enter_context(open_model(path)) for path in quants]
        _refuse_strangers(reference, models)
        path = Path(text)
        chunks = read_text(path, reference.vocab(), reference.network.vocab_size, options.cut)
        if chunks.chunk_size < 4:
            raise BadRequest(f"a context of {chunks.chunk_size} tokens, expected 4 or more")
        with _work_folders(options, 1 + len(models)) as folders, ExitStack() as passes:
            steps = _begin(reference, models, chunks, options, folders, report, passes)
            n_models = 1 + len(models)
            report.start(n_models * reference.network.n_layers, steps.n_layers_done)
            steps.run()
            visitor = _compare_logits(steps, report)
            if options.logits is not None:
                write_logits(steps.heads()[0], chunks, options.logits, steps.base.n_workers)
            return _evaluation(steps, visitor, _about_text(path, chunks, reference.vocab(), visitor))


def _refuse_strangers(base: ModelSource, models: Sequence[ModelSource]) -> None:
    """Raise BadRequest for a model that can't have been made of the base."""
    tokens = _tokens(base)
    for model in models:
        for what, wanted, found in (
            ("layers", base.network.n_layers, model.network.n_layers),
            ("columns of hidden states", base.network.hidden_size, model.network.hidden_size),
            ("tokens in the vocabulary", base.network.vocab_size, model.network.vocab_size),
        ):
            if wanted != found:
                raise BadRequest(
                    f"{model.path}: {found} {what}, and {base.path} has {wanted}; another model?"
                )
        if _tokens(model) != tokens:
            raise BadRequest(f"{model.path}: has another vocabulary than {base.path}; another model?")


def _tokens(source: ModelSource) -> object:
    value = source.vocab().get(keys.TOKENIZER_TOKENS)
    return None if value is None else tuple(value.data)


@contextmanager
def _work_folders(options: EvaluateOptions, n_models: int) -> Iterator[list[Path]]:
    """Give each model, the base first, a name for its work folder; they go unless an error ends the run.

    Whatever else is in the folder that they are in stays there.
    """
    from forward.work_folder import forget

    names = ["base", *(f"model-{number}" for number in range(1, n_models))]
    if options.work is None:
        with TemporaryDirectory(prefix="evaluate-") as folder:
            yield [Path(folder, name) for name in names]
        return
    try:
        options.work.mkdir(exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{options.work}: can't be written ({error.strerror})") from error
    outputs = [options.work / name for name in names]
    yield outputs
    for output in outputs:
        forget(output)
    with suppress(OSError):  # it is not empty
        options.work.rmdir()


def _begin(
    base: ModelSource,
    models: Sequence[ModelSource],
    text: Text,
    options: EvaluateOptions,
    folders: Sequence[Path],
    report: Reporter,
    opened: ExitStack,
) -> Lockstep:
    """Open a forward pass for every model; each resumes what its work folder has."""
    from forward.run import forward_pass
    from forward.work_folder import WorkFolder
    from quality.lockstep import Lockstep

    n_models = 1 + len(models)
    forward = replace(options.forward, memory_bytes=options.forward.memory_bytes // n_models)
    passes = []
    for source, output in zip((base, *models), folders, strict=True):
        about = _about_run(base, source, text, options)
        folder = opened.enter_context(WorkFolder(output, about, restart=options.restart))
        passes.append(opened.enter_context(forward_pass(source, text, forward, folder, report.advance)))
    return Lockstep(passes[0], passes[1:])


def _about_run(
    base: ModelSource, source: ModelSource, text: Text, options: EvaluateOptions
) -> dict[str, Any]:
    """Return what decides the numbers of one model: the base, too, because drift is measured against it."""

    def files(model: ModelSource) -> list[tuple[str, int, int]]:
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.paths]

    return {
        "base": files(base),
        "model": files(source),
        "text": text.digest(),
        "chunks": text.n_chunks,
        "context": text.chunk_size,
        "dtype": options.forward.dtype,
        "device": device_name(options.forward.device),
    }


def _compare_logits(steps: Lockstep, report: Reporter) -> DivergenceVisitor:
    from forward.logits import sweep_vocabulary
    from quality.visitor import DivergenceVisitor

    base = steps.base
    paths = [each.source.path for each in (base, *steps.models)]
    visitor = DivergenceVisitor(base.text, paths, base.load.device, report.comparing)
    sweep_vocabulary(steps.heads(), visitor.positions, [visitor], base.n_workers)
    return visitor


def _about_text(path: Path, text: Text, vocab: Metadata, visitor: DivergenceVisitor) -> EvaluatedText:
    from quality.evaluation import EvaluatedText
    from quality.spelling import spelled

    positions = visitor.positions
    return EvaluatedText(
        path=path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        n_chunks=text.n_chunks,
        chunk_size=text.chunk_size,
        n_tokens_measured=text.n_chunks * (positions.stop - positions.first),
        tokens=text.tokens,
        spelled=spelled(vocab),
        first=positions.first,
    )


def _evaluation(steps: Lockstep, visitor: DivergenceVisitor, text: EvaluatedText) -> Evaluation:
    from quality.divergence import measure, perplexity
    from quality.evaluation import EvaluatedModel, Evaluation, TensorSize
    from quality.worst_layer import find_worst_layer

    models: list[EvaluatedModel] = []
    for number, each in enumerate(steps.models, 1):
        tokens = visitor.values(number)
        source, layers = each.source, steps.drift(each)
        models.append(
            EvaluatedModel(
                path=source.path,
                n_bytes=sum(path.stat().st_size for path in source.paths),
                bits_per_weight=_bits_per_weight(source),
                divergence=measure(tokens, visitor.positions.first),
                layers=layers,
                worst_layer=find_worst_layer(steps.base, each, layers),
                tokens=tokens,
                tensors=tuple(
                    TensorSize(tensor.name, tensor.type, tensor.type.tensor_bytes(tensor.shape))
                    for tensor in source.tensors.values()
                ),
            )
        )
    base_ppl = perplexity(-visitor.log_prob(0).ravel())
    return Evaluation(text, steps.base.source.path, base_ppl, tuple(models))


def _bits_per_weight(source: ModelSource) -> float:
    n_weights = sum(prod(tensor.shape) for tensor in source.tensors.values())
    n_bytes = sum(tensor.type.tensor_bytes(tensor.shape) for tensor in source.tensors.values())
    return 8 * n_bytes / n_weights
