"""The models that go through the text: the original, and perhaps the one that is being written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from calibrate.run.encode import Conditions, Encoder, RowGroup, conditions_of
from calibrate.run.streams import Stream
from calibrate.statistics.inputs import Held, HoldoutSplit, Inputs
from calibrate.statistics.moments import Statistics
from calibrate.statistics.shrinkage import Trust
from forward.families import Network
from forward.layer import Layer
from forward.layers.load import Loader
from forward.layers.rope import Rotation
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
    """What stays the same for all layers.

    models    the original, and the model that is being written; the original alone where tensors are encoded
              under what the original multiplies
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
    def makes_up(self) -> bool:
        """Whether a tensor makes up for those before it."""
        return self.is_followed and self.trust.makes_up

    @property
    def original(self) -> Model:
        return self.models[0]

    @property
    def own(self) -> Model:
        """The model whose inputs count."""
        return self.models[-1]

    def is_missing(self, name: str) -> bool:
        """Whether a tensor is to be made, and some of its rows are not written."""
        return name in self.wanted and self.encoder.is_missing(name)

    def conditions_of(
        self, inputs: Iterable[tuple[Statistics, Held | None]], name: str
    ) -> Iterator[Conditions]:
        """Yield what follows from statistics; see `encode.conditions_of`."""
        return conditions_of(inputs, name, self.workers, self.trust)

    def make(self, inputs: Inputs, key: tuple[str, ...], names: Collection[str]) -> None:
        """Make those of `names` that are not written, under what `inputs` has of `key`."""
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
