"""One collection: embeddings, then layer after layer, then the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from gguf_tools.errors import BadImportance
from imatrix.accumulate import Accumulator
from imatrix.collect import Collected, CollectOptions, Reporter, device_name
from forward.work_folder import EMBEDDING, Journal
from forward.layer import Sweep, run_layer
from forward.load import Loader
from forward.norm import rms_norm
from forward.rope import rotation
from forward.open import ModelSource
from forward.perplexity import Perplexity, measure
from forward.hidden_states import FileStates, MemoryStates, States, copy
from forward.text import Text
from forward.workers import threads_for
from quantize.importance import Importance, ImportanceFile

OUTPUT = "output.weight"


def run(
    source: ModelSource,
    text: Text,
    options: CollectOptions,
    journal: Journal,
    report: Reporter,
    dataset: str,
) -> Collected:
    """Return what `text` shows the weights of `source`, going on from what the journal has.

    dataset  name of the text in the file
    raises   BadImportance naming layer and tensor for NaN or infinity; finished layers stay in the journal
    """
    device = torch.device(device_name(options.device))
    load = Loader(source, device, getattr(torch, options.dtype))
    n_layers, n_done = source.config.num_hidden_layers, max(0, journal.done + 1)
    report.start(n_layers, n_done)

    def contents(beside: Mapping[str, Importance] = MappingProxyType({})) -> ImportanceFile:
        """Return what finished layers have seen: from the journal, so that it takes no memory meanwhile."""
        entries = dict(beside)
        for layer in range(journal.done + 1):
            entries |= journal.seen(layer).importances()
        return ImportanceFile(dict(sorted(entries.items())), (dataset,), text.n_chunks, text.chunk_size)

    seen: dict[str, Importance] = {}
    with ExitStack() as opened:
        n_workers = opened.enter_context(threads_for(text.n_chunks, device))
        states = _HiddenStates(load, text, journal, options.memory_bytes, opened)
        sweep = Sweep(
            load=load,
            chunk_size=text.chunk_size,
            rotate=rotation(source.config, text.chunk_size, device),
            all_experts=options.all_experts,
            advance=report.advance,
            n_workers=n_workers,
        )
        for layer in _run_layers(sweep, states, journal, n_layers):
            report.layer_done(layer, contents)
        last, notes = states.after(n_layers - 1), []
        norm = load.float32("output_norm.weight", source.config.hidden_size)
        if options.process_output and source.config.tie_word_embeddings:
            notes.append(f"--process-output: the model has no {OUTPUT}, it uses its token embeddings")
        elif options.process_output:
            seen = _see_output(load, text, last, norm).importances()
        perplexity = None
        if options.perplexity:
            perplexity = _measure(load, text, last, norm, report, n_workers)
    return Collected(contents(seen), perplexity, tuple(notes))


def _run_layers(sweep: Sweep, states: _HiddenStates, journal: Journal, n_layers: int) -> Iterator[int]:
    """Compute the layers that are not done, and yield each once it is on disk.

    In memory the next layer is computed while one is written.
    """

    def save(layer: int, found: Accumulator) -> int:
        states.save(layer)
        journal.finish_layer(layer, found)
        return layer

    with ThreadPoolExecutor(1) as writer:
        saving: Future[int] | None = None
        for layer in range(journal.done + 1, n_layers):
            try:
                found = run_layer(sweep, layer, *states.around(layer))
            except BadImportance as error:
                raise BadImportance(f"{error}; the {layer} layers before stay in {journal.folder}") from error
            if saving is not None:
                yield saving.result()
            saving = writer.submit(save, layer, found)
            if not states.in_memory:
                # The next layer writes to the file that a rerun begins with until this one is done.
                saving.result()
        if saving is not None:
            yield saving.result()


def _see_output(load: Loader, text: Text, states: States, norm: torch.Tensor) -> Accumulator:
    """Return what the output matrix multiplies."""
    found = Accumulator()
    eps = load.model.config.rms_norm_eps
    for start in range(0, states.n_rows, text.chunk_size):
        hidden = states.read(start, start + text.chunk_size).to(load.device)
        found.add((OUTPUT,), rms_norm(hidden, norm, eps).to(load.dtype))
    found.refuse_nonfinite()
    return found


def _measure(
    load: Loader, text: Text, states: States, norm: torch.Tensor, report: Reporter, n_workers: int
) -> Perplexity:
    found = measure(load, text, states, norm, report.perplexity, n_workers)
    if found.count and not np.isfinite(found.total):
        raise BadImportance("output.weight: the logits have NaN or infinity")
    return found


class _HiddenStates:
    """Where hidden states are kept: two sets that change places with each layer, and what experts multiply.

    In memory, from where each layer's output is copied to the journal's files; above the budget those files
    are worked on themselves.
    """

    def __init__(
        self, load: Loader, text: Text, journal: Journal, memory_bytes: int, opened: ExitStack
    ) -> None:
        size = text.inputs.size, load.model.config.hidden_size
        self.in_memory = prod(size) * (4 + 4 + load.dtype.itemsize) <= memory_bytes

        def file(path: Path, dtype: torch.dtype = torch.float32) -> FileStates:
            return opened.enter_context(closing(FileStates(path, *size, dtype)))

        self._files = file(journal.hidden_path(0)), file(journal.hidden_path(1))
        if journal.done < EMBEDDING:
            embed(load, text, self._files[EMBEDDING % 2])
            self._files[EMBEDDING % 2].sync()
            journal.finish_layer(EMBEDDING, Accumulator())
        self._sets: tuple[States, States] = self._files
        self._middle: States
        if self.in_memory:
            self._sets = MemoryStates(*size), MemoryStates(*size)
            self._middle = MemoryStates(*size, load.dtype)
            copy(self._files[journal.done % 2], self.after(journal.done))
        else:
            self._middle = file(journal.middle_path, load.dtype)

    def after(self, layer: int) -> States:
        """Return where a layer puts its output, float32."""
        return self._sets[layer % 2]

    def around(self, layer: int) -> tuple[States, States, States]:
        """Return where a layer finds its input, keeps what experts multiply, and puts its output."""
        return self.after(layer - 1), self._middle, self.after(layer)

    def save(self, layer: int) -> None:
        """See the layer's output safely on disk."""
        if self.in_memory:
            copy(self.after(layer), self._files[layer % 2])
        self._files[layer % 2].sync()


def embed(load: Loader, text: Text, states: States) -> None:
    """Write the embeddings of all tokens to `states`, reading the rows that a chunk needs."""
    for chunk, tokens in enumerate(text.inputs):
        unique, places = np.unique(tokens, return_inverse=True)
        rows = load.picked_rows("token_embd.weight", unique.tolist()).cpu()
        if not bool(torch.isfinite(rows).all()):
            raise BadImportance("token_embd.weight: has NaN or infinity")
        states.write(chunk * text.chunk_size, rows[torch.from_numpy(places)])
