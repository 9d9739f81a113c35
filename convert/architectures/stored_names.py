"""Names of weights as programs save them, brought to the names that a family's rules have.

A checkpoint may come from a model inside a wrapper, from the base class of a model, whose names lack what
stands before its layers ("model."), or from a model whose text part stands beside a vision part. A name
says so itself, so each is brought to the family's own, one by one. Names that fit nothing stay as they are.

MLX changes more than names in models with convolutions. When mlx-lm first reads such a model, it moves the
last axis of its kernels: (rows, 1, size) become (rows, size, 1). In the same pass it adds one to the norms
that are stored less one, those of Qwen3-Next and Qwen 3.5. So the shape of a kernel shows what the norms
are (mlx-lm 0.32, `sanitize` of these models).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.architectures.rules import Renamed, Rule, plus_one, renamed
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights.base import Weight, Weights
from gguf_tools.errors import CheckpointError, MissingTensor

_WRAPPERS = re.compile(
    r"^(?:base_model\.model\.|module\.|_orig_mod\.|_fsdp_wrapped_module\.|model\.(?=(?:model|backbone|lm_head)\.))+"
)
"""Start of the names of a model inside a wrapper: that of PEFT, of torch's DDP, FSDP or compile, or a
training module of Lightning."""

_INNER_WRAPPERS = re.compile(
    r"(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)
"""The same around a part of the model. PEFT calls what it adds an adapter to `base_layer`."""

_TEXT_PART = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?(?=(lm_head\.)?)")
"""Start of the names of a text part, in transformers 4 and 5 and in MLX."""

_STACKS = (
    (re.compile(r"\.switch_(?:mlp|glu)\.fc1\."), ".experts.up_proj."),
    (re.compile(r"\.switch_(?:mlp|glu)\.fc2\."), ".experts.down_proj."),
    (re.compile(r"\.experts\.switch_glu\.|\.switch_(?:mlp|glu)\."), ".experts."),
    (re.compile(r"(\.experts\.(?:gate|up|down|gate_up)_proj)\.weight$"), r"\1"),
    (re.compile(r"(\.experts\.(?:gate|up|down|gate_up)_proj)\.bias$"), r"\1_bias"),
)
"""Stacks of experts as MLX calls them -> as transformers 5 does, whose stacks are not modules."""


_IS_OTHER = re.compile(
    r"^(?:base_model|module|model\.(?:model|backbone|lm_head))\.|_mod\.|_module\.|base_layer|language_model"
    r"|switch_|experts\.(?!\d)"
)
"""Parts of which every such name has one; most names are the published ones, and there may be 50,000."""


@dataclass(frozen=True)
class StoredNames:
    """Name of a stored weight -> name that a family's rules know it by.

    prefix      what the names of the base class lack: "model."
    tops        what comes after the prefix: "layers", "norm" ...
    embeddings  the rules' name of the matrix of embeddings, "" for a family without
    own         the family's other spellings -> the rules' names
    """

    prefix: str
    embeddings: str
    tops: frozenset[str]
    own: Callable[[str], str] | None

    def __call__(self, name: str) -> str:
        name = self._without_wrappers(name)
        if name.split(".", 1)[0] in self.tops:
            name = self.prefix + name
        return name

    def _without_wrappers(self, name: str) -> str:
        if _IS_OTHER.search(name):
            name = _INNER_WRAPPERS.sub("", _WRAPPERS.sub("", name))
            name = _TEXT_PART.sub(lambda match: "" if match[1] else "model.", name)
            for pattern, replacement in _STACKS:
                name = pattern.sub(replacement, name)
        return name if self.own is None else self.own(name)

    def lacks_prefix(self, weights: Renaming) -> bool:
        """Return whether the stored names are those of the base class, which the embeddings' shows."""
        stored = weights.stored(self.embeddings)
        return stored is not None and self._without_wrappers(stored).split(".", 1)[0] in self.tops


def stored_names(rules: Iterable[Rule], own: Callable[[str], str] | None) -> StoredNames:
    """Return the translation of stored names to those of a family's rules.

    own  the family's other spellings -> the rules' names
    """
    outputs = [output for rule in rules for output in rule.outputs]
    embeddings = next((output.source for output in outputs if output.name == "token_embd.weight"), "")
    prefix = embeddings.split(".", 1)[0] + "." if embeddings.count(".") > 1 else ""
    inside = (output.source.removeprefix(prefix) for output in outputs if output.source.startswith(prefix))
    tops = frozenset(name.split(".", 1)[0] for name in inside) if prefix else frozenset()
    return StoredNames(prefix, embeddings, tops, own)


class Renaming:
    """The weights of a checkpoint, each called `canonical_name(name)`. A weight keeps its stored name.

    Kernels have the axes that they have outside of MLX.

    raises  CheckpointError when two weights get the same name
    """

    def __init__(self, weights: Weights, canonical_name: Callable[[str], str]) -> None:
        self._weights = weights
        self._stored: dict[str, str] = {}
        for name in weights.names():
            canonical = canonical_name(name)
            other = self._stored.setdefault(canonical, name)
            if other != name:
                folder = weights.checkpoint.folder
                raise CheckpointError(f"{folder}: {other} and {name} are both {canonical}, expected one")

    @property
    def checkpoint(self) -> Checkpoint:
        return self._weights.checkpoint

    @property
    def dropped(self) -> Mapping[str, str]:
        return self._weights.dropped

    @property
    def notes(self) -> tuple[str, ...]:
        return self._weights.notes

    @property
    def last(self) -> frozenset[str]:
        last = self._weights.last
        return frozenset(name for name, stored in self._stored.items() if stored in last)

    def stored(self, name: str) -> str | None:
        """Return the stored name of what is now called `name`, None if there is no such weight."""
        return self._stored.get(name)

    def names(self) -> tuple[str, ...]:
        """Return the new names, in the order of the stored ones."""
        return tuple(self._stored)

    def weight(self, name: str) -> Weight:
        """Return the weight that is now called `name`; raises what `Weights.weight` raises."""
        if name not in self._stored:
            raise MissingTensor(f"{self.checkpoint.folder}: no weight {name}")
        weight = self._weights.weight(self._stored[name])
        return moved_back(weight) if is_moved(name, weight) else weight

    def numbers(self, name: str) -> np.ndarray:
        """Return whole numbers as they are stored, in their shape; raises what `weight` raises."""
        return self.checkpoint.raw(self.weight(name).name).read()


KERNEL = ".conv1d.weight", ".conv.conv.weight"
"""Endings of the names of kernels."""


@dataclass(frozen=True)
class MovedBack(Renamed):
    """A kernel of MLX, (rows, size, 1), as all others store it: (rows, 1, size). The numbers lie the same."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        size = self.shape[-1]
        return self.weight.read_rows(start * size, stop * size).reshape(-1, size)


def moved_back(weight: Weight) -> MovedBack:
    """Return a kernel of MLX as all others store it."""
    rows, size, _ = weight.shape
    return MovedBack(weight.name, (rows, 1, size), weight.type, weight)


def is_moved(name: str, weight: Weight) -> bool:
    """Return whether a weight is a kernel whose last axis MLX has moved."""
    shape = weight.shape
    return name.endswith(KERNEL) and len(shape) == 3 and shape[-1] == 1 and shape[1] > 1


def has_moved(model: Weights) -> bool:
    """Return whether a model has such a kernel."""
    return any(name.endswith(KERNEL) and is_moved(name, model.weight(name)) for name in model.names())


def with_whole_norms(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules for norms that are not stored less one."""
    return tuple(
        replace(rule, outputs=tuple(
            replace(output, arrange=renamed) if output.arrange is plus_one else output
            for output in rule.outputs
        ))
        for rule in rules
    )  # fmt: skip
