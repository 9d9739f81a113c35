"""Costs of steps, for a dry run.

Sizes of file types are right but for a few bytes of the header. Times come from what `Probe` measures of this
machine, and from the rates below. Starting and compiling are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from gguf_tools.commands.cook.request import CookRequest, WantedFile
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.locks import usable_cores
from imatrix.calibrate.estimate import calibration_seconds, logit_seconds, pass_seconds
from imatrix.calibrate.footprint import Shapes
from imatrix.calibrate.options import CalibrationOptions, Coverage
from imatrix.calibrate.probe import Probe
from imatrix.forward.gradients.forward_backward import BACKWARD_WORK
from imatrix.sensitivities.options import SensitivityOptions
from imatrix.sensitivities.type_errors import CANDIDATES
from imatrix.texts.tokens import Cut, Text
from quantize.prepare import Preparation
from quantize.roles import layer_of
from quantize.run import Run

_RATES = (("IQ1", 70e6), ("IQ2", 30e6), ("IQ3", 28e6), ("Q", 100e6), ("IQ4", 250e6))
"""Weights a second that one thread encodes, by the beginning of the type's name: scripts/bench/kernels.py,
2026-11-21, with importances."""

_OTHER_RATE = 2e9
_HASH_RATE = 1e9
"""Bytes a second that are hashed for the checksums."""


@dataclass(frozen=True)
class Cost:
    """Cost of a step.

    n_bytes   of its outputs
    seconds   on all threads
    is_exact  whether n_bytes is known from the plan of a file
    """

    n_bytes: int
    seconds: float = 0.0
    is_exact: bool = False


@dataclass(frozen=True)
class Estimates:
    """Costs of the steps of a request.

    runs  the plan of each file by its label
    """

    request: CookRequest
    runs: Mapping[str, Run]
    _probes: dict[int, Probe] = field(default_factory=dict)

    def importances(self) -> Cost:
        matrices = [each for each in self._infos if len(each.shape) > 1 and layer_of(each.name) is not None]
        n_bytes = sum(4 * each.n_mats * (each.n_cols + 1) for each in matrices)
        return Cost(n_bytes, self._pass_seconds(self._text))

    def losses(self) -> Cost:
        passes = (1 + BACKWARD_WORK) * self._pass_seconds(self._text)
        return Cost(800 * len(self._infos), passes + self._trying_seconds() / self.n_threads)

    def file(self, wanted: WantedFile) -> Cost:
        preparation = self.runs[wanted.label].preparation
        seconds = self._making_seconds(preparation)
        if wanted.size is None:
            return Cost(preparation.total_bytes, seconds, is_exact=True)
        n_weights = sum(info.n_elems for info in self._infos)
        return Cost(int(wanted.size.amount * (n_weights / 8 if wanted.size.kind == "bpw" else 1)), seconds)

    def evaluation(self, text: Path) -> Cost:
        n_models = 1 + len(self.request.wanted)
        return Cost(1 << 20, self._pass_seconds(self._read(text, self.request.held_out_cut)) * n_models)

    def sums(self, before: Sequence[Cost]) -> Cost:
        return Cost(100 * len(before), sum(cost.n_bytes for cost in before) / _HASH_RATE)

    @property
    def n_threads(self) -> int:
        return self.request.forward.n_threads or usable_cores()

    @cached_property
    def _first(self) -> Preparation:
        return next(iter(self.runs.values())).preparation

    @property
    def _infos(self) -> Sequence[TensorInfo]:
        return self._first.plan.infos

    @cached_property
    def _coverage(self) -> Coverage:
        return Coverage.of(self.request.source, self._first.outputs[0].layout.metadata, self._infos)

    @cached_property
    def _shapes(self) -> Shapes:
        return Shapes.of(self._coverage.network, self._infos, (), self._first.outputs[0].layout.metadata)

    @cached_property
    def _text(self) -> Text:
        return self._read(self.request.text, self.request.cut)

    def _read(self, text: Path, cut: Cut) -> Text:
        return CalibrationOptions(text, cut).read(self._first.outputs[0].layout.metadata, self._coverage)

    def _pass_seconds(self, text: Text) -> float:
        """How long a pass through all layers and the output matrix takes."""
        probe = self._probe(text)
        layers = sum(pass_seconds(probe, text, layer) for layer in range(self._shapes.network.n_all_layers))
        return (layers + logit_seconds(probe, text)) / self.n_threads

    def _probe(self, text: Text) -> Probe:
        """Return the probe that measures this machine with chunks as long as a text's."""
        size = text.chunk_size
        if size not in self._probes:
            self._probes[size] = Probe(self._shapes, size, self.request.forward)
        return self._probes[size]

    def _trying_seconds(self) -> float:
        """How long one thread takes to encode some rows of every tensor at every candidate type."""
        options = SensitivityOptions()
        rows = [(min(each.n_rows, options.rows), each.n_cols) for each in self._infos if len(each.shape) > 1]
        rates = [_rate(by_name(name)) for name in CANDIDATES]
        return sum(n_rows * n_cols / rate for n_rows, n_cols in rows for rate in rates)

    def _making_seconds(self, preparation: Preparation) -> float:
        """How long a file takes: encoding, or with a calibration all that it computes."""
        request, infos = self.request, preparation.plan.infos
        if not request.calibrate:
            return sum(info.n_elems / _rate(info.type) for info in infos) / self.n_threads
        made = [each for each in infos if layer_of(each.name) is not None and len(each.shape) > 1]
        options = CalibrationOptions(request.text, request.cut, forward=request.forward)
        shapes = replace(self._shapes, infos=infos, made=made)
        probe = Probe(shapes, self._text.chunk_size, request.forward, options.rounding)
        return calibration_seconds(options, probe, self._text, self.n_threads)


def _rate(type_: GGMLType) -> float:
    return next((rate for start, rate in _RATES if type_.name.startswith(start)), _OTHER_RATE)
