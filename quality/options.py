"""What to evaluate, and who is told how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forward.options import ForwardChoices, ForwardOptions
from forward.text import Cut, CutChoices
from gguf_tools.findings import Finding

SHORTEST_CHUNK = 4
"""Tokens of a chunk of which something can be measured."""


@dataclass(frozen=True)
class LogitsFile:
    """A file of log probabilities that llama-perplexity has written, which can take a base's place."""

    path: Path


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate, and how.

    cut      the part of the text that is used
    forward  how models are computed; `memory_bytes` is shared by all of them
    work     folder for finished layers, from which an interrupted run resumes; what is kept there is deleted
             when all is done. None: a temporary one, without resuming, in $TMPDIR or /var/tmp
    restart  start over instead of resuming
    logits   file to write the base's log probabilities to, for llama-perplexity; None: no file
    keep     folder where the base's states are kept, and found by later runs; None: they aren't kept
    """

    cut: Cut = field(default_factory=Cut)
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    work: Path | None = None
    restart: bool = False
    logits: Path | None = None
    keep: Path | None = None

    def __post_init__(self) -> None:
        for name in ("work", "logits", "keep"):
            if getattr(self, name) is not None:  # a caller may have texts
                object.__setattr__(self, name, Path(getattr(self, name)))


class EvaluateChoices(CutChoices, ForwardChoices, total=False):
    """The fields of EvaluateOptions, Cut and ForwardOptions as keyword arguments."""

    cut: Cut
    forward: ForwardOptions
    work: Path | None
    restart: bool
    logits: Path | None
    keep: Path | None


class Reporter(Protocol):
    """Is told how far an evaluation has come."""

    def tell(self, finding: Finding) -> None:
        """A user should know this of the text before anything is computed."""
        ...

    def start(self, n_layers: int, done: int) -> None:
        """The run begins; `done` layers of `n_layers`, those of all models, are left from an earlier one."""
        ...

    def advance(self, layers: float) -> None:
        """This share of a layer, 0 to 1, has been computed since the last call."""
        ...

    def comparing(self, chunk: int, n_chunks: int) -> None:
        """The logits of so many chunks have been compared."""
        ...


class NoReport:
    """A Reporter that ignores everything."""

    def tell(self, finding: Finding) -> None:
        pass

    def start(self, n_layers: int, done: int) -> None:
        pass

    def advance(self, layers: float) -> None:
        pass

    def comparing(self, chunk: int, n_chunks: int) -> None:
        pass
