"""Costs of steps, for a dry run.

Sizes of file types are right but for a few bytes of the header. Times come from what `Probe` measures of this
machine, and from the rates below. Starting and compiling are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gguf_tools.commands.cook.request import CookRequest, WantedFile
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from gguf_tools.system.locks import usable_cores
from imatrix.calibrate.estimate import Cost
from imatrix.calibrate.probe import Probe
from imatrix.calibrate.shapes import Shapes, network_of_model
from imatrix.forward.gradients.backward import BACKWARD_WORK
from imatrix.sensitivities.options import SensitivityOptions
from imatrix.sensitivities.type_errors import CANDIDATES
from imatrix.texts.mixture import read_text
from imatrix.texts.tokens import Cut, Text, Vocabulary
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
class Estimates:
    """Costs of the steps of a request.

    runs     the plan of each file by its label
    _probes  what measures this machine, by the size of chunks
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
        """Estimate a file: encoding, or with a calibration all that it computes."""
        made = self.runs[wanted.label].preparation
        infos, calibration = made.plan.infos, self.request.calibration
        if calibration is None:
            seconds = sum(info.n_elems / _rate(info.type) for info in infos) / self.n_threads
        else:
            seconds = calibration.cost(made.plan, made.outputs, self.n_threads).seconds
        if wanted.size is None:
            return Cost(made.total_bytes, seconds, is_exact=True)
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

    @property
    def _metadata(self) -> Metadata:
        return self._first.outputs[0].layout.metadata

    @cached_property
    def _shapes(self) -> Shapes:
        network = network_of_model(self.request.source, self._metadata, self._infos)
        return Shapes.of(network, self._infos, (), self._metadata)

    @cached_property
    def _text(self) -> Text:
        return self._read(self.request.text, self.request.cut)

    def _read(self, text: Path, cut: Cut) -> Text:
        return read_text(text, Vocabulary(self._metadata), self._shapes.network.vocab_size, cut)

    def _pass_seconds(self, text: Text) -> float:
        """How long a pass through all layers and the output matrix takes."""
        size = text.chunk_size
        probe = self._probes.setdefault(size, Probe(self._shapes, size, self.request.forward))
        return (probe.pass_seconds(text) + probe.logit_seconds(text.inputs.size / 2)) / self.n_threads

    def _trying_seconds(self) -> float:
        """How long one thread takes to encode some rows of every tensor at every candidate type."""
        options = SensitivityOptions()
        rows = [(min(each.n_rows, options.rows), each.n_cols) for each in self._infos if len(each.shape) > 1]
        rates = [_rate(by_name(name)) for name in CANDIDATES]
        return sum(n_rows * n_cols / rate for n_rows, n_cols in rows for rate in rates)


def _rate(type_: GGMLType) -> float:
    return next((rate for start, rate in _RATES if type_.name.startswith(start)), _OTHER_RATE)
