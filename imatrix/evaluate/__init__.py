"""How good is a quantized model? Divergence from its base, where it drifts away, and what is wrong.

>>> import gguf_tools
>>> evaluation = gguf_tools.evaluate("DeepSeek-V2-Lite", "text.txt", ["model-bf16.gguf"])
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
    from imatrix.evaluate.auditing.options import AuditOptions
    from imatrix.evaluate.auditing.pipeline import audit
    from imatrix.evaluate.auditing.report import AuditReport
    from imatrix.evaluate.evaluation import Evaluation
    from imatrix.evaluate.options import EvaluateOptions, LogitsFile
    from imatrix.evaluate.pipeline import evaluate, evaluate_suite
    from imatrix.evaluate.suite.result import SuiteEvaluation
    from imatrix.forward.options import ForwardOptions
    from imatrix.texts.suite import Suite, read_suite
    from imatrix.texts.tokens import Cut

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
    "AuditOptions": "imatrix.evaluate.auditing.options",
    "AuditReport": "imatrix.evaluate.auditing.report",
    "Cut": "imatrix.texts.tokens",
    "EvaluateOptions": "imatrix.evaluate.options",
    "Evaluation": "imatrix.evaluate.evaluation",
    "ForwardOptions": "imatrix.forward.options",
    "LogitsFile": "imatrix.evaluate.options",
    "Reporter": "gguf_tools.progress",
    "Suite": "imatrix.texts.suite",
    "SuiteEvaluation": "imatrix.evaluate.suite.result",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "audit": "imatrix.evaluate.auditing.pipeline",
    "evaluate": "imatrix.evaluate.pipeline",
    "evaluate_suite": "imatrix.evaluate.pipeline",
    "read_suite": "imatrix.texts.suite",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
