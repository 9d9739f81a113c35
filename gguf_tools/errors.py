"""Every error that this project raises on purpose.

A message is one line: the file, the tensor or key, what was found, what was expected, and what
to do. It is written with flags, and says arguments instead in Python; see choices.py. The command line prints
it as it is and exits with 1, for BadArgument with 2.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from gguf_tools.choices import spoken
from gguf_tools.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self


class ToolkitError(Exception):
    """Base of all errors that are caused by the input or the environment, not by a bug."""

    @classmethod
    @contextmanager
    def from_os(cls, what: str) -> Iterator[None]:
        """Raise this error in place of an OSError of the block: `what`, and the system's reason.

        The reason stands in brackets, or behind the colon that `what` ends with.
        """
        try:
            yield
        except OSError as error:
            reason = error.strerror if what.endswith(":") else f"({error.strerror})"
            raise cls(f"{what} {reason}") from error

    def __str__(self) -> str:
        return printable(spoken(super().__str__()))


class GGUFError(ToolkitError):
    """A GGUF file, or a file that was to become one."""


class FormatError(GGUFError):
    """A file that is not GGUF, or a header that contradicts itself."""


class TruncatedError(GGUFError):
    """A file that is shorter than its own header says."""


class UnsupportedVersion(GGUFError):
    """A GGUF version that we don't read."""


class OutputError(GGUFError):
    """An output that can't be created, written or published."""

    @classmethod
    def in_the_way(cls, path: Path, why: str) -> Self:
        """Return the error for somebody else's file under a name that an output needs."""
        return cls(f"{path}: is in the way, and {why}; move it away, or give the output another name")


class BadTensor(OutputError):
    """A tensor of an output that is not what it should be; `tensor` is its name."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class CheckpointError(ToolkitError):
    """A Hugging Face folder."""


class MissingTensor(CheckpointError):
    """A rule that needs a tensor, and a checkpoint that lacks it."""


class UnexpectedTensors(CheckpointError):
    """Tensors that no rule claims."""


class BadConfig(CheckpointError):
    """A config.json that lacks a key, or has a value that makes no sense."""


class UnsupportedCheckpoint(CheckpointError):
    """An architecture, dtype or storage scheme that we don't read."""


class BadTokenizer(CheckpointError):
    """Tokenizer files that can't be carried over faithfully."""


class QuantError(ToolkitError):
    """Blocks that can't be encoded or decoded."""


class ShapeError(QuantError):
    """A row length that the type can't hold."""


class NeedsImportance(QuantError):
    """A type that needs importances, and there are none."""


class BadImportance(QuantError):
    """An importance matrix that doesn't fit the tensor, or is not one."""


class BadWeights(QuantError):
    """NaN or infinity in a weight."""


class BadMoments(QuantError):
    """Second moments that are no covariance."""


class BadActivation(BadImportance):
    """NaN or infinity in the activations of a model."""


class PlanError(ToolkitError):
    """A decision that can't be made: which tensor gets which type."""


class BadOverride(PlanError):
    """An override that can't be parsed or applied."""


class NoFallback(PlanError):
    """A row length that no type can hold."""


class BadRequest(PlanError):
    """Options that contradict each other or the input."""


class BadArgument(BadRequest):
    """An argument that means nothing, whatever the input is."""


class WrongType(BadArgument, TypeError):
    """An argument of another type than the function takes."""


class AnotherModel(BadRequest):
    """A file of another model than the one that it is compared with."""


class ChangedInput(ToolkitError):
    """An input that was changed while it was read."""


class Cancelled(ToolkitError):
    """A run that a CancelToken has ended; what is finished stays for the next one."""


class HubError(ToolkitError):
    """A model that the Hub doesn't give, or files that it doesn't take."""


class ClusterError(ToolkitError):
    """A scheduler that is gone, or workers that can't do the work."""


class ExecutionError(ToolkitError):
    """A chunk that could not be filled.

    `task` is the ChunkTask, `__cause__` the error itself.
    """

    def __init__(self, message: str, task: object) -> None:
        super().__init__(message)
        self.task = task


class UnreadableInput(ToolkitError, OSError):
    """An input that can't be read, whatever is in it."""


class MissingInput(UnreadableInput, FileNotFoundError):
    """An input that is not there."""


class MissingModel(GGUFError, CheckpointError, MissingInput):
    """A GGUF file or a Hugging Face folder that is not there."""


class MissingFile(BadRequest, MissingInput):
    """A text, a recipe, a table of numbers that is not there."""


class MissingMatrix(BadImportance, MissingInput):
    """An importance matrix that is not there."""
