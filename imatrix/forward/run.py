"""A forward pass over a whole text: embeddings, then layer after layer.

    tokens -> embeddings -> layer 0 (all chunks) -> layer 1 (all chunks) -> ... -> last hidden states

Every layer's weights are read once, for all chunks. Between layers a hidden state per token is kept, in
memory or, above the budget, in a file. Finished layers stay in a work folder, where an interrupted pass
resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from gguf_tools.errors import BadActivation
from gguf_tools.files.early_checks import refuse_small_disk
from imatrix.forward.cluster import open_layer_cluster
from imatrix.forward.device import to_cpu, to_torch
from imatrix.forward.hidden_states import FileStates, MemoryStates, States, copy
from imatrix.forward.layers.load import Loader, SharedWeights
from imatrix.forward.logits import Head
from imatrix.forward.mtp import draft_head
from imatrix.forward.network import EMBEDDINGS, End, Network
from imatrix.forward.observe import Arrays, Observer
from imatrix.forward.open import ModelSource
from imatrix.forward.options import ForwardOptions
from imatrix.forward.sweep import Execution, LayerBuffers, Sweep, run_layer
from imatrix.forward.work_folder import EMBEDDING, WorkFolder
from imatrix.forward.workers import threads_for
from imatrix.texts.chunks import Chunks


class LayerStates:
    """Where hidden states are kept: two sets that change places with each layer, and what experts multiply.

    In memory, each layer's output is copied to the work folder's files. Else, layers work on those files
    themselves, of which there are three.

    size   (n_tokens, n_strands * hidden_size + n_handed)
    dtype  of what experts multiply, (n_tokens, hidden_size)
    inner  hidden_size
    latent  columns of the sums of latent experts; 0: there are none
    mtp    number of the MTP layer, after which its input is wanted, too; None: there is none
    """

    def __init__(
        self,
        folder: WorkFolder,
        size: tuple[int, int],
        dtype: torch.dtype,
        *,
        in_memory: bool,
        opened: ExitStack,
        inner: int,
        latent: int,
        mtp: int | None = None,
    ) -> None:
        self.in_memory, self._mtp = in_memory, mtp
        self._folder, self._size, self._dtype, self._opened = folder, size, dtype, opened
        self._files: dict[Path, FileStates] = {}
        self._sets = (MemoryStates(*size), MemoryStates(*size)) if in_memory else None
        self._inner, self._latent_cols = inner, latent
        self._open_scratch()

    def begin(self, fill: Callable[[States], Arrays]) -> None:
        """Have `fill` write what the first layer begins with, unless an earlier run has.

        fill  returns what is to be kept beside it in the work folder
        """
        if self._folder.done < EMBEDDING:
            first = self.stored(EMBEDDING)
            self._folder.finish_layer(EMBEDDING, fill(first), [first.path])
        if self.in_memory:
            for layer in self._wanted_after(self._folder.done):
                copy(self.stored(layer), self.after(layer))

    def _wanted_after(self, layer: int) -> tuple[int, ...]:
        """Return the layers whose output is wanted once `layer` is done."""
        return (layer, layer - 1) if layer == self._mtp else (layer,)

    def stored(self, layer: int) -> FileStates:
        """Return the file of a layer's output."""
        path = self._folder.hidden_path(layer)
        if path not in self._files:
            self._files[path] = self._opened.enter_context(closing(FileStates(path, *self._size)))
        return self._files[path]

    def after(self, layer: int) -> States:
        """The rows of a layer's output, float32."""
        return self.stored(layer) if self._sets is None else self._sets[layer % 2]

    def around(self, layer: int) -> LayerBuffers:
        """The rows that a layer reads and writes."""
        return LayerBuffers(self.after(layer - 1), self._middle, self.after(layer), self._latent)

    def finish(self, layer: int, arrays: Arrays) -> None:
        """Bring the layer's output to its file, and record that the layer is done.

        arrays  what is to be kept beside it in the work folder
        """
        if self.in_memory:
            copy(self.after(layer), self.stored(layer))
        paths = [self.stored(each).path for each in self._wanted_after(layer)]
        self._folder.finish_layer(layer, arrays, paths)

    def let_go(self) -> None:
        """Free what is in memory; from now on layers' outputs are those in their files."""
        self.in_memory, self._sets = False, None
        self._open_scratch()

    def _open_scratch(self) -> None:
        """Make room for what stands between the sweeps of a layer."""
        path = self._folder.middle_path
        self._middle = self._scratch(path, self._inner, self._dtype)
        self._latent: States | None = None
        if self._latent_cols:
            self._latent = self._scratch(path.with_name("middle.latent"), self._latent_cols, torch.float32)

    def _scratch(self, path: Path, n_cols: int, dtype: torch.dtype) -> States:
        size = self._size[0], n_cols
        if self.in_memory:
            return MemoryStates(*size, dtype)
        return self._opened.enter_context(closing(FileStates(path, *size, dtype)))


@dataclass(frozen=True)
class ForwardPass:
    """A model, and the chunks of a text on their way through it.

    load       reads its weights
    folder     of the layers that are done
    """

    source: ModelSource
    load: Loader
    folder: WorkFolder
    sweep: Sweep
    execution: Execution
    states: LayerStates

    @property
    def chunks(self) -> Chunks:
        return self.sweep.chunks

    @property
    def n_workers(self) -> int:
        return self.execution.n_workers

    def compute(self, layer: int, observer: Observer) -> None:
        """Compute one layer, and show the observer what its matrices multiply; see `run_layer`."""
        run_layer(self.sweep, self.execution, layer, self.states.around(layer), observer)

    def layers(self, observe: Callable[[], Observer]) -> Iterator[int]:
        """Compute the layers that are not done, and yield each once it is recorded.

        observe  returns an observer for a layer; what it keeps goes to the work folder
        raises   BadActivation naming layer and tensor for NaN or infinity; finished layers stay

        With hidden states in memory, a layer is written while the next one is computed.
        """

        def save(layer: int, observer: Observer) -> int:
            self.states.finish(layer, observer.arrays())
            return layer

        with ThreadPoolExecutor(1) as writer:
            saving: Future[int] | None = None
            for layer in range(self.folder.done + 1, self.source.network.n_all_layers):
                observer = observe()
                try:
                    self.compute(layer, observer)
                except BadActivation as error:
                    kept = f"the {layer} layers before stay in {self.folder.folder}"
                    raise BadActivation(f"{error}; {kept}") from error
                if saving is not None:
                    yield saving.result()
                saving = writer.submit(save, layer, observer)
                if not self.states.in_memory:
                    # The next layer writes to the file that a rerun begins with until this one is done.
                    saving.result()
            if saving is not None:
                yield saving.result()

    def last(self) -> States:
        """Return the hidden states after the last layer."""
        return self.states.after(self.source.network.n_layers - 1)

    def drafted(self) -> States:
        """Return the hidden states after the MTP layer; those of `last` are there, too."""
        return self.states.after(self.source.network.n_layers)

    def draft_head(self) -> Head:
        """Load what makes the MTP layer's logits."""
        return draft_head(self.source.network, self.load, self.drafted())

    def output_norm(self) -> End:
        """Load the part between the last hidden states and the output matrix: in most models a norm."""
        return self.source.network.load_end(self.load)


def refuse_full_disk(
    folders: Sequence[Path], sources: Sequence[ModelSource], chunks: Chunks, options: ForwardOptions
) -> None:
    """Raise OutputError unless the disk has room for the passes of some models.

    folders  of the models, one each
    """
    n_bytes = sum(state_bytes(source.network, chunks, options)[1] for source in sources)
    refuse_small_disk(folders, n_bytes, "hidden states", "use fewer chunks, or another disk")


def state_bytes(network: Network, chunks: Chunks, options: ForwardOptions) -> tuple[int, int]:
    """Count the bytes of a pass' hidden states in memory, and in the work folder."""
    itemsize = getattr(torch, options.dtype).itemsize
    in_memory = chunks.n_tokens * _row_bytes(network, itemsize)
    stored = chunks.n_tokens * 3 * 4 * network.state_size
    if in_memory <= options.memory_bytes:
        return in_memory, stored
    return 0, stored + chunks.n_tokens * network.scratch_bytes(itemsize)


def _row_bytes(network: Network, itemsize: int) -> int:
    """The memory that a token's states take: two sets of them, and scratch."""
    return 8 * network.state_size + network.scratch_bytes(itemsize)


@contextmanager
def forward_pass(
    source: ModelSource,
    chunks: Chunks,
    options: ForwardOptions,
    folder: WorkFolder,
    advance: Callable[[float], None],
    n_workers: int | None = None,
    shared: SharedWeights | None = None,
) -> Iterator[ForwardPass]:
    """Give a pass of `chunks` through `source`, which resumes what the work folder has.

    advance    called with the share of a layer, 0 to 1, that has been computed since the last call
    n_workers  threads that take chunks, where several passes share what `threads_for` gives; None: the pass
               is alone, and takes all
    shared     of the models that are computed in step with this one
    raises     BadActivation for NaN or infinity in the embeddings; ClusterError, see
               `open_layer_cluster`
    """
    load, network = replace(source.loader_for(options), shared=shared), source.network
    with ExitStack() as opened:
        if n_workers is None:
            n_workers = opened.enter_context(threads_for(chunks.n_chunks, load.device))
        row_bytes = _row_bytes(network, load.dtype.itemsize)
        in_memory = chunks.n_tokens * row_bytes <= options.memory_bytes
        size = chunks.n_tokens, network.state_size
        states = LayerStates(
            folder,
            size,
            load.dtype,
            in_memory=in_memory,
            opened=opened,
            inner=network.hidden_size,
            latent=network.latent_cols,
            mtp=network.n_layers if network.n_mtp else None,
        )
        states.begin(lambda first: embed(load, chunks, first, network))
        rotate = network.rope.rotation(chunks.longest, load.device)
        sweep = Sweep(
            build=lambda number: network.build(load, number, rotate),
            device=load.device,
            dtype=load.dtype,
            chunks=chunks,
            all_experts=options.all_experts,
        )
        cluster = opened.enter_context(open_layer_cluster(source, chunks, options, folder))
        execution = Execution(n_workers, advance, cluster)
        yield ForwardPass(source, load, folder, sweep, execution, states)


def embed(load: Loader, chunks: Chunks, states: States, network: Network) -> Arrays:
    """Write the embeddings of all tokens to `states`; each chunk reads its own tokens' rows.

    Several strands of hidden states begin alike, and what is handed on behind them begins with zeros, or with
    the token's id. Returns what there is to keep beside them: nothing.
    """
    for chunk in range(chunks.n_chunks):
        start, stop = chunks.rows(chunk)
        unique, places = np.unique(chunks.inputs[start:stop], return_inverse=True)
        rows = to_cpu(load.picked_rows(EMBEDDINGS, unique.tolist()))
        if not bool(torch.isfinite(rows).all()):
            raise BadActivation(f"{EMBEDDINGS}: has NaN or infinity")
        rows = rows * network.embedding_scale
        rows = pad(rows.repeat(1, network.n_strands), (0, network.n_handed))
        if network.hands_tokens:
            rows[:, -network.n_handed] = to_torch(unique).float()
        states.write(start, rows[to_torch(places)])
    return {}
