"""How good is a quantized model? Divergence from its base, where it drifts away, and what is wrong.

>>> import quality
>>> evaluation = quality.evaluate("DeepSeek-V2-Lite", "text.txt", ["model-bf16.gguf"])
>>> evaluation.models[0].divergence.kld.mean.value < 0.001
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from gguf_tools import __version__
    from gguf_tools.errors import ToolkitError
    from gguf_tools.progress import Reporter
    from imatrix.forward.options import ForwardOptions
    from imatrix.texts.suite import Suite, read_suite
    from imatrix.texts.tokens import Cut
    from quality.auditing.options import AuditOptions
    from quality.auditing.pipeline import audit
    from quality.auditing.report import AuditReport
    from quality.evaluation import Evaluation
    from quality.options import EvaluateOptions, LogitsFile
    from quality.pipeline import evaluate, evaluate_suite
    from quality.suite.result import SuiteEvaluation

__all__ = [
    "AuditOptions",
    "AuditReport",
    "Cut",
    "EvaluateOptions",
    "Evaluation",
    "ForwardOptions",
    "LogitsFile",
    "Reporter",
    "Suite",
    "SuiteEvaluation",
    "ToolkitError",
    "__version__",
    "audit",
    "evaluate",
    "evaluate_suite",
    "read_suite",
]

_HOMES = {
    "AuditOptions": "quality.auditing.options",
    "AuditReport": "quality.auditing.report",
    "Cut": "imatrix.texts.tokens",
    "EvaluateOptions": "quality.options",
    "Evaluation": "quality.evaluation",
    "ForwardOptions": "imatrix.forward.options",
    "LogitsFile": "quality.options",
    "Reporter": "gguf_tools.progress",
    "Suite": "imatrix.texts.suite",
    "SuiteEvaluation": "quality.suite.result",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "audit": "quality.auditing.pipeline",
    "evaluate": "quality.pipeline",
    "evaluate_suite": "quality.pipeline",
    "read_suite": "imatrix.texts.suite",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
