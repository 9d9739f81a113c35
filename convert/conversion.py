"""The tensors that a Hugging Face folder becomes, opened here or by another process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType

from convert.architectures import find_architecture
from convert.architectures.base import Architecture, Conversion, build
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from quantize.fill.sources import SourceTensor

_NONE: Mapping[str, object] = MappingProxyType({})


@contextmanager
def open_conversion(
    folder: str | os.PathLike[str], choices: Mapping[str, object] = _NONE, *, allow_pickle: bool = False
) -> Iterator[Conversion]:
    """Open a folder and match its weights to tensors, which can be read inside the block.

    choices       for the family's options, as `build` takes them
    allow_pickle  as `Checkpoint` takes it
    raises        what `find_architecture`, `open_weights` and `build` raise
    """
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path, checkpoint.names())
        yield build(architecture, open_weights(checkpoint), choices)


@contextmanager
def open_tensors(folder: str | os.PathLike[str], *, allow_pickle: bool) -> Iterator[dict[str, SourceTensor]]:
    """Give all tensors that a folder can become, those of every layout of attention."""
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path, checkpoint.names())
        choices = {"mla": "both"} if has_layouts(architecture) else {}
        conversion = build(architecture, open_weights(checkpoint), choices)
        yield {tensor.name: tensor for tensor in conversion.tensors}


def has_layouts(architecture: Architecture) -> bool:
    """Return whether a family's attention can be written in several layouts."""
    return any(field.name == "mla" for field in fields(architecture.options))


@dataclass(frozen=True)
class CheckpointSources:
    """The tensors that the checkpoint in a folder becomes.

    folder, allow_pickle  as `Checkpoint` takes them
    choices               for the family's options, as `build` takes them
    names                 name in the output -> name of the tensor that `build` makes
    """

    folder: str | os.PathLike[str]
    allow_pickle: bool
    choices: Mapping[str, object]
    names: Mapping[str, str]

    @contextmanager
    def open(self) -> Iterator[Mapping[str, SourceTensor]]:
        """Open the folder and match its weights to tensors; raises what `convert` raises for the folder."""
        with open_conversion(self.folder, self.choices, allow_pickle=self.allow_pickle) as conversion:
            tensors = {tensor.name: tensor for tensor in conversion.tensors}
            yield {name: tensors[made] for name, made in self.names.items()}
