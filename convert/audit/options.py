"""Options of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from gguf_tools.argument_types import CheckedFields, Threads

MOST_WEIGHTS_READ = 10_000_000_000
"""Weights of a model up to which all are read unless asked otherwise, if the base is on this machine."""


@dataclass(frozen=True)
class AuditOptions(CheckedFields):
    """How to audit a file.

    every_row     read all rows; False: runs of rows, spread over every matrix. None: all, unless the base is
                  on the Hub or the model has more than MOST_WEIGHTS_READ weights
    n_threads     how many tensors are compared at the same time; None: one for each core
    ignore        patterns of tensors and keys, as fnmatch takes them, whose findings count as notes
    allow_pickle  a base of .bin and .pt files may be read, as weights only
    """

    every_row: bool | None = None
    n_threads: Threads | None = None
    ignore: tuple[str, ...] = ()
    allow_pickle: bool = False


class AuditChoices(TypedDict, total=False):
    """The fields of AuditOptions as keyword arguments."""

    every_row: bool | None
    n_threads: Threads | None
    ignore: tuple[str, ...]
    allow_pickle: bool
