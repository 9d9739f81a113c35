"""How another process comes to the tensors of a conversion: it opens the folder itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

from convert.architectures import find_architecture
from convert.architectures.base import build
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from quantize.fill.sources import SourceTensor


@contextmanager
def open_tensors(folder: str | os.PathLike[str], *, allow_pickle: bool) -> Iterator[dict[str, SourceTensor]]:
    """Give all tensors that the checkpoint in a folder can become, those of every layout of attention."""
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path, checkpoint.names())
        has_layouts = any(field.name == "mla" for field in fields(architecture.options))
        conversion = build(architecture, open_weights(checkpoint), {"mla": "both"} if has_layouts else {})
        yield {tensor.name: tensor for tensor in conversion.tensors}


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
        with Checkpoint(self.folder, allow_pickle=self.allow_pickle) as checkpoint:
            architecture = find_architecture(checkpoint.config, checkpoint.config_path, checkpoint.names())
            conversion = build(architecture, open_weights(checkpoint), self.choices)
            tensors = {tensor.name: tensor for tensor in conversion.tensors}
            yield {name: tensors[made] for name, made in self.names.items()}
