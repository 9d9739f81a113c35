"""Measures how fast this machine computes a model, in a second or two: what estimates of time are made of.

One chunk goes through one layer of each kind, with weights that are made up, by the code that a run uses. The
rest is measured on small matrices: products, factors, copies, the softmax of logits, and rounding. All times
are those of one thread's work while the other cores are busy, as they are in a run; what other programs take
of a machine is another matter.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.format.ggml_types import F32, I32, GGMLType
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.settings import ONE_BLAS_THREAD
from imatrix.calibrate.shapes import Shapes
from imatrix.calibrate.statistics.inputs import PIECE_ROWS, Capture, Order
from imatrix.forward.device import device_name, fast_products, is_cpu
from imatrix.forward.layer import Layer
from imatrix.forward.layers.load import Loader
from imatrix.forward.observe import Observer, Silent
from imatrix.forward.options import ForwardOptions
from imatrix.forward.workers import torch_threads
from imatrix.texts.chunks import Chunks
from imatrix.texts.tokens import Text
from quantize.fill.sources import DescribedTensor
from quantize.roles import layer_of
from quantize.rounding.factor import Factor
from quantize.rounding.methods import Matrix, Method
from quantize.rounding.two_sided import HEAD_ROWS, OutputFactor

_WIDEST = 1024
"""Columns of the matrices that speeds are measured with, at most: larger ones are no faster."""

_ROUNDED = 256
"""Rows and columns of the matrix that is rounded."""

_LOGITS = 4096
"""Logits of a token that a softmax is measured with."""

_SWEEPS = 4
"""Softmaxes that a logit of one model takes: sums, probabilities, and what is made of them, in float64."""

_REPEATED, _LONG = 4, 0.1
"""How often work is timed, and the seconds above which twice is enough."""


@dataclass(frozen=True)
class Speeds:
    """Seconds that one thread takes.

    product   for a multiplication in a product of matrices
    factor    of second moments, for each column to the power of three
    move      for a byte that is read, and written somewhere else
    logit     in a softmax
    rounding  of a method here, over what its rates say
    """

    product: float
    factor: float
    move: float
    logit: float
    rounding: float


@dataclass(frozen=True)
class LayerTimes:
    """Seconds that one thread takes for one chunk in a layer.

    stages     up to each input of the attention's matrices, by the names of those that it is multiplied by
    attention  up to the block, with the choice of experts, and the way to latent ones and back
    block      of what every token goes through: a dense block or shared experts
    expert     of a routed expert, for one token
    """

    stages: Mapping[tuple[str, ...], float]
    attention: float
    block: float
    expert: float


@dataclass(frozen=True)
class Probe:
    """Measures a machine with a model; each time is measured when it is first asked for.

    chunk_size  tokens of a chunk
    method      that rounds; None: nothing is rounded
    """

    shapes: Shapes
    chunk_size: int
    forward: ForwardOptions
    method: Method | None = None
    _layers: dict[tuple[tuple[str, tuple[int, ...]], ...], LayerTimes] = field(default_factory=dict)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(device_name(self.forward.device))

    @cached_property
    def speeds(self) -> Speeds:
        """How fast the machine is at all but layers."""
        widths = Counter[int]()
        for info in self.shapes.infos:
            widths[info.n_cols] += info.n_elems if layer_of(info.name) is not None else 0
        with self._alone():
            n = min(_WIDEST, widths.most_common(1)[0][0] if widths else _WIDEST)
            x = torch.full((PIECE_ROWS, n), 0.5, device=self.device)
            moments = np.eye(n) + 0.1
            logits = torch.full((self.chunk_size, _LOGITS), 0.5, device=self.device)
            return Speeds(
                product=self._seconds(lambda: x.T @ x) / (PIECE_ROWS * n * n),
                factor=self._seconds(lambda: Factor.of(moments)) / n**3,
                move=self._seconds(x.clone) / (x.numel() * x.element_size()),
                logit=self._seconds(lambda: torch.logsumexp(logits, -1)) / logits.numel(),
                rounding=self._rounding(),
            )

    @cached_property
    def bfloat16_gain(self) -> float:
        """How many times as fast as float32 bfloat16 is multiplied; below 1 where a processor emulates it."""
        x = torch.full((_WIDEST, _WIDEST), 0.5, device=self.device)
        small = x.bfloat16()
        with self._alone():
            return self._seconds(lambda: x @ x) / self._seconds(lambda: small @ small)

    def layer(self, number: int) -> LayerTimes:
        """Measure a layer; those of the same shapes are measured once."""
        prefix = f"blk.{number}."
        infos = {each.name: each for each in self.shapes.infos if each.name.startswith(prefix)}
        kind = tuple(sorted((name.removeprefix(prefix), info.shape) for name, info in infos.items()))
        if kind not in self._layers:
            with self._alone():
                self._layers[kind] = self._times(number)
        times = self._layers[kind]
        stages = {
            tuple(f"{prefix}{name.split('.', 2)[2]}" for name in names): seconds
            for names, seconds in times.stages.items()
        }
        return LayerTimes(stages, times.attention, times.block, times.expert)

    def pass_seconds(self, text: Text | Chunks) -> float:
        """Estimate how long one thread takes to compute all layers for a text."""
        layers = map(self.layer, range(self.shapes.network.n_all_layers))
        by_chunk, by_token = text.n_chunks, text.inputs.size * self.shapes.n_used
        return sum(by_chunk * (each.attention + each.block) + by_token * each.expert for each in layers)

    def logit_seconds(self, n_tokens: float) -> float:
        """Estimate how long one thread takes for the logits of tokens, and what is made of them."""
        network, speeds = self.shapes.network, self.speeds
        by_logit = network.hidden_size * speeds.product + _SWEEPS * speeds.logit
        return n_tokens * network.vocab_size * by_logit

    def _times(self, number: int) -> LayerTimes:
        network, size = self.shapes.network, self.chunk_size
        dtype: torch.dtype = getattr(torch, self.forward.dtype)
        load = Loader(Path(), {info.name: _MadeUp(info) for info in self.shapes.infos}, self.device, dtype)
        layer = network.build(load, number, network.rope.rotation(size, self.device))
        hidden = torch.full((size, network.state_size), 0.5, device=self.device)
        x = torch.full((size, network.hidden_size), 0.5, device=self.device, dtype=dtype)
        order, block, experts = Order(), layer.block, layer.experts
        expert = None if experts is None else experts.read(0)
        seen = x if experts is None else x[:, : experts.n_cols].contiguous()
        layer.attention_block(_entered(layer, hidden, order), order)
        return LayerTimes(
            {names: self._seconds(partial(_up_to, layer, hidden, names)) for names in order.groups},
            self._seconds(lambda: _attended(layer, hidden)),
            0.0 if block is None else self._seconds(lambda: block(x, Silent())),
            0.0 if expert is None else self._seconds(lambda: expert(seen, Silent())) / size,
        )

    def _rounding(self) -> float:
        """Measure how long the method takes for a small matrix, over what its rates say."""
        method = self.method
        if method is None:
            return 1.0
        weights = Counter[GGMLType]()
        for info in self.shapes.made:
            weights[info.type] += info.n_elems if method.can_encode(info.type) else 0
        if not weights.total():
            return 1.0
        type_ = weights.most_common(1)[0][0]
        rows = np.random.default_rng(0).standard_normal((2 * HEAD_ROWS, _ROUNDED)).astype(np.float32)
        factor, outputs = Factor.of(np.eye(_ROUNDED) + 0.1), OutputFactor.of(np.eye(len(rows)) + 0.1)
        seconds = self._seconds(lambda: method.encode([Matrix(rows, outputs)], type_, factor), on_host=True)
        return seconds / method.rates(type_).seconds(TensorInfo("", rows.shape, type_))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Compute with one thread, as a run's threads do."""
        with (
            torch_threads(1), fast_products(self.device), ONE_BLAS_THREAD, torch.inference_mode(),
            _other_cores_busy(),
        ):  # fmt: skip
            yield

    def _seconds(self, work: Callable[[], object], *, on_host: bool = False) -> float:
        """Time work once it has been done before: the first time compiles, and makes room."""
        is_host = on_host or is_cpu(self.device)
        clock = time.thread_time if is_host else time.perf_counter
        times: list[float] = []
        while len(times) < _REPEATED and (len(times) < 2 or times[-1] < _LONG):
            started = clock()
            work()
            if not is_host:
                torch.accelerator.synchronize()
            times.append(clock() - started)
        return max(min(times), 1e-9)


@contextmanager
def _other_cores_busy() -> Iterator[None]:
    """Have all cores but one multiply matrices: a run's threads share caches, memory and power."""
    is_over = threading.Event()

    def multiply() -> None:
        x = torch.full((_ROUNDED, _ROUNDED), 0.5)
        while not is_over.is_set():
            x @ x

    others = [threading.Thread(target=multiply, daemon=True) for _ in range((os.cpu_count() or 1) - 1)]
    for each in others:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in others:
            each.join()


def _up_to(layer: Layer, hidden: torch.Tensor, names: Sequence[str]) -> None:
    """Compute a layer up to an input, as a run does that wants it."""
    capture = Capture(names, stop=True)
    with suppress(Exception):
        layer.attention_block(_entered(layer, hidden, capture), capture)


def _entered(layer: Layer, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
    return layer.enter(hidden, torch.zeros(len(hidden), dtype=torch.int64), observer)


def _attended(layer: Layer, hidden: torch.Tensor) -> None:
    passage = layer.attention_block(_entered(layer, hidden, Silent()), Silent())
    x = layer.norm(passage.x)
    if layer.experts is None:
        return
    if layer.experts.router.table is None:
        layer.experts.router(x)
    latent = layer.experts.latent
    if latent is not None:
        latent.leave(latent.enter(x.to(latent.down.weight.dtype), Silent()), Silent())


class _MadeUp(DescribedTensor):
    """A tensor whose weights are made up."""

    by_rows = True

    @property
    def type(self) -> GGMLType:
        return I32 if self._info.type == I32 else F32

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        return np.full((stop - start, self.shape[-1]), 1 / prod(self.shape[-1:]), np.float32)

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.zeros(4 * (stop - start) * self.shape[-1], np.uint8)
