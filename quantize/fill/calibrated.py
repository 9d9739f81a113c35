"""Calibrated tensors: their bytes depend on the whole model and a text, not on their own rows alone.

Whoever makes them (a `Calibrator`) has to see activations, which is above this package. The fill hands it the
chunks of those tensors, and keeps all else: journal, resuming, publishing, verifying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from quantize.fill.chunks import ChunkTask
from quantize.fill.executors.base import Done

ERRORS_RISE = 2.0
"""Factor by which the relative error of a calibrated tensor may exceed its type's limit. Plain errors of
weights rise by 30 to 60% on purpose: they go where the activations are small."""


class Calibrator(Protocol):
    """Makes the calibrated tensors of a run.

    names   of the tensors, as they are called in the output
    about   what decides their bytes besides sources, plan and importances, as JSON data made to be compared
    digest  of all that decides their bytes besides their own rows, shape and type; uint64, not 0
    """

    names: frozenset[str]
    about: Mapping[str, Any]
    digest: int

    def run(self, tasks: Iterable[ChunkTask], partials: Mapping[int, Path], done: Done) -> None:
        """Write the chunks, in any order, and call `done` with the number and the digest of each one's rows.

        tasks     chunks of calibrated tensors that are not done
        partials  the file that each output grows in, by the output's number
        raises    ToolkitError
        """
        ...

    def damaged_row(self, tensor: str, path: Path) -> int | None:
        """Return the first row of a chunk whose bytes in the file are not those that were written, if any.

        path  of the file, whole, under whatever name
        """
        ...

    def lines(self) -> Iterable[str]:
        """Tell what a user should know of the calibration, once all is written."""
        ...
