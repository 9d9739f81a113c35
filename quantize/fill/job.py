"""Job of one run: its outputs, and all that goes into them.

The bytes of a calibrated tensor depend on the whole model and a text, not on its own rows alone. Whoever
makes them (a `Calibrator`) has to see activations, which is above this package. The fill hands it the chunks
of those tensors, and keeps all else: journal, resuming, publishing, verifying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gguf_tools.files.inputs import AnyInput
from gguf_tools.format.shards import FileLayout
from quantize.fill.chunks import CHUNK_ELEMS, ChunkTable, ChunkTask
from quantize.fill.encode import RowSources
from quantize.fill.executors import Done


@dataclass(frozen=True)
class Output:
    """A file to be written: where, and every byte offset in it."""

    path: Path
    layout: FileLayout


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
        """Find the first row of a chunk whose bytes in the file are not those that were written, if any.

        path  of the file, whole, under whatever name
        """
        ...

    def lines(self) -> Iterable[str]:
        """Tell what a user should know of the calibration, once all is written."""
        ...


@dataclass(frozen=True)
class FillJob:
    """Job of one run: to fill a file, or the files of a split set.

    sources     where the rows of their tensors come from
    inputs      files that are being read, which no output may replace, and which must not change meanwhile
    calibrator  makes the calibrated tensors; None: there are none
    """

    outputs: tuple[Output, ...]
    sources: RowSources
    inputs: tuple[AnyInput, ...] = ()
    calibrator: Calibrator | None = None

    @property
    def layouts(self) -> Mapping[str, FileLayout]:
        """The layouts of the outputs, by their names."""
        return {output.path.name: output.layout for output in self.outputs}

    def table(self) -> ChunkTable:
        """Cut the outputs into chunks."""
        layouts = [output.layout for output in self.outputs]
        return ChunkTable.of(layouts, self.sources.rows_per_weights(), CHUNK_ELEMS)

    def is_calibrated(self, tensor: str) -> bool:
        return self.calibrator is not None and tensor in self.calibrator.names
