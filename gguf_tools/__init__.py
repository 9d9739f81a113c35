"""GGUF files: read, lay out, write, show.

    with gguf_tools.open_gguf("model.gguf") as file:
        file.get("general.architecture")
        file.raw_rows("token_embd.weight", 0, 10)
"""

from __future__ import annotations

from gguf_tools.errors import (
    BadActivation,
    BadArgument,
    BadConfig,
    BadImportance,
    BadMoments,
    BadOverride,
    BadRequest,
    BadTensor,
    BadTokenizer,
    BadWeights,
    ChangedInput,
    CheckpointError,
    ClusterError,
    ExecutionError,
    FormatError,
    GGUFError,
    HubError,
    MissingTensor,
    NeedsImportance,
    NoFallback,
    OutputError,
    PlanError,
    QuantError,
    ShapeError,
    ToolkitError,
    TruncatedError,
    UnexpectedTensors,
    UnsupportedCheckpoint,
    UnsupportedVersion,
)
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.layout import FileLayout
from gguf_tools.format.reader import GGUFFile, GGUFSource
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Metadata, Value

__all__ = [
    "BadActivation",
    "BadArgument",
    "BadConfig",
    "BadImportance",
    "BadMoments",
    "BadOverride",
    "BadRequest",
    "BadTensor",
    "BadTokenizer",
    "BadWeights",
    "ChangedInput",
    "CheckpointError",
    "ClusterError",
    "ExecutionError",
    "FileLayout",
    "FormatError",
    "GGMLType",
    "GGUFError",
    "GGUFFile",
    "GGUFSet",
    "GGUFSource",
    "GGUFWriter",
    "HubError",
    "Kind",
    "Metadata",
    "MissingTensor",
    "NeedsImportance",
    "NoFallback",
    "OutputError",
    "PlanError",
    "QuantError",
    "ShapeError",
    "TensorInfo",
    "ToolkitError",
    "TruncatedError",
    "UnexpectedTensors",
    "UnsupportedCheckpoint",
    "UnsupportedVersion",
    "Value",
    "__version__",
    "open_gguf",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
