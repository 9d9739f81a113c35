"""Moves the codes of a file layer by layer, to where its hidden states are closer to its base's.

Base and file go through the text side by side. A layer of the file begins with the file's own hidden states,
and aims at the base's after it, so it also makes up for what the layers before it have changed. An error
counts relative to the size of a token's hidden state, as norms divide by that: in trained models a few tokens
have states a thousand times as large as the others'. On other texts that did as well as weighing errors by
the covariance of gradients.

How far codes should move differs from file to file: those of a calibrated one make up for each other, so a
few that change sides by chance do harm, and those of a stock one are far from where they should be. So the
first layer is moved at several rates, and the best one serves them all.

A layer's new codes are kept if its error on the chunks held back is smaller with them. They are in the work
folder with the layer and the rate, and an interrupted run goes on after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Self

import numpy as np
import torch

from imatrix.calibrate.refine.cells import has_cells
from imatrix.calibrate.refine.codes import MovingCodes, RecodedTensor
from imatrix.calibrate.refine.gradients import Batch, Student, by_weights
from imatrix.calibrate.refine.options import RefineOptions
from imatrix.calibrate.statistics.inputs import HoldoutSplit
from imatrix.forward.device import to_numpy
from imatrix.forward.gradients.backward import BACKWARD_WORK
from imatrix.forward.gradients.differentiate import BackwardStates, differentiate_layer
from imatrix.forward.hidden_states import States
from imatrix.forward.observe import Arrays, Silent
from imatrix.forward.run import ForwardPass
from imatrix.forward.sweep import Execution
from imatrix.forward.work_folder import WorkFolder
from imatrix.forward.workers import give_back, threads_for
from quantize.fill.sources import SourceTensor
from quantize.formats.base import Bytes
from quantize.roles import layer_of

_BYTES = 24
"""Memory that a weight takes while its code moves: place, mean of squares, derivative, and copies."""

N_TRIALS = 3
"""Rates that are tried at least."""

_FACTOR = 3
"""Between a rate and the next one that is tried."""

_RATE = "rate"
"""Name of the rate among a layer's arrays."""

STEP_WORK = 1 + BACKWARD_WORK
"""Work of a step over that of a forward pass of its chunks."""


class WeightGradients(Silent):
    """An ObservesGradients that sums up the derivatives by the weights of some tensors.

    sums  float32 (n_matrices, n_rows, n_cols), by name
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.sums: dict[str, torch.Tensor] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        """Ignore which tokens they are: all count alike."""

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """See `ObservesGradients`."""
        if name in self._names:
            product = by_weights(x, gradient)
            sums = self._of(name, n_blocks, product.shape)
            sums[first : first + len(product)] += product

    def fresh(self) -> Self:
        return type(self)(self._names)

    def merge(self, other: Self) -> None:
        for name, theirs in other.sums.items():
            self._of(name, len(theirs), theirs.shape).add_(theirs)

    def arrays(self) -> Arrays:
        return {}

    def _of(self, name: str, n_blocks: int, shape: Sequence[int]) -> torch.Tensor:
        if name not in self.sums:
            self.sums[name] = torch.zeros((n_blocks, *shape[1:]))
        return self.sums[name]


@dataclass
class KeptCodes:
    """The codes that were found, in the work folder; one layer's are in memory at a time, for all threads."""

    folder: WorkFolder
    _layer: int = -1
    _arrays: Arrays = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def tensors(self, source: Mapping[str, SourceTensor], n_layers: int) -> dict[str, RecodedTensor]:
        """Return the tensors of a file that have other codes, by name."""
        found = {}
        for layer in range(n_layers):
            for name in self._of(layer).keys() & source.keys():
                found[name] = RecodedTensor(source[name], self._reader(layer, name))
        return found

    def _reader(self, layer: int, name: str) -> Callable[[], Bytes]:
        return lambda: self._of(layer)[name]

    def _of(self, layer: int) -> Arrays:
        with self._lock:
            if layer != self._layer:
                self._layer, self._arrays = layer, self.folder.arrays(layer)
            return self._arrays


@dataclass(frozen=True)
class _Moved:
    """Result of a rate for a layer.

    error  mean squared relative error on the chunks held back
    rows   uint8 (n_rows, row bytes), by tensor
    """

    rate: float
    error: float
    rows: dict[str, Bytes]


class LayerByLayer:
    """Codes on their way, one layer after the other.

    left_out  tensors whose codes stay, as there is no memory to move them
    """

    def __init__(
        self,
        original: ForwardPass,
        student: ForwardPass,
        tensors: dict[str, SourceTensor],
        base: Mapping[str, SourceTensor],
        steps: Sequence[Sequence[int]],
        options: RefineOptions,
        split: HoldoutSplit,
        advance: Callable[[float], None],
    ) -> None:
        """Take what is moved, and how.

        original  the base's pass, of which no layer is done that comes two after the student's last one
        student   the file's pass; its tensors are those of `tensors`
        tensors   what the student's loader reads; the layer at work has its moving ones there
        base      the original's tensors
        steps     the chunks of each step of a layer
        options   its code_rate is tried first, see `MovingCodes.step`; in a layer the rate falls to zero
                  along half a cosine. Moving codes may take its memory
        """
        self.original, self.student, self.tensors, self.base = original, student, tensors, base
        self.steps, self.split, self.advance = steps, split, advance
        self.rate, self.memory = options.code_rate, options.forward.memory_bytes
        self.left_out: list[str] = []

    def layers(self) -> Iterator[int]:
        """Yield each layer once it is done and on disk."""
        n_layers, done = self.student.source.network.n_layers, self.student.folder.done
        kept = self.student.folder.arrays(done) if done >= 0 else {}
        rate = float(kept[_RATE]) if _RATE in kept else None
        for layer in range(done + 1, n_layers):
            if self.original.folder.done < layer:
                with self._threads():
                    self.original.compute(layer, Silent())
                self.original.states.finish(layer, {})
            rate, codes = self._tune(layer, rate)
            recoded = {name: partial(np.asarray, rows) for name, rows in codes.items()}
            with self._recoded(recoded), self._threads():
                self.student.compute(layer, Silent())
            self.student.states.finish(layer, codes if rate is None else {**codes, _RATE: np.array(rate)})
            give_back()
            yield layer

    def _threads(self) -> AbstractContextManager[int]:
        """Have each chunk of a pass computed by one thread; a step has one chunk, and all threads for it."""
        return threads_for(self.student.chunks.n_chunks, self.student.load.device)

    def _tune(self, layer: int, rate: float | None) -> tuple[float | None, dict[str, Bytes]]:
        """Move the codes of a layer.

        rate     that of the layers before, None if there was none to move
        returns  the rate, and the layer's rows with other codes, by tensor; none if these are of no use
        """
        names = self._fitting(layer)
        if not names:
            self.advance(STEP_WORK * sum(map(len, self.steps)) / self.split.n_chunks)
            return rate, {}
        stored = self._held_error(layer)
        moved = self._try_rates(layer, names) if rate is None else self._move(layer, names, rate)
        return moved.rate, moved.rows if moved.error < stored else {}

    def _try_rates(self, layer: int, names: Sequence[str]) -> _Moved:
        """Move a layer at larger and larger rates, or else at smaller ones, while that makes it better."""
        best, n_tried = self._move(layer, names, self.rate), 1
        for factor in (_FACTOR, 1 / _FACTOR):
            first = best
            while True:
                other = self._move(layer, names, best.rate * factor, is_counted=n_tried < N_TRIALS)
                n_tried += 1
                if other.error >= best.error:
                    break
                best = other
            if best is not first:
                break
        return best

    def _move(self, layer: int, names: Sequence[str], rate: float, *, is_counted: bool = True) -> _Moved:
        """Move the codes of some tensors of a layer, which stay as they are outside.

        is_counted  whether the bar has a share for that
        """
        moving = {name: MovingCodes(self.tensors[name], self.base[name]) for name in names}
        with self._recoded({name: each.current for name, each in moving.items()}):
            for number, wanted in enumerate(self.steps):
                now = rate * 0.5 * (1 + math.cos(math.pi * number / len(self.steps)))
                observer = WeightGradients(moving)
                self._differentiate(layer, wanted, observer)
                for name, sums in observer.sums.items():
                    moving[name].step(to_numpy(sums), now)
                if is_counted:
                    self.advance(STEP_WORK * len(wanted) / self.split.n_chunks)
            error = self._held_error(layer)
        return _Moved(rate, error, {name: each.current() for name, each in moving.items()})

    @contextmanager
    def _recoded(self, rows: Mapping[str, Callable[[], Bytes]]) -> Iterator[None]:
        """Have the student read other rows of some tensors."""
        stored = {name: self.tensors[name] for name in rows}
        self.tensors.update({name: RecodedTensor(tensor, rows[name]) for name, tensor in stored.items()})
        try:
            yield
        finally:
            self.tensors.update(stored)

    def _fitting(self, layer: int) -> list[str]:
        """Return the tensors of a layer whose codes can move, as many as fit into memory, in order."""
        names, left = [], self.memory
        for name, tensor in self.tensors.items():
            there = self.base.get(name)
            if layer_of(name) != layer or not has_cells(tensor.type):
                continue
            if there is None or there.shape != tensor.shape:
                continue
            n_bytes = _BYTES * math.prod(tensor.shape)
            if n_bytes > left:
                self.left_out.append(name)
                continue
            left -= n_bytes
            names.append(name)
        return names

    def _student(self) -> Student:
        own = self.student
        return Student(own.source.network, own.load, {}, own.chunks, own.n_workers, lambda share: None)

    def _errors(
        self, layer: int, student: Student, batch: Batch, before: States
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer from `before`, which is filled.

        returns  errors relative to the size of a token's hidden state, float32 (n_tokens, state size), and
                 these sizes, (n_tokens, 1)
        """
        network = student.network
        before.write(0, self.student.states.after(layer - 1).rows(batch.numbers))
        after = batch.states(network.state_size)
        student.compute(batch, layer, before, after)
        aim = self.original.states.after(layer).rows(batch.numbers)
        errors = after.read(0, after.n_rows) - aim
        n_real = network.hidden_size * network.n_strands
        errors[:, n_real:] = 0  # what is handed on is no hidden state
        sizes = torch.linalg.vector_norm(aim[:, :n_real], dim=1, keepdim=True)
        sizes = sizes.clamp_min(torch.finfo(torch.float32).tiny)
        return errors / sizes, sizes

    def _differentiate(self, layer: int, wanted: Sequence[int], observer: WeightGradients) -> None:
        """Show the observer the derivatives by the layer's weights of half the mean squared error."""
        student = self._student()
        batch, network = student.batch(wanted), student.network
        before, above, below = (batch.states(network.state_size) for _ in range(3))
        errors, sizes = self._errors(layer, student, batch, before)
        above.write(0, errors / sizes / len(errors))
        middle = batch.states(network.hidden_size, student.load.dtype)
        scratch = batch.states(network.hidden_size), batch.states(network.latent_cols)
        states = BackwardStates(before, above, below, middle, *scratch)
        differentiate_layer(batch.sweep, Execution(student.n_workers), layer, states, observer)

    def _held_error(self, layer: int) -> float:
        """Return the mean squared relative error on the chunks held back, each of which counts alike."""
        student, found = self._student(), []
        for chunk in self.split.held:
            batch = student.batch([chunk])
            errors, _ = self._errors(layer, student, batch, batch.states(student.network.state_size))
            found.append(float(errors.square().sum(1).mean(dtype=torch.float64)))
        return float(np.mean(found))
