"""Public names of convert and their homes, for type checkers and for `gguf_tools.lazy`."""

from convert.options import ConvertOptions as ConvertOptions
from convert.pipeline import convert as convert
from convert.weights import open_checkpoint as open_checkpoint
from convert.weights.model_weights import ModelWeights as ModelWeights
from gguf_tools import __version__ as __version__
from gguf_tools.errors import ToolkitError as ToolkitError
from quantize.options import Calibrating as Calibrating
from quantize.plan.decide import KeptGrid as KeptGrid
from quantize.plan.overrides import Override as Override
from quantize.plan.plan import PlanOptions as PlanOptions
from quantize.plan.recipe_files import Mixture as Mixture
from quantize.prepare import Preparation as Preparation
from quantize.run import Result as Result
from quantize.run_options import RunOptions as RunOptions
