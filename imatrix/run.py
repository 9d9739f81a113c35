"""One collection: layer after layer, then the output."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from forward.accumulate import Accumulator, Sums, sums_of
from forward.logits import Head
from forward.network import OUTPUT
from forward.open import ModelSource
from forward.perplexity import Perplexity, measure
from forward.run import ForwardPass, forward_pass
from forward.text.tokens import Text
from forward.work.work_folder import WorkFolder
from gguf_tools.errors import BadActivation
from imatrix.options import Collected, CollectOptions, CollectReporter
from quantize.importances.entries import ImportanceFile


def run(
    source: ModelSource,
    text: Text,
    options: CollectOptions,
    folder: WorkFolder,
    report: CollectReporter,
    dataset: str,
) -> Collected:
    """Return the importances of the weights of `source`, resuming what the work folder has.

    dataset  name of the text in the file
    raises   BadActivation naming layer and tensor for NaN or infinity; finished layers stay in the folder
    """
    report.start(source.network.n_layers, max(0, folder.done + 1))

    def contents(output: Mapping[str, Sums] = MappingProxyType({})) -> ImportanceFile:
        """Return the importances of finished layers, which take no memory until they are read here."""
        entries = {name: sums.importance() for name, sums in output.items()}
        for layer in range(folder.done + 1):
            entries |= {name: sums.importance() for name, sums in sums_of(folder.arrays(layer)).items()}
        return ImportanceFile(dict(sorted(entries.items())), (dataset,), text.n_chunks, text.chunk_size)

    with forward_pass(source, text, options.forward, folder, report.advance) as forward:
        for layer in forward.layers(Accumulator):
            report.layer_done(layer, contents)
        output, notes = Accumulator(), []
        if options.process_output and source.network.is_tied:
            notes.append(f"--process-output: the model has no {OUTPUT}, it uses its token embeddings")
        elif options.process_output:
            _observe_output(forward, output)
        perplexity = _measure(forward, report) if options.perplexity else None
    return Collected(contents(output.sums()), perplexity, tuple(notes))


def _observe_output(forward: ForwardPass, observer: Accumulator) -> None:
    """Show the observer what the output matrix multiplies."""
    states, norm, load, step = forward.last(), forward.output_norm(), forward.load, forward.text.chunk_size
    for start in range(0, states.n_rows, step):
        hidden = states.read(start, start + step).to(load.device)
        observer.rows((OUTPUT,), norm(hidden).to(load.dtype))
    observer.refuse_nonfinite()


def _measure(forward: ForwardPass, report: CollectReporter) -> Perplexity:
    head = Head(forward.load, forward.last(), forward.output_norm(), forward.source.network.output)

    def running(perplexity: Perplexity) -> None:
        report.remark(f"perplexity {perplexity.value:.4f} +/- {perplexity.error:.4f}")

    perplexity = measure(head, forward.text, running, forward.n_workers)
    if perplexity.count and not np.isfinite(perplexity.total):
        raise BadActivation(f"{OUTPUT}: the logits have NaN or infinity")
    return perplexity
