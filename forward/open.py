"""Where the forward pass gets its weights: a Hugging Face folder, or a GGUF file of any MLA layout.

Both are seen the same way: a configuration, and tensors under their GGUF names, unread.

    attention   a folder is taken as a conversion with plain attention, which has attn_kv_b. A GGUF file may
                have attn_kv_b, or attn_k_b and attn_v_b, as stacks of heads or as one matrix
    config      a GGUF file says less than config.json; what it leaves open is filled in as llama.cpp does,
                and a selection bias among the tensors means noaux_tc
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.metadata import read_metadata
from convert.tokenizer.tokenizer import read_tokenizer
from gguf_tools import keys
from gguf_tools.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.shards import open_gguf
from gguf_tools.values import Metadata
from quantize.fill.sources import GGUFTensor, SourceTensor


@dataclass(frozen=True)
class ModelSource:
    """An open model: a context manager that closes its files.

    config   sizes and habits
    tensors  GGUF name -> tensor, unread
    vocab    gives the keys tokenizer.*, read when they are wanted
    paths    the files that hold weights, in reading order
    """

    path: Path
    config: DeepseekConfig
    tensors: Mapping[str, SourceTensor]
    vocab: Callable[[], Metadata]
    paths: tuple[Path, ...]
    opened: Closeable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.opened.close()

    def tensor(self, name: str) -> SourceTensor:
        """Return the tensor called `name`; MissingTensor if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensor(f"{self.path}: no tensor {name}") from None


class Closeable(Protocol):
    def close(self) -> None: ...


def open_model(path: str | os.PathLike[str]) -> ModelSource:
    """Open a Hugging Face folder, or a GGUF file or split set.

    raises  CheckpointError, GGUFError for what can't be read; UnsupportedCheckpoint for another family
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    return _open_gguf(path)


def _open_folder(folder: Path) -> ModelSource:
    from convert.architectures import find_architecture
    from convert.architectures.base import build
    from convert.checkpoint.checkpoint import Checkpoint
    from convert.weights import open_weights

    checkpoint = Checkpoint(folder)
    try:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path)
        conversion = build(architecture, open_weights(checkpoint), {"mla": "none"})
        if not isinstance(conversion.config, DeepseekConfig):
            raise UnsupportedCheckpoint(f"{folder}: {architecture.gguf_name}, expected deepseek2")
        return ModelSource(
            path=folder,
            config=conversion.config,
            tensors={tensor.name: tensor for tensor in conversion.tensors},
            vocab=lambda: read_tokenizer(folder, checkpoint.config).metadata(),
            paths=tuple(sorted({checkpoint.raw(name).path for name in checkpoint.names()})),
            opened=checkpoint,
        )
    except BaseException:
        checkpoint.close()
        raise


def _open_gguf(path: Path) -> ModelSource:
    file = open_gguf(path)
    try:
        architecture = file.get(keys.ARCHITECTURE)
        if architecture != "deepseek2":
            raise UnsupportedCheckpoint(
                f"{path}: general.architecture is {architecture!r}, expected 'deepseek2'"
            )
        tensors = {name: GGUFTensor(file, name) for name in file.tensors}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        config = read_metadata(file.metadata, shapes, path)
        vocab = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        return ModelSource(path, config, tensors, lambda: vocab, tuple(file.paths), file)
    except BaseException:
        file.close()
        raise
