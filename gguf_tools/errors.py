"""Every error that this project raises on purpose.

    ToolkitError
      UnreadableInput     an input that can't be read; an OSError, too
        MissingInput        ... because it is not there; a FileNotFoundError, too
          MissingModel        a GGUF file or a folder; a GGUFError and a CheckpointError, too
          MissingFile         a text, a recipe, a table; a BadRequest, too
          MissingMatrix       an importance matrix; a BadImportance, too
      GGUFError           a GGUF file, or a file that was to become one
        FormatError         not GGUF, or a header that contradicts itself
        TruncatedError      shorter than its own header says
        UnsupportedVersion  a GGUF version that we don't read
        OutputError         an output that can't be created, written or published
          BadTensor           a tensor of an output that is not what it should be
      CheckpointError     a Hugging Face folder
        MissingTensor       a rule needs a tensor that the checkpoint lacks
        UnexpectedTensors   tensors that no rule claims
        BadConfig           config.json lacks a key, or a value makes no sense
        UnsupportedCheckpoint  an architecture, dtype or storage scheme that we don't read
        BadTokenizer        tokenizer files that can't be carried over faithfully
      QuantError          encoding or decoding blocks
        ShapeError          a row length that the type can't hold
        NeedsImportance     a type that needs importances, and there are none
        BadImportance       an importance matrix that doesn't fit the tensor, or is not one
        BadWeights          NaN or infinity in a weight
        BadMoments          second moments that are no covariance
      PlanError           deciding which tensor gets which type
        BadOverride         an override that can't be parsed or applied
        NoFallback          no type can hold this row length
        BadRequest          options that contradict each other or the input
          BadArgument         an argument that means nothing, whatever the input is
            WrongType           ... because it is of another type; a TypeError, too
      ChangedInput        an input that was changed while it was read
      HubError            a model that the Hub doesn't give, or files that it doesn't take
      ClusterError        a scheduler that is gone, or workers that can't do the work
      ExecutionError      a task failed; carries the task and the cause

A message is one line: the file, the tensor or key, what was found, what was expected, and what
to do. It is written with flags, and says arguments instead in Python; see spoken.py. The command line prints
it as it is and exits with 1, for BadArgument with 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.spoken import spoken
from gguf_tools.text import printable

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self


class ToolkitError(Exception):
    """Base of all errors that are caused by the input or the environment, not by a bug."""

    def __str__(self) -> str:
        return printable(spoken(super().__str__()))


class GGUFError(ToolkitError):
    pass


class FormatError(GGUFError):
    pass


class TruncatedError(GGUFError):
    pass


class UnsupportedVersion(GGUFError):
    pass


class OutputError(GGUFError):
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
    pass


class MissingTensor(CheckpointError):
    pass


class UnexpectedTensors(CheckpointError):
    pass


class BadConfig(CheckpointError):
    pass


class UnsupportedCheckpoint(CheckpointError):
    pass


class BadTokenizer(CheckpointError):
    pass


class QuantError(ToolkitError):
    pass


class ShapeError(QuantError):
    pass


class NeedsImportance(QuantError):
    pass


class BadImportance(QuantError):
    pass


class BadWeights(QuantError):
    pass


class BadMoments(QuantError):
    pass


class BadActivation(BadImportance):
    """NaN or infinity in the activations of a model."""


class PlanError(ToolkitError):
    pass


class BadOverride(PlanError):
    pass


class NoFallback(PlanError):
    pass


class BadRequest(PlanError):
    pass


class BadArgument(BadRequest):
    pass


class WrongType(BadArgument, TypeError):
    """An argument of another type than the function takes."""


class AnotherModel(BadRequest):
    pass


class ChangedInput(ToolkitError):
    pass


class HubError(ToolkitError):
    pass


class ClusterError(ToolkitError):
    pass


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
