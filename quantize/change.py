"""A finished file in another form: the front that changes of layout and of grouping share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gguf_tools.files.inputs import gguf_inputs
from gguf_tools.format.shards import GGUFSet, open_gguf
from quantize.fill.encode import RowSources
from quantize.fill.outputs import Written
from quantize.prepare import Preparation
from quantize.report import found_lines, paths_text
from quantize.run import Run
from quantize.run_options import RunOptions


class Change(Protocol):
    """Change of a file, decided before a weight is read."""

    @property
    def preparation(self) -> Preparation: ...

    @property
    def is_needed(self) -> bool:
        """Whether the output would differ from the input."""

    def lines(self) -> Iterator[str]:
        """Yield what changes, for people."""

    def describe(self, *, written: bool) -> dict[str, Any]:
        """Return the change as plain data for JSON; `written`: the outputs have been written."""


AnyChange = TypeVar("AnyChange", bound=Change)


@dataclass(frozen=True)
class Changed(Generic[AnyChange]):
    """Result of a run.

    written   None when nothing was written, because no change was needed or the outputs were there already
    is_found  the outputs were there already, as asked
    """

    change: AnyChange
    written: Written | None
    seconds: float
    is_found: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.change.preparation.paths if self.written is not None or self.is_found else ()

    def lines(self) -> Iterator[str]:
        """Yield the lines of the change, then where the output is and how long it took."""
        if self.is_found:
            yield from found_lines(self.paths)
            return
        yield from self.change.lines()
        if self.written is None:
            return
        if self.written.n_resumed:
            done, n_chunks = self.written.n_resumed, self.written.n_chunks
            yield f"resumed an interrupted run: {done} of {n_chunks} chunks were done"
        yield f"wrote {paths_text(self.paths)} in {self.seconds:.1f} s"

    def describe(self) -> dict[str, Any]:
        """Return the change, and what was written, as plain data for JSON."""
        return self.change.describe(written=self.written is not None)


def change_file(
    source: str | os.PathLike[str],
    decide: Callable[[GGUFSet], AnyChange],
    sources_of: Callable[[AnyChange, GGUFSet], RowSources],
    run: RunOptions | None,
) -> Changed[AnyChange]:
    """Decide how a file or split set changes, and write it if it does.

    decide      (open source) -> the change
    sources_of  (change, open source) -> where the rows of the output come from
    raises      ToolkitError, see `Run.execute`
    """
    started = time.monotonic()
    with open_gguf(source) as opened:
        change = decide(opened)
        if not change.is_needed:
            return Changed(change, None, time.monotonic() - started)
        planned = Run(change.preparation, sources_of(change, opened), gguf_inputs(opened), started)
        result = planned.execute(run)
    return Changed(change, None if result.is_found else result.written, result.seconds, result.is_found)
