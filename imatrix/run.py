"""One collection: embeddings, then layer after layer, then the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from types import MappingProxyType

import numpy as np
import torch

from gguf_tools.errors import BadImportance
from imatrix.accumulate import Accumulator
from imatrix.collect import Collected, CollectOptions, Reporter, device_name
from imatrix.journal import EMBEDDING, Journal
from imatrix.model.layer import Sweep, run_layer
from imatrix.model.load import Loader
from imatrix.model.norm import rms_norm
from imatrix.model.rope import rotation
from imatrix.model.source import ModelSource
from imatrix.perplexity import Perplexity, measure
from imatrix.states import FileStates, MemoryStates, States, copy
from imatrix.text import Text
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
        states = _HiddenStates(load, text, journal, options.memory_bytes, opened)
        sweep = Sweep(
            load=load,
            chunk_size=text.chunk_size,
            rotate=rotation(source.config, text.chunk_size, device),
            all_experts=options.all_experts,
            advance=report.advance,
        )
        for layer in _run_layers(sweep, states, journal, n_layers):
            report.layer_done(layer, contents)
        last, notes = states.latest, []
        norm = load.float32("output_norm.weight", source.config.hidden_size)
        if options.process_output and source.config.tie_word_embeddings:
            notes.append(f"--process-output: the model has no {OUTPUT}, it uses its token embeddings")
        elif options.process_output:
            seen = _see_output(load, text, last, norm).importances()
        perplexity = None
        if options.perplexity:
            perplexity = _measure(load, text, last, norm, report)
    return Collected(contents(seen), perplexity, tuple(notes))


def _run_layers(sweep: Sweep, states: _HiddenStates, journal: Journal, n_layers: int) -> Iterator[int]:
    """Compute the layers that are not done, and yield each once it is on disk."""
    for layer in range(journal.done + 1, n_layers):
        before, middle, after = states.around(layer)
        try:
            found = run_layer(sweep, layer, before, middle, after)
        except BadImportance as error:
            raise BadImportance(f"{error}; the {layer} layers before stay in {journal.folder}") from error
        states.keep(layer)
        journal.finish_layer(layer, found)
        yield layer


def _see_output(load: Loader, text: Text, states: States, norm: torch.Tensor) -> Accumulator:
    """Return what the output matrix multiplies."""
    found = Accumulator()
    eps = load.model.config.rms_norm_eps
    for start in range(0, states.n_rows, text.chunk_size):
        hidden = states.read(start, start + text.chunk_size).to(load.device)
        found.add(OUTPUT, rms_norm(hidden, norm, eps).to(load.dtype))
    found.refuse_nonfinite()
    return found


def _measure(load: Loader, text: Text, states: States, norm: torch.Tensor, report: Reporter) -> Perplexity:
    found = measure(load, text, states, norm, report.perplexity)
    if found.count and not np.isfinite(found.total):
        raise BadImportance("output.weight: the logits have NaN or infinity")
    return found


class _HiddenStates:
    """Where hidden states are kept between layers.

    latest  those after the last layer that is done

    In memory there are two sets that change places, and each layer's result is copied to the journal's file;
    above the budget the journal's files are worked on themselves.
    """

    def __init__(
        self, load: Loader, text: Text, journal: Journal, memory_bytes: int, opened: ExitStack
    ) -> None:
        self._journal = journal
        self._size = text.inputs.size, load.model.config.hidden_size
        self._in_memory = 2 * 4 * self._size[0] * self._size[1] <= memory_bytes
        if journal.done < EMBEDDING:
            with closing(self._file(EMBEDDING)) as file:
                embed(load, text, file)
                file.sync()
            journal.finish_layer(EMBEDDING, Accumulator())
        self.latest: States
        if self._in_memory:
            self.latest, self._other = MemoryStates(*self._size), MemoryStates(*self._size)
            with closing(self._file(journal.done)) as file:
                copy(file, self.latest)
        else:
            self._files = [opened.enter_context(closing(self._file(layer))) for layer in (0, 1)]
            self._middle = opened.enter_context(closing(FileStates(journal.middle_path, *self._size)))
            self.latest = self._files[journal.done % 2]

    def around(self, layer: int) -> tuple[States, States, States]:
        """Return where a layer finds its input, keeps what experts multiply, and puts its output."""
        if self._in_memory:
            return self.latest, self.latest, self._other
        return self.latest, self._middle, self._files[layer % 2]

    def keep(self, layer: int) -> None:
        """Take the layer's output for the latest, and see it safely on disk."""
        if self._in_memory:
            assert isinstance(self.latest, MemoryStates)
            self.latest, self._other = self._other, self.latest
            with closing(self._file(layer)) as file:
                copy(self.latest, file)
                file.sync()
        else:
            self._files[layer % 2].sync()
            self.latest = self._files[layer % 2]

    def _file(self, layer: int) -> FileStates:
        return FileStates(self._journal.hidden_path(layer), *self._size)


def embed(load: Loader, text: Text, states: States) -> None:
    """Write the embeddings of all tokens to `states`, reading the rows that a chunk needs."""
    for chunk, tokens in enumerate(text.inputs):
        unique, places = np.unique(tokens, return_inverse=True)
        rows = load.picked_rows("token_embd.weight", unique.tolist()).cpu()
        if not bool(torch.isfinite(rows).all()):
            raise BadImportance("token_embd.weight: has NaN or infinity")
        states.write(chunk * text.chunk_size, rows[torch.from_numpy(places)])
