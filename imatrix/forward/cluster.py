"""Layers computed by the workers of a scheduler: results equal those of one machine bit for bit.

What is dealt out are the tasks that threads take otherwise: chunks in the first sweep of a layer, pieces of
the experts' tokens in the second. Each is computed as a thread computes it, alone, and results are added up
in the same order, so sums and hidden states are equal to the last bit. Shares of the text would not do that,
as an expert's tokens would be cut into other pieces, whose products round differently. And every expert is
read by one worker only, whatever the length of the text.

States pass through files in the work folder, new ones for every layer. Workers write only there, and what
they write depends on the item alone. So an item may be done twice, and a worker that outlives its run writes
to files that nobody reads. With each item comes a digest of what was written, which is compared with what the
parent reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import Any

import torch
import xxhash

from convert.checkpoint.adapted_folder import AdaptedFolder
from gguf_tools.cluster.connect import Cluster, open_cluster
from gguf_tools.cluster.job import PostedJob
from gguf_tools.cluster.scheduler import Farm, ItemFailed
from gguf_tools.errors import BadActivation, ClusterError, ExecutionError
from imatrix.forward.device import device_name, to_bytes
from imatrix.forward.hidden_states import FileStates, States, copy
from imatrix.forward.layer import Layer
from imatrix.forward.layers.experts import Experts
from imatrix.forward.layers.ffn import FeedForward
from imatrix.forward.observe import Observer
from imatrix.forward.open import ModelSource, open_model
from imatrix.forward.options import ForwardOptions
from imatrix.forward.sweep import (
    LayerBuffers,
    Piece,
    Routes,
    Sweep,
    TakeOutput,
    TakeRoutes,
    pieces_of,
    take_chunk,
    take_piece,
)
from imatrix.forward.work_folder import WorkFolder
from imatrix.forward.workers import torch_threads
from imatrix.texts.chunks import Chunks


@dataclass(frozen=True)
class LayerFiles:
    """Files of the states of one layer.

    before  its input, float32
    middle  what experts multiply
    first   the sum without the routed experts, float32
    outer   what experts make of the tokens of each piece, one piece after the other
    """

    before: Path
    middle: Path
    first: Path
    outer: Path


@dataclass(frozen=True)
class ChunkItem:
    """A chunk to be taken through a layer, all but its routed experts.

    number    which chunk it is
    observer  has seen nothing; comes back with what it has seen
    """

    number: int
    layer: int
    files: LayerFiles
    observer: Observer


@dataclass(frozen=True)
class PieceItem:
    """Some tokens to be taken through an expert of a layer; from row `at` of `outer` on are their results."""

    number: int
    layer: int
    piece: Piece
    at: int
    files: LayerFiles
    observer: Observer


Digests = Mapping[Path, int]
"""Digests of the rows that an item has written to files."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of what stands in files.

    states  hidden states, (n_tokens, n_strands * hidden_size)
    middle  what experts multiply, (n_tokens, hidden_size)
    """

    states: tuple[int, int]
    middle: tuple[int, int]

    @property
    def n_tokens(self) -> int:
        return self.states[0]


@dataclass(frozen=True)
class LayersJob:
    """How a process comes to compute items of a forward pass; picklable.

    sizes  of hidden states and of what experts multiply, (n_tokens, n_cols) each
    """

    model: Path | AdaptedFolder
    options: ForwardOptions
    chunks: Chunks
    sizes: Sizes

    @contextmanager
    def open(self) -> Iterator[LayersWorker]:
        with open_model(self.model, predicts=False) as source:
            yield LayersWorker(self, source)


class LayersWorker:
    """Computes items; all threads of a process share one, and the layer that it has read."""

    def __init__(self, job: LayersJob, source: ModelSource) -> None:
        self._sizes = job.sizes
        load, network = source.loader_for(job.options), source.network
        rotate = network.rope.rotation(job.chunks.longest, load.device)
        self._sweep = Sweep(
            build=lambda number: network.build(load, number, rotate),
            device=load.device,
            dtype=load.dtype,
            chunks=job.chunks,
            all_experts=job.options.all_experts,
        )
        self._layer: tuple[int, Layer] | None = None
        self._building = Lock()
        self._expert = local()

    def run(self, item: ChunkItem | PieceItem) -> tuple[Observer, Any, Digests]:
        """Compute an item; return its observer, where the tokens of a chunk go, and digests of what it wrote.

        raises  BadActivation for NaN or infinity
        """
        with torch_threads(1), torch.inference_mode():
            layer = self._layer_of(item.layer)
            if isinstance(item, ChunkItem):
                return item.observer, *self._take_chunk(item, layer)
            assert layer.experts is not None
            return item.observer, None, self._take_piece(item, layer.experts)

    def settle(self) -> None:
        """Nothing is left open: closing a file brings it to the server of a shared disk."""

    def _take_chunk(self, item: ChunkItem, layer: Layer) -> tuple[Routes | None, Digests]:
        sweep, files = self._sweep, item.files
        with (
            closing(self._open(files.before, self._sizes.states)) as before,
            closing(_Digesting(files.middle, *self._sizes.middle, sweep.dtype, create=False)) as middle,
            closing(_Digesting(files.first, *self._sizes.states, create=False)) as first,
        ):
            hidden = before.read(*sweep.chunks.rows(item.number))
            routes = take_chunk(sweep, layer, item.number, hidden, middle, first, item.observer)
            return routes, {path: digest for each in (middle, first) for path, digest in each.digests.items()}

    def _take_piece(self, item: PieceItem, experts: Experts) -> Digests:
        sweep, piece = self._sweep, item.piece
        block = self._block(item.layer, piece.expert, experts)
        with closing(self._open(item.files.middle, self._sizes.middle, sweep.dtype)) as middle:
            output = take_piece(sweep, experts, block, piece, middle, item.observer)
        if len(output):
            size = self._sizes.n_tokens, experts.n_cols
            with closing(self._open(item.files.outer, size, sweep.dtype)) as outer:
                outer.write(item.at, output)
        return {item.files.outer: _digest(output)}

    def _layer_of(self, number: int) -> Layer:
        with self._building:
            if self._layer is None or self._layer[0] != number:
                self._layer = None  # its memory is free before the next one is read
                self._layer = number, self._sweep.build(number)
            return self._layer[1]

    def _block(self, layer: int, expert: int, experts: Experts) -> FeedForward:
        """Return an expert; each thread keeps the one that it had last."""
        if getattr(self._expert, "key", None) != (layer, expert):
            self._expert.block = None
            self._expert.block = experts.read(expert)
            self._expert.key = layer, expert
        block: FeedForward = self._expert.block
        return block

    def _open(self, path: Path, size: tuple[int, int], dtype: torch.dtype = torch.float32) -> FileStates:
        return FileStates(path, *size, dtype, create=False)


class ClusterLayers:
    """Has layers computed by the workers of a cluster; see `imatrix.forward.sweep.LayerCluster`.

    folder  for files that all workers see
    """

    def __init__(self, cluster: Cluster, job: PostedJob, folder: Path, sizes: Sizes) -> None:
        self._cluster, self._job, self._folder, self._sizes = cluster, job, folder, sizes
        self._name = os.urandom(4).hex()

    @contextmanager
    def dealer(self, sweep: Sweep, number: int, states: LayerBuffers) -> Iterator[_ClusterDealer]:
        files = self._files(number, states.before)
        made = [files.middle, files.first, files.outer]
        try:
            if isinstance(states.before, FileStates):
                states.before.sync()
            else:
                made.append(files.before)
                with closing(FileStates(files.before, *self._sizes.states)) as stored:
                    copy(states.before, stored)
            yield _ClusterDealer(self._cluster, self._job, self._sizes, sweep, number, states.after, files)
        finally:
            for path in made:
                path.unlink(missing_ok=True)

    def _files(self, number: int, before: States) -> LayerFiles:
        def path(what: str) -> Path:
            return self._folder / f"layer.{number:05d}.{self._name}.{what}"

        given = before.path if isinstance(before, FileStates) else path("before")
        return LayerFiles(given, path("middle"), path("first"), path("outer"))


@dataclass(frozen=True)
class _ClusterDealer:
    """A Dealer for the workers of a cluster.

    number  the layer's
    after   its output
    """

    cluster: Cluster
    job: PostedJob
    sizes: Sizes
    sweep: Sweep
    number: int
    after: States
    files: LayerFiles

    def chunks(self, layer: Layer, observer: Observer, take: TakeRoutes) -> None:
        sweep, files = self.sweep, self.files
        written = {
            files.first: partial(FileStates, files.first, *self.sizes.states),
            files.middle: partial(FileStates, files.middle, *self.sizes.middle, sweep.dtype),
        }
        for opened in written.values():
            opened().close()
        numbers = range(sweep.chunks.n_chunks)
        items = [ChunkItem(number, self.number, files, observer.fresh()) for number in numbers]

        def take_chunk(item: ChunkItem, routes: Routes | None, digests: Digests) -> None:
            for path, opened in written.items():
                if path in digests:
                    with closing(opened(create=False)) as stored:
                        rows = stored.read(*sweep.chunks.rows(item.number))
                    self._refuse_lost(path, digests, rows)
            take(routes)

        self._compute(items, observer, take_chunk)
        with closing(FileStates(files.first, *self.sizes.states, create=False)) as first:
            copy(first, self.after)

    def pieces(self, experts: Experts, routes: Routes, observer: Observer, take: TakeOutput) -> None:
        sweep, files = self.sweep, self.files
        items: list[PieceItem] = []
        n_rows, n_cols = 0, experts.n_cols
        for expert in range(experts.n_experts):
            for piece in pieces_of(sweep, experts.router.routing, expert, routes):
                items.append(PieceItem(len(items), self.number, piece, n_rows, files, observer.fresh()))
                n_rows += len(piece.weighted)
        size = n_rows, n_cols
        FileStates(files.outer, *size, sweep.dtype).close()

        def take_piece(item: PieceItem, nothing: None, digests: Digests) -> None:
            output, n_weighted = torch.empty(0, n_cols), len(item.piece.weighted)
            if n_weighted:
                with closing(FileStates(files.outer, *size, sweep.dtype, create=False)) as outer:
                    output = outer.read(item.at, item.at + n_weighted)
                self._refuse_lost(files.outer, digests, output)
            take(item.piece, output)

        self._compute(items, observer, take_piece)

    def _refuse_lost(self, path: Path, digests: Digests, rows: torch.Tensor) -> None:
        """Raise ClusterError unless this process has read from a file what a worker says that it wrote."""
        if _digest(rows) != digests[path]:
            raise ClusterError(
                f"{self.cluster.address}: a worker says that it wrote rows to {path}, but they are not in the"
                " file here; do all workers see the same files?"
            )

    def _compute(
        self, items: Sequence[Any], observer: Observer, take: Callable[[Any, Any, Digests], None]
    ) -> None:
        """Have items computed, and take their results in the order of the items.

        raises  BadActivation for NaN or infinity, ClusterError, ExecutionError
        """
        waiting: dict[int, tuple[Observer, Any, Digests]] = {}
        n_taken = 0

        def done(item: ChunkItem | PieceItem, result: tuple[Observer, Any, Digests]) -> None:
            nonlocal n_taken
            waiting[item.number] = result
            while n_taken in waiting:
                seen, routes, digests = waiting.pop(n_taken)
                observer.merge(seen)
                take(items[n_taken], routes, digests)
                n_taken += 1

        try:
            Farm(self.cluster, self.job, done).run(items)
        except ItemFailed as failed:
            if failed.error == BadActivation.__name__:
                raise BadActivation(failed.text) from None
            raise ExecutionError(f"blk.{failed.item.layer}: {failed.text}", failed.item) from None


class _Digesting(FileStates):
    """Rows in a file, and a digest of those that are written: one call's."""

    def __init__(self, *arguments: Any, **choices: Any) -> None:
        super().__init__(*arguments, **choices)
        self.digests: dict[Path, int] = {}

    def write(self, start: int, rows: torch.Tensor) -> None:
        super().write(start, rows)
        self.digests[self.path] = _digest(rows)


def _digest(rows: torch.Tensor) -> int:
    """Return a digest of the bytes of rows, by which the parent sees whether they have come through."""
    return xxhash.xxh3_64_intdigest(to_bytes(rows))


@contextmanager
def open_layer_cluster(
    source: ModelSource, chunks: Chunks, options: ForwardOptions, folder: WorkFolder
) -> Iterator[ClusterLayers | None]:
    """Give what computes layers on the workers of `options.scheduler`; None where there is no scheduler.

    raises  ClusterError for workers that don't see the work folder, or run other code
    """
    if options.scheduler is None:
        yield None
        return
    network, n_tokens = source.network, chunks.n_tokens
    sizes = Sizes((n_tokens, network.state_size), (n_tokens, network.hidden_size))
    plain = replace(options, scheduler=None, device=device_name(options.device))
    job = LayersJob(source.place, plain, chunks, sizes)
    with open_cluster(options.scheduler) as cluster, cluster.offer(job, folder.folder / "layers") as place:
        yield ClusterLayers(cluster, place, folder.folder.absolute(), sizes)
