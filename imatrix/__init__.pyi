"""Public names of imatrix and their homes, for type checkers and for `gguf_tools.lazy`."""

from gguf_tools import __version__ as __version__
from gguf_tools.errors import ToolkitError as ToolkitError
from imatrix.collecting import collect as collect
from imatrix.forward.options import ForwardOptions as ForwardOptions
from imatrix.options import Collected as Collected
from imatrix.options import CollectOptions as CollectOptions
from imatrix.store import ImportanceFile as ImportanceFile
from imatrix.store import load as load
from imatrix.store import save as save
from imatrix.texts.tokens import Cut as Cut
from quantize.importances.entries import ImportanceFormat as ImportanceFormat
from quantize.importances.entries import Importances as Importances
