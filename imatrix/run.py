"""One collection: layer after layer, each read once for all chunks of text, then the output.

Between layers a hidden state per token is kept, in memory or in a file when it is above the budget. The rest
of the memory is one layer's attention and, per thread, a chunk's activations and one or two experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gguf_tools.errors import BadActivation, BadImportance
from gguf_tools.files.inputs import InputWatch
from gguf_tools.findings import tell_all
from gguf_tools.progress import Reporter
from imatrix.forward.logits import SCORED, Head, Perplexity, measure
from imatrix.forward.mtp import own_embeddings
from imatrix.forward.network import OUTPUT
from imatrix.forward.observe import Accumulator, TensorSums, sums_of
from imatrix.forward.open import ModelSource, open_model
from imatrix.forward.run import ForwardPass, forward_pass, refuse_full_disk
from imatrix.forward.work_folder import WorkFolder, run_identity
from imatrix.forward.workers import torch_threads
from imatrix.merge import merge
from imatrix.options import Collected, CollectOptions, LayerDone
from imatrix.texts.chunks import Chunks
from imatrix.texts.mixture import read_text
from imatrix.texts.quality import admit
from imatrix.texts.tokens import Text
from quantize.importances.entries import ImportanceFile, refuse_nonfinite

_CHOSEN = (
    "tokens attend to {n_chosen} positions, whose choice depends on rounding: what is attended to is rounded"
    " to F16, as in llama.cpp's cache"
)
"""Note on models with an indexer, for chunks in which it chooses."""


def collect_from(
    model: Path,
    text: Path,
    output: Path,
    options: CollectOptions,
    report: Reporter,
    layer_done: LayerDone,
) -> Collected:
    """Do what `imatrix.collecting.collect_beside` says."""
    with open_collection(model, text, options, report) as planned:
        source, chunks, options = planned.source, planned.text, planned.options
        about = _about(source.watch, chunks, options)
        with WorkFolder(output, about, watch=source.watch, restart=options.restart) as folder:
            refuse_full_disk([folder.folder], [source], chunks.chunks, options.forward)
            dataset = options.dataset or text.name
            collected = _run(source, chunks, options, folder, report, layer_done, dataset)
            source.watch.refuse_changed()
    refuse_nonfinite(collected.importances.entries)
    merged = merge([*planned.earlier, collected.importances])
    notes = *planned.notes, *collected.notes, *merged.notes
    return replace(collected, importances=merged.importances, notes=notes)


@dataclass(frozen=True)
class Collection:
    """A collection of which headers and text were read, and nothing is computed yet.

    earlier  files that are added up with it
    notes    what there is to say of it
    """

    source: ModelSource
    text: Text
    options: CollectOptions
    earlier: Sequence[ImportanceFile]
    notes: tuple[str, ...]


@contextmanager
def open_collection(
    model: Path, text: Path, options: CollectOptions, report: Reporter
) -> Iterator[Collection]:
    """Open what a collection reads; raises what `imatrix.collect` refuses before it computes."""
    with (
        torch_threads(options.forward.n_threads),
        open_model(options.adapted(model), predicts=False) as source,
    ):
        vocab, network = source.vocab(), source.network
        chunks = read_text(text, vocab, network.vocab_size, options.cut, passages=network.encodes)
        if network.encodes:
            options = replace(options, perplexity=False)  # it predicts nothing
        quality = admit(chunks, str(text), report.tell, any_text=options.any_text)
        tell_all(source.findings(chunks.chunk_size), report.tell)
        notes = tuple(finding.text for finding in quality.findings())
        n_chosen = network.n_chosen
        if n_chosen is not None and n_chosen < chunks.chunk_size and options.forward.dtype == "float32":
            options = replace(options, forward=replace(options.forward, half_cache=True))
            notes += (_CHOSEN.format(n_chosen=n_chosen),)
        earlier = options.earlier_files
        _refuse_others(earlier, source)
        yield Collection(source, chunks, options, earlier, notes)


def _refuse_others(earlier: Sequence[ImportanceFile], source: ModelSource) -> None:
    """Raise BadImportance, before anything is computed, for importances of another model."""
    if earlier:
        merge(earlier)
    for file in earlier:
        for name, entry in file.entries.items():
            tensor = source.tensors.get(name)
            if tensor is not None and entry.n_values % tensor.shape[-1]:
                raise BadImportance(
                    f"{file.path}: {name} has {entry.n_values} values, and the rows of {source.path} have"
                    f" {tensor.shape[-1]} columns; of another model?"
                )


def _about(inputs: InputWatch, text: Text, options: CollectOptions) -> dict[str, Any]:
    """List what decides the numbers of a run."""
    return {
        "model": inputs.recognised_by(),
        **run_identity(text.chunks, options.forward),
        "all_experts": options.forward.all_experts,
        **({"half_cache": True} if options.forward.half_cache else {}),
    }


def _run(
    source: ModelSource,
    text: Text,
    options: CollectOptions,
    folder: WorkFolder,
    report: Reporter,
    layer_done: LayerDone,
    dataset: str,
) -> Collected:
    """Compute the importances of the weights of `source`, resuming what the work folder has.

    dataset  name of the text in the file
    raises   BadActivation naming layer and tensor for NaN or infinity; finished layers stay in the folder
    """
    scored = SCORED * source.head_layers if options.perplexity else 0.0
    report.start(source.network.n_all_layers + scored, max(0, folder.done + 1))

    def contents(output: Mapping[str, TensorSums] = MappingProxyType({})) -> ImportanceFile:
        """Return the importances of finished layers, which take no memory until they are read here."""
        entries = {name: sums.importance() for name, sums in output.items()}
        for layer in range(folder.done + 1):
            entries |= {name: sums.importance() for name, sums in sums_of(folder.arrays(layer)).items()}
        return ImportanceFile(dict(sorted(entries.items())), (dataset,), text.n_chunks, text.chunk_size)

    with forward_pass(source, text.chunks, options.forward, folder, report.advance) as forward:
        for layer in forward.layers(Accumulator):
            layer_done(layer, contents)
        output, notes = Accumulator(), []
        if options.process_output and source.network.is_tied:
            notes.append(f"--process-output: the model has no {OUTPUT}, it uses its token embeddings")
        elif options.process_output:
            head = Head.of(source.network, forward.load, forward.last())
            _observe_head(head, forward.chunks, output)
        if source.network.n_mtp:
            _observe_draft(forward, output)
        perplexity = _measure(forward, report, scored) if options.perplexity else None
    return Collected(contents(output.sums()), perplexity, tuple(notes))


def _observe_head(head: Head, chunks: Chunks, observer: Accumulator) -> None:
    """Show the observer what an output matrix multiplies."""
    for chunk in range(chunks.n_chunks):
        tokens = torch.arange(*chunks.rows(chunk))
        observer.rows((head.matrix,), head.inputs(tokens))
    observer.refuse_nonfinite()


def _observe_draft(forward: ForwardPass, observer: Accumulator) -> None:
    """Show the observer what counts at the MTP layer's own output matrix and embeddings, if it has them."""
    network, load = forward.source.network, forward.load
    head = forward.draft_head()
    if head.matrix != network.output:
        _observe_head(head, forward.chunks, observer)
    table = own_embeddings(network, load)
    if table is not None:
        name, factors = table
        observer.rows((name,), factors[None])


def _measure(forward: ForwardPass, report: Reporter, work: float) -> Perplexity:
    """Measure the perplexity, which is as much work as so many layers."""
    head = Head.of(forward.source.network, forward.load, forward.last())

    def running(perplexity: Perplexity) -> None:
        report.remark(f"perplexity {perplexity.value:.4f} +/- {perplexity.error:.4f}")

    perplexity = measure(
        head, forward.chunks, running, forward.n_workers, lambda share: report.advance(work * share)
    )
    if perplexity.count and not np.isfinite(perplexity.total):
        raise BadActivation(f"{OUTPUT}: the logits have NaN or infinity")
    return perplexity
