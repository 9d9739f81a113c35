"""The weights of a checkpoint under other names, for families that are another one under other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convert.checkpoint.checkpoint import Checkpoint
from convert.weights.base import Weight, Weights
from gguf_tools.errors import CheckpointError, MissingTensor


class Renaming:
    """Weights as `weights` has them, each called `logical(name)`. A weight itself keeps its stored name.

    raises  CheckpointError when two weights get the same name
    """

    def __init__(self, weights: Weights, logical: Callable[[str], str]) -> None:
        self._weights = weights
        self._stored: dict[str, str] = {}
        for name in weights.names():
            other = self._stored.setdefault(logical(name), name)
            if other != name:
                folder = weights.checkpoint.folder
                raise CheckpointError(f"{folder}: {other} and {name} are both {logical(name)}, expected one")

    @property
    def checkpoint(self) -> Checkpoint:
        return self._weights.checkpoint

    @property
    def dropped(self) -> Mapping[str, str]:
        return self._weights.dropped

    @property
    def last(self) -> frozenset[str]:
        last = self._weights.last
        return frozenset(name for name, stored in self._stored.items() if stored in last)

    def names(self) -> tuple[str, ...]:
        """Return the new names, in the order of the stored ones."""
        return tuple(self._stored)

    def weight(self, name: str) -> Weight:
        """Return the weight that is now called `name`; raises what `Weights.weight` raises."""
        if name not in self._stored:
            raise MissingTensor(f"{self.checkpoint.folder}: no weight {name}")
        return self._weights.weight(self._stored[name])
