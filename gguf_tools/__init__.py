"""GGUF files, and everything that makes them: one place to import from.

>>> import gguf_tools
>>> gguf_tools.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16").paths[0].name
'lite-bf16.gguf'
>>> result = gguf_tools.quantize("lite-bf16.gguf", "lite-Q4_K_M.gguf", "Q4_K_M")
>>> with gguf_tools.open_gguf("lite-Q4_K_M.gguf") as file:
...     file.get("general.architecture")
'deepseek2'

What a pipeline needs is here under one name, and loaded when it is first used: convert, quantize, calibrate,
evaluate, sensitivity, cook, card, upload, split, merge, and the options that they take. `imatrix` and `edit`
are modules. The package itself reads, lays out, writes and shows GGUF files; the others are its users.
"""

from __future__ import annotations

from typing import Any

from gguf_tools.errors import (
    AnotherModel,
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
    MissingFile,
    MissingInput,
    MissingMatrix,
    MissingModel,
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
    UnreadableInput,
    UnsupportedCheckpoint,
    UnsupportedVersion,
    WrongType,
)
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.layout import FileLayout
from gguf_tools.format.reader import GGUFFile, GGUFSource
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Metadata, Value
from gguf_tools.lazy import lazy_names

__all__ = [
    "AnotherModel",
    "AuditOptions",
    "AuditReport",
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
    "Calibrating",
    "Calibration",
    "ChangedInput",
    "CheckpointError",
    "ClusterError",
    "CollectOptions",
    "ConvertOptions",
    "Cut",
    "EvaluateOptions",
    "Evaluation",
    "ExecutionError",
    "FileLayout",
    "FormatError",
    "ForwardOptions",
    "GGMLType",
    "GGUFError",
    "GGUFFile",
    "GGUFSet",
    "GGUFSource",
    "GGUFWriter",
    "HubError",
    "KeptGrid",
    "Kind",
    "LintReport",
    "LogitsFile",
    "Metadata",
    "MissingFile",
    "MissingInput",
    "MissingMatrix",
    "MissingModel",
    "MissingTensor",
    "Mixture",
    "ModelWeights",
    "NeedsImportance",
    "NoFallback",
    "OutputError",
    "Override",
    "PlanError",
    "PlanOptions",
    "Preparation",
    "ProgressState",
    "QuantError",
    "QuantizeOptions",
    "RefineOptions",
    "Refinement",
    "Reporter",
    "Result",
    "RunOptions",
    "Sensitivities",
    "SensitivityOptions",
    "ShapeError",
    "SourceOptions",
    "Suite",
    "SuiteEvaluation",
    "TensorInfo",
    "ToolkitError",
    "TruncatedError",
    "UnexpectedTensors",
    "UnreadableInput",
    "UnsupportedCheckpoint",
    "UnsupportedVersion",
    "Value",
    "WrongType",
    "__version__",
    "audit",
    "calibrate",
    "card",
    "convert",
    "cook",
    "decode",
    "edit",
    "encode",
    "evaluate",
    "evaluate_suite",
    "imatrix",
    "lint",
    "merge",
    "open_checkpoint",
    "open_gguf",
    "parse_overrides",
    "quantize",
    "quantize_many",
    "read_suite",
    "read_values",
    "refine",
    "sensitivity",
    "split",
    "upload",
]

__version__ = "0.1.0"


_HOMES = {
    "AuditOptions": "imatrix.evaluate.auditing.options",
    "AuditReport": "imatrix.evaluate.auditing.report",
    "Calibrating": "quantize.calibration",
    "Calibration": "imatrix.calibrate.calibration",
    "CollectOptions": "imatrix.options",
    "ConvertOptions": "convert.options",
    "Cut": "imatrix.texts.tokens",
    "EvaluateOptions": "imatrix.evaluate.options",
    "Evaluation": "imatrix.evaluate.evaluation",
    "ForwardOptions": "imatrix.forward.options",
    "KeptGrid": "quantize.plan.decide",
    "LintReport": "quantize.linting",
    "LogitsFile": "imatrix.evaluate.options",
    "Mixture": "quantize.plan.recipe_files",
    "ModelWeights": "convert.weights.model_weights",
    "Override": "quantize.plan.overrides",
    "PlanOptions": "quantize.plan.plan",
    "Preparation": "quantize.prepare",
    "QuantizeOptions": "quantize.options",
    "ProgressState": "gguf_tools.progress",
    "RefineOptions": "imatrix.calibrate.refine.options",
    "Refinement": "imatrix.calibrate.refine.result",
    "Reporter": "gguf_tools.progress",
    "Result": "quantize.run",
    "RunOptions": "quantize.run_options",
    "Sensitivities": "quantize.plan.sensitivities",
    "SensitivityOptions": "imatrix.sensitivities.options",
    "SourceOptions": "convert.sources",
    "Suite": "imatrix.texts.suite",
    "SuiteEvaluation": "imatrix.evaluate.suite.result",
    "audit": "imatrix.evaluate.auditing.pipeline",
    "calibrate": "gguf_tools.commands.functions",
    "card": "gguf_tools.commands.functions",
    "convert": "convert.pipeline",
    "cook": "gguf_tools.commands.functions",
    "decode": "quantize.arrays",
    "edit": "gguf_tools.edit",
    "encode": "quantize.arrays",
    "evaluate": "imatrix.evaluate.pipeline",
    "evaluate_suite": "imatrix.evaluate.pipeline",
    "imatrix": "imatrix",
    "lint": "quantize.linting",
    "merge": "gguf_tools.commands.functions",
    "open_checkpoint": "convert.weights",
    "parse_overrides": "quantize.plan.overrides",
    "quantize": "gguf_tools.commands.functions",
    "quantize_many": "quantize.pipeline",
    "read_suite": "imatrix.texts.suite",
    "read_values": "quantize.arrays",
    "refine": "imatrix.calibrate.refine.pipeline",
    "sensitivity": "imatrix.sensitivities.measure",
    "split": "gguf_tools.commands.functions",
    "upload": "gguf_tools.commands.functions",
}
"""Names that floors above this one define, and the modules that they are in: names, because a package imports
no package above it."""

_load = lazy_names(__name__, _HOMES)[0]


def __getattr__(name: str) -> Any:
    return _load(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
