"""A converted checkpoint as an F32 file without a tokenizer: the plainest file that llama.cpp computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures import find_architecture
from convert.architectures.base import build
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value


def write_f32(folder: Path, path: Path, **options: Any) -> Path:
    """Write the model in `folder` as an F32 file without a tokenizer."""
    with Checkpoint(folder) as checkpoint:
        conversion = build(find_architecture(checkpoint.config), open_weights(checkpoint), options)
        metadata = {
            "general.architecture": Value.string(conversion.architecture.gguf_name),
            **conversion.metadata,
            "tokenizer.ggml.model": Value.string("none"),
        }
        layout = FileLayout.of(metadata, [TensorInfo(t.name, t.shape, F32) for t in conversion.tensors])
        with GGUFWriter(path, layout) as writer:
            for tensor in conversion.tensors:
                rows = tensor.read_rows(0, int(np.prod(tensor.shape[:-1]))).astype(np.float32)
                writer.write(layout.offset_of(tensor.name), rows.tobytes())
            writer.publish()
    return path
