"""Options of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from convert.options import AdapterChoices, AdapterOptions
from gguf_tools.argument_types import CheckedFields
from imatrix.forward.options import CutChoices, ForwardChoices, ForwardOptions
from imatrix.texts.tokens import Cut

SHORTEST_CHUNK = 4
"""Tokens of a chunk of which something can be measured."""


@dataclass(frozen=True)
class LogitsFile:
    """A file of log probabilities, which can take a base's place.

    path  as llama-perplexity has written it
    """

    path: Path


@dataclass(frozen=True)
class EvaluateOptions(AdapterOptions, CheckedFields):
    """Options of an evaluation, with those of an adapter for a base that is a folder.

    cut      the part of the text that is used
    forward  how models are computed; `memory_bytes` is shared by all of them
    work     folder for finished layers, from which an interrupted run resumes; what is kept there is deleted
             when all is done. None: a temporary one, without resuming, in $TMPDIR or /var/tmp
    restart  start over instead of resuming
    logits   file to write the base's log probabilities to, for llama-perplexity; None: no file
    force    replace `logits` if it is there
    keep     folder where the base's states are kept, and found by later runs; None: they aren't kept
    against  one more file, which each of the others is compared with; it may be one of them. None: no file
    noise_floor  also measure what the base itself loses to rounding, as two more models
    """

    cut: Cut = field(default_factory=Cut)
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    work: Path | None = None
    restart: bool = False
    logits: Path | None = None
    force: bool = False
    keep: Path | None = None
    against: Path | None = None
    noise_floor: bool = False


class EvaluateChoices(AdapterChoices, CutChoices, ForwardChoices, total=False):
    """The fields of EvaluateOptions, and of the Cut and ForwardOptions in it, as keyword arguments."""

    cut: Cut
    forward: ForwardOptions
    work: Path | None
    restart: bool
    logits: Path | None
    force: bool
    keep: Path | None
    against: Path | None
    noise_floor: bool
