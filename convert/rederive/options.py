"""Options of making a file again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from gguf_tools.argument_types import CheckedFields, Count, Seed, Threads
from quantize.importances import ImportanceSource
from quantize.options import Calibrating


@dataclass(frozen=True)
class RederiveOptions(CheckedFields):
    """How to make a file again.

    importances   those that the file was made with: a path, what `imatrix.load` returns, or a mapping
    calibration   how the file was calibrated, with the text: `gguf_tools.Calibration`; None: it was not
    sample        make so many rows of each tensor; None: all
    seed          decides which rows; None: drawn anew, and told
    stop          stop at the first tensor that differs
    n_threads     None: one for each core
    allow_pickle  a source of .bin and .pt files may be read, as weights only
    """

    importances: ImportanceSource | None = None
    calibration: Calibrating | None = None
    sample: Count | None = None
    seed: Seed | None = None
    stop: bool = False
    n_threads: Threads | None = None
    allow_pickle: bool = False


class RederiveChoices(TypedDict, total=False):
    """The fields of RederiveOptions as keyword arguments."""

    importances: ImportanceSource | None
    calibration: Calibrating | None
    sample: Count | None
    seed: Seed | None
    stop: bool
    n_threads: Threads | None
    allow_pickle: bool
