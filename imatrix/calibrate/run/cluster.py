"""Strips encoded by the workers of a scheduler: the bytes are those of threads.

A batch of strips goes to a worker as a few kilobytes. What is large and shared by several strips (a factor,
the step towards W t, held-out rows) or large by itself (the gradients at a block's outputs) lies in files of
the work folder, which workers read. A file is written when a value is first sent, and removed when nothing
refers to the value any more. The rows come from the model's own files, and the bytes go back to the command,
which compares and writes them.

Workers write no file. So a batch may be done twice, and a worker that outlives its run does no harm.
"""

from __future__ import annotations

import os
import pickle
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock, local
from typing import Any, Self

import numpy as np
import torch

from gguf_tools.cluster.connect import Cluster, open_cluster
from gguf_tools.cluster.job import PostedJob
from gguf_tools.cluster.scheduler import Farm, ItemFailed, Pace
from gguf_tools.errors import ExecutionError, OutputError
from gguf_tools.files.owned_folder import remove_files
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.settings import ONE_BLAS_THREAD
from imatrix.calibrate.run.experts import experts_at_once
from imatrix.calibrate.run.strips import EncodedStrip, Strip, encode_strips
from imatrix.calibrate.shapes import is_expert
from imatrix.calibrate.statistics.gradient_factors import OutputBlock
from imatrix.calibrate.statistics.gradients import row_pieces
from imatrix.calibrate.statistics.inputs import Held
from imatrix.forward.device import fast_products
from imatrix.forward.workers import torch_threads
from quantize.fill.encode import RowSources
from quantize.fill.sources import OpenSources
from quantize.importances.entries import ResolvedImportance
from quantize.rounding.factor import Factor
from quantize.rounding.methods import Method, find_method

_PREFIX = "strips"
"""How the names of files begin; the work folder knows them as ours."""

_VALUES = re.compile(rf"{_PREFIX}\.[0-9a-f]{{8}}\.\d+")

_LEAST_BYTES = 1 << 16
"""Arrays of so many bytes have files of their own."""

_PATIENCE_FACTOR = 10
"""How many times longer than estimated a batch may take, before another worker does it, too."""


@dataclass(frozen=True)
class StripsItem:
    """Strips that go with each other.

    number  which batch it is
    first   a strip of it, for messages
    strips  pickled; large values are paths of files
    """

    number: int
    first: str
    strips: bytes

    def __str__(self) -> str:
        return self.first


@dataclass(frozen=True)
class EncodedBatch:
    """The strips of an item, encoded, and the seconds that they took the worker's thread."""

    strips: list[EncodedStrip]
    seconds: float


@dataclass(frozen=True)
class StripsJob:
    """How a process comes to encode strips; picklable.

    method       name of the method
    sources      opens the tensors that rows come from
    importances  of the tensors that have some before the calibration
    device       type of the device that computes the model: products on the CPU depend on it, too
    """

    method: str
    sources: OpenSources
    importances: Mapping[str, ResolvedImportance]
    device: str

    @classmethod
    def of(cls, method: Method, sources: RowSources, device: str) -> Self:
        return cls(method.name, OpenSources(sources.tensors, sources.spec), sources.importances, device)

    @contextmanager
    def open(self) -> Iterator[StripsWorker]:
        with self.sources.open() as tensors, fast_products(self.device), ONE_BLAS_THREAD:
            yield StripsWorker(find_method(self.method), RowSources(tensors, self.importances))


class StripsWorker:
    """Encodes strips; all threads of a process share one, and what they read."""

    def __init__(self, method: Method, sources: RowSources) -> None:
        self._method, self._sources = method, sources
        self._read: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()
        self._reading = Lock()
        self._last = local()

    def run(self, item: StripsItem) -> EncodedBatch:
        """Encode strips; see `encode_strips`. Each thread keeps what it has read for its next item."""
        started = time.thread_time()
        with torch_threads(1), torch.inference_mode():
            self._last.strips = _Unpacker(BytesIO(item.strips), self._value).load()
            encoded = encode_strips(self._method, self._sources, self._last.strips)
        return EncodedBatch(encoded, time.thread_time() - started)

    def settle(self) -> None:
        """Nothing is written."""

    def _value(self, path: Path) -> Any:
        with self._reading:
            value = self._read.get(path)
            if value is None:
                self._read[path] = value = _load(path)
            return value


class ClusterStrips:
    """Encodes strips on the workers of a cluster; see `imatrix.calibrate.run.strips.StripExecutor`.

    method    that encodes them
    computed  called with the seconds that each batch took a worker
    """

    def __init__(
        self,
        cluster: Cluster,
        job: PostedJob,
        method: Method,
        values: _Values,
        computed: Callable[[float], object],
    ) -> None:
        self._cluster, self._job, self._method = cluster, job, method
        self._values, self._computed = values, computed

    @property
    def n_at_once(self) -> int:
        return max(1, sum(self._cluster.workers().values()))

    def each(self, batches: Iterable[Sequence[Strip]]) -> Iterator[list[EncodedStrip]]:
        """Yield the strips of every batch, encoded, in their order, once all are.

        raises  ExecutionError for the first batch that fails, ClusterError if the workers can't do any or the
                scheduler is gone, OutputError for a full disk
        """
        pack, items, longest = self._values.pack, [], 0.0
        for number, batch in enumerate(batches):
            items.append(StripsItem(number, str(batch[0]), pack(batch)))
            longest = max(longest, self._seconds(batch))
        pace = Pace(patience=max(Pace.patience, _PATIENCE_FACTOR * longest))
        encoded: dict[int, list[EncodedStrip]] = {}

        def done(item: StripsItem, result: EncodedBatch) -> None:
            encoded[item.number] = result.strips
            self._computed(result.seconds)

        try:
            Farm(self._cluster, self._job, done, pace).run(items)
        except ItemFailed as failed:
            text = failed.text if failed.error else f"{failed.item}: {failed.text}"
            raise ExecutionError(text, failed.item) from None
        for number in range(len(items)):
            yield encoded.pop(number)

    def _seconds(self, strips: Sequence[Strip]) -> float:
        """Estimate how long the method takes for a batch."""
        info, n_weights = strips[0].info, sum(strip.n_weights for strip in strips)
        if not self._method.can_encode(info.type):
            return 0.0
        return self._method.rates(info.type).seconds(info) * n_weights / info.n_elems


def values_bytes(made: Iterable[TensorInfo], n_threads: int) -> int:
    """Count the bytes of files for workers at a time: factors, steps towards W t, covariances of blocks."""

    def of(info: TensorInfo) -> int:
        n_mats = experts_at_once(info.n_cols, n_threads) if is_expert(info) else info.n_mats
        blocks = sum((stop - start) ** 2 for start, stop in row_pieces(info.n_rows // info.n_mats))
        return 12 * n_mats * (info.n_cols**2 + blocks)

    return max(map(of, made), default=0)


class _Values:
    """Large values in files, each for as long as something in this process refers to the value."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._run = folder, os.urandom(4).hex()
        self._paths: dict[int, Path] = {}
        self._n_stored = 0

    def pack(self, strips: Sequence[Strip]) -> bytes:
        """Pickle strips with the paths of their large values."""
        buffer = BytesIO()
        _Packer(buffer, self._path_of).dump(list(strips))
        return buffer.getvalue()

    def close(self) -> None:
        """Remove the files that are left."""
        for path in list(self._paths.values()):
            path.unlink(missing_ok=True)

    def _path_of(self, value: Any) -> Path:
        path = self._paths.get(id(value))
        if path is None:
            path = (self._folder / f"{_PREFIX}.{self._run}.{self._n_stored}").absolute()
            self._n_stored += 1
            _store(path, value)
            self._paths[id(value)] = path
            weakref.finalize(value, self._forget, id(value))
        return path

    def _forget(self, number: int) -> None:
        self._paths.pop(number).unlink(missing_ok=True)


class _Packer(pickle.Pickler):
    """Pickles large values as paths."""

    def __init__(self, buffer: BytesIO, path_of: Callable[[Any], Path]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._path_of = path_of

    def persistent_id(self, value: Any) -> Path | None:
        is_large = isinstance(value, np.ndarray) and value.nbytes >= _LEAST_BYTES
        return self._path_of(value) if is_large or isinstance(value, Factor | Held | OutputBlock) else None


class _Unpacker(pickle.Unpickler):
    """Reads paths as the values in their files."""

    def __init__(self, buffer: BytesIO, value: Callable[[Path], Any]) -> None:
        super().__init__(buffer)
        self._value = value

    def persistent_load(self, path: Path) -> Any:
        return self._value(path)


def _store(path: Path, value: Any) -> None:
    with OutputError.from_os(f"{path}: can't be written"), path.open("wb") as file:
        pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)


def _load(path: Path) -> Any:
    with OutputError.from_os(f"{path}: can't be read"), path.open("rb") as file:
        return pickle.load(file)


@contextmanager
def open_cluster_strips(
    address: str, job: StripsJob, folder: Path, computed: Callable[[float], object]
) -> Iterator[ClusterStrips]:
    """Connect to the scheduler at an address and give what has strips encoded by its workers.

    folder    the work folder
    computed  see `ClusterStrips`
    raises    ClusterError for workers that don't see the folder, or run other code; see `open_cluster`
    """
    remove_files(folder, _VALUES)  # of a run that was killed
    with (
        open_cluster(address) as cluster,
        cluster.offer(job, folder / _PREFIX) as place,
        closing(_Values(folder)) as values,
    ):
        yield ClusterStrips(cluster, place, find_method(job.method), values, computed)
