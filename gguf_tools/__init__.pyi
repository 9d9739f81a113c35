"""What type checkers see of the package: the names that are loaded when they are used, too."""

import imatrix as imatrix
from convert.options import ConvertOptions as ConvertOptions
from convert.pipeline import convert as convert
from convert.sources import SourceOptions as SourceOptions
from convert.weights import open_checkpoint as open_checkpoint
from convert.weights.model_weights import ModelWeights as ModelWeights
from gguf_tools import edit as edit
from gguf_tools.commands.functions import calibrate as calibrate
from gguf_tools.commands.functions import card as card
from gguf_tools.commands.functions import cook as cook
from gguf_tools.commands.functions import merge as merge
from gguf_tools.commands.functions import quantize as quantize
from gguf_tools.commands.functions import split as split
from gguf_tools.commands.functions import upload as upload
from gguf_tools.errors import (
    AnotherModel as AnotherModel,
)
from gguf_tools.errors import (
    BadActivation as BadActivation,
)
from gguf_tools.errors import (
    BadArgument as BadArgument,
)
from gguf_tools.errors import (
    BadConfig as BadConfig,
)
from gguf_tools.errors import (
    BadImportance as BadImportance,
)
from gguf_tools.errors import (
    BadMoments as BadMoments,
)
from gguf_tools.errors import (
    BadOverride as BadOverride,
)
from gguf_tools.errors import (
    BadRequest as BadRequest,
)
from gguf_tools.errors import (
    BadTensor as BadTensor,
)
from gguf_tools.errors import (
    BadTokenizer as BadTokenizer,
)
from gguf_tools.errors import (
    BadWeights as BadWeights,
)
from gguf_tools.errors import (
    ChangedInput as ChangedInput,
)
from gguf_tools.errors import (
    CheckpointError as CheckpointError,
)
from gguf_tools.errors import (
    ClusterError as ClusterError,
)
from gguf_tools.errors import (
    ExecutionError as ExecutionError,
)
from gguf_tools.errors import (
    FormatError as FormatError,
)
from gguf_tools.errors import (
    GGUFError as GGUFError,
)
from gguf_tools.errors import (
    HubError as HubError,
)
from gguf_tools.errors import (
    MissingFile as MissingFile,
)
from gguf_tools.errors import (
    MissingInput as MissingInput,
)
from gguf_tools.errors import (
    MissingMatrix as MissingMatrix,
)
from gguf_tools.errors import (
    MissingModel as MissingModel,
)
from gguf_tools.errors import (
    MissingTensor as MissingTensor,
)
from gguf_tools.errors import (
    NeedsImportance as NeedsImportance,
)
from gguf_tools.errors import (
    NoFallback as NoFallback,
)
from gguf_tools.errors import (
    OutputError as OutputError,
)
from gguf_tools.errors import (
    PlanError as PlanError,
)
from gguf_tools.errors import (
    QuantError as QuantError,
)
from gguf_tools.errors import (
    ShapeError as ShapeError,
)
from gguf_tools.errors import (
    ToolkitError as ToolkitError,
)
from gguf_tools.errors import (
    TruncatedError as TruncatedError,
)
from gguf_tools.errors import (
    UnexpectedTensors as UnexpectedTensors,
)
from gguf_tools.errors import (
    UnreadableInput as UnreadableInput,
)
from gguf_tools.errors import (
    UnsupportedCheckpoint as UnsupportedCheckpoint,
)
from gguf_tools.errors import (
    UnsupportedVersion as UnsupportedVersion,
)
from gguf_tools.errors import (
    WrongType as WrongType,
)
from gguf_tools.files.partial_file import GGUFWriter as GGUFWriter
from gguf_tools.format.ggml_types import GGMLType as GGMLType
from gguf_tools.format.layout import FileLayout as FileLayout
from gguf_tools.format.reader import GGUFFile as GGUFFile
from gguf_tools.format.reader import GGUFSource as GGUFSource
from gguf_tools.format.shards import GGUFSet as GGUFSet
from gguf_tools.format.shards import open_gguf as open_gguf
from gguf_tools.format.tensors import TensorInfo as TensorInfo
from gguf_tools.format.values import Kind as Kind
from gguf_tools.format.values import Metadata as Metadata
from gguf_tools.format.values import Value as Value
from gguf_tools.progress import ProgressState as ProgressState
from gguf_tools.progress import Reporter as Reporter
from imatrix.calibrate.calibration import Calibration as Calibration
from imatrix.calibrate.refine.options import RefineOptions as RefineOptions
from imatrix.calibrate.refine.pipeline import refine as refine
from imatrix.calibrate.refine.result import Refinement as Refinement
from imatrix.evaluate.auditing.options import AuditOptions as AuditOptions
from imatrix.evaluate.auditing.pipeline import audit as audit
from imatrix.evaluate.auditing.report import AuditReport as AuditReport
from imatrix.evaluate.evaluation import Evaluation as Evaluation
from imatrix.evaluate.options import EvaluateOptions as EvaluateOptions
from imatrix.evaluate.options import LogitsFile as LogitsFile
from imatrix.evaluate.pipeline import evaluate as evaluate
from imatrix.evaluate.pipeline import evaluate_suite as evaluate_suite
from imatrix.evaluate.suite.result import SuiteEvaluation as SuiteEvaluation
from imatrix.forward.options import ForwardOptions as ForwardOptions
from imatrix.options import CollectOptions as CollectOptions
from imatrix.sensitivities.measure import sensitivity as sensitivity
from imatrix.sensitivities.options import SensitivityOptions as SensitivityOptions
from imatrix.texts.suite import Suite as Suite
from imatrix.texts.suite import read_suite as read_suite
from imatrix.texts.tokens import Cut as Cut
from quantize.arrays import decode as decode
from quantize.arrays import encode as encode
from quantize.arrays import read_values as read_values
from quantize.calibration import Calibrating as Calibrating
from quantize.linting import LintReport as LintReport
from quantize.linting import lint as lint
from quantize.options import QuantizeOptions as QuantizeOptions
from quantize.pipeline import quantize_many as quantize_many
from quantize.plan.decide import KeptGrid as KeptGrid
from quantize.plan.overrides import Override as Override
from quantize.plan.overrides import parse_overrides as parse_overrides
from quantize.plan.plan import PlanOptions as PlanOptions
from quantize.plan.recipe_files import Mixture as Mixture
from quantize.plan.sensitivities import Sensitivities as Sensitivities
from quantize.prepare import Preparation as Preparation
from quantize.run import Result as Result
from quantize.run_options import RunOptions as RunOptions

__version__: str
