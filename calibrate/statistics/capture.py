"""Observers that keep the inputs of some matrices while one chunk is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from forward.observe import Silent


class Seen(Exception):
    """All that was wanted has been shown; the rest of the chunk need not be computed."""


class Capture(Silent):
    """Keeps the inputs of the wanted matrices of one chunk.

    wanted  names of matrices
    stop    raise Seen as soon as the wanted ones have been shown; after stacks of heads, which are shown in
            pieces, when another matrix is
    """

    def __init__(self, wanted: Collection[str], *, stop: bool = False) -> None:
        self._wanted, self._stop = wanted, stop
        self._seen: set[str] = set()
        self._shown: dict[tuple[str, ...], torch.Tensor] = {}
        self._heads: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        wanted = [name for name in names if name in self._wanted]
        if self._takes(wanted):
            self._shown[tuple(wanted)] = x[:, None].clone()
            if self._stop and not self._heads and self._seen.issuperset(self._wanted):
                raise Seen

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        if self._takes([name] if name in self._wanted else []):
            self._heads.setdefault(name, []).append((first, x.clone()))

    def row_groups(self, name: str, x: torch.Tensor) -> None:
        self.heads(name, 0, x.shape[1], x)

    def _takes(self, wanted: Sequence[str]) -> bool:
        if not wanted and self._stop and self._seen.issuperset(self._wanted):
            raise Seen
        self._seen.update(wanted)
        return bool(wanted)

    def inputs(self) -> dict[tuple[str, ...], torch.Tensor]:
        """Return the inputs of matrices, (n_tokens, n_mats, n_cols), by the names of those that share one."""
        return self._shown | {(name,): _joined(pieces) for name, pieces in self._heads.items()}


def _joined(pieces: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return rows that came in pieces: runs of heads, and for the same heads runs of tokens."""
    runs: dict[int, list[torch.Tensor]] = {}
    for first, x in pieces:
        runs.setdefault(first, []).append(x)
    return torch.cat([torch.cat(runs[first]) for first in sorted(runs)], 1)


class Order(Silent):
    """Keeps the names of the matrices, grouped by input, in the order in which they are shown."""

    def __init__(self) -> None:
        self.groups: list[tuple[str, ...]] = []

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        self._add(tuple(names))

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        self._add((name,))

    def row_groups(self, name: str, x: torch.Tensor) -> None:
        self._add((name,))

    def _add(self, names: tuple[str, ...]) -> None:
        if names not in self.groups:
            self.groups.append(names)
