"""The context of a run: the models that go through the text, and what stays the same for all layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from calibrate.run.encode import Encoder, RowGroup
from calibrate.run.streams import Stream
from calibrate.statistics.conditions import Conditions, conditions_of
from calibrate.statistics.inputs import Held, HoldoutSplit, Inputs
from calibrate.statistics.moments import Statistics
from calibrate.statistics.shrinkage import Trust
from forward.layer import Layer
from forward.layers.load import Loader
from forward.layers.rope import Rotation
from forward.network import Network
from forward.workers import Workers
from gguf_tools.format.tensors import TensorInfo


@dataclass(frozen=True)
class Model:
    """One of the models."""

    network: Network
    load: Loader
    rotate: Rotation
    stream: Stream

    def layer(self, number: int) -> Layer:
        """Return a layer with its weights, as they are now."""
        return self.network.build(self.load, number, self.rotate)


@dataclass(frozen=True)
class RunContext:
    """Values that stay the same for all layers.

    models    the original, and the model that is being written; the original alone where tensors are encoded
              under the original's inputs
    wanted    the tensors to make, by name
    tokens    ids of the whole text, int64 (n_tokens,)
    trust     how far the text's moments are trusted
    """

    models: tuple[Model, ...]
    holdout: HoldoutSplit
    device: torch.device
    dtype: torch.dtype
    wanted: Mapping[str, TensorInfo]
    encoder: Encoder
    workers: Workers
    tokens: torch.Tensor
    trust: Trust

    @property
    def is_followed(self) -> bool:
        """Whether the model that is being written goes through the text, too."""
        return len(self.models) > 1

    @property
    def corrects_drift(self) -> bool:
        """Whether tensors are corrected for what the ones before them have changed."""
        return self.is_followed and self.trust.corrects_drift

    @property
    def original(self) -> Model:
        return self.models[0]

    @property
    def own(self) -> Model:
        """The model whose inputs count."""
        return self.models[-1]

    def is_missing(self, name: str, first: int = 0, n_rows: int | None = None) -> bool:
        """Whether rows of a tensor are to be made and not all written; all rows, or `n_rows` from `first`."""
        return name in self.wanted and self.encoder.writer.is_missing(name, first, n_rows)

    def conditions_of(
        self, inputs: Iterable[tuple[Statistics, Held | None]], name: str
    ) -> Iterator[Conditions]:
        """Yield the conditions that follow from statistics; see `conditions.conditions_of`."""
        return conditions_of(inputs, name, self.workers, self.trust)

    def make(self, inputs: Inputs, key: tuple[str, ...], names: Collection[str]) -> None:
        """Encode those of `names` that are not written, under the inputs of `key`."""
        missing = [name for name in names if self.is_missing(name)]
        if not missing:
            return

        mats = range(len(inputs.moments[key].own))
        shown = ((inputs.statistics(key, mat), inputs.held(key, mat)) for mat in mats)
        all_mats = list(self.conditions_of(shown, missing[0]))
        groups = []
        for name in missing:
            info = self.wanted[name]
            n_rows = info.n_rows // len(mats)
            groups += [RowGroup(info, mat * n_rows, n_rows, each) for mat, each in enumerate(all_mats)]
        self.encoder.make(groups)
