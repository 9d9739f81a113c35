"""Costs of steps, for a dry run.

Sizes of file types are right but for a few bytes of the header. Times are those of
`imatrix.calibrate.passes`. Starting and compiling are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gguf_tools.commands.cook.request import CookRequest, WantedFile
from gguf_tools.errors import BadRequest
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from gguf_tools.system.locks import usable_cores
from imatrix.calibrate.estimate import Cost
from imatrix.calibrate.passes import TextPasses, encoding_rate
from imatrix.calibrate.probe import Probe
from imatrix.calibrate.shapes import Shapes, network_of_model
from imatrix.sensitivities.options import SensitivityOptions
from imatrix.texts.mixture import read_text
from imatrix.texts.tokens import Cut, Text, Vocabulary
from quantize.prepare import Preparation
from quantize.roles import layer_of
from quantize.run import Run

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
        return Cost(n_bytes, self._passes(self._text).collection() / self.n_threads)

    def losses(self) -> Cost:
        seconds = self._passes(self._text).measurement(SensitivityOptions())
        return Cost(800 * len(self._infos), seconds / self.n_threads)

    def file(self, wanted: WantedFile) -> Cost:
        """Estimate a file: encoding, or with a calibration all that it computes."""
        made = self.runs[wanted.label].preparation
        infos, calibration = made.plan.infos, self.request.calibration
        if calibration is None:
            seconds = sum(info.n_elems / encoding_rate(info.type) for info in infos) / self.n_threads
        else:
            seconds = calibration.cost(made.plan, made.outputs, self.n_threads).seconds
        if wanted.size is None:
            return Cost(made.total_bytes, seconds, is_exact=True)
        n_weights = sum(info.n_elems for info in self._infos)
        return Cost(int(wanted.size.amount * (n_weights / 8 if wanted.size.kind == "bpw" else 1)), seconds)

    def evaluation(self, text: Path) -> Cost:
        """Estimate the divergence; BadRequest for a model without any."""
        if self._shapes.network.pooling is not None:
            raise BadRequest(
                f"{self.request.source}: is for embeddings, and --evaluate tells the divergence of models"
                " that predict tokens; leave --evaluate out, and run evaluate with the files"
            )
        models = [self._infos, *(each.preparation.plan.infos for each in self.runs.values())]
        passes = self._passes(self._read(text, self.request.held_out_cut))
        return Cost(1 << 20, passes.comparison(models) / self.n_threads)

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

    def _passes(self, text: Text) -> TextPasses:
        size = text.chunk_size
        probe = self._probes.setdefault(size, Probe(self._shapes, size, self.request.forward))
        return TextPasses(probe, text.chunks)
