"""How a run goes, whatever it makes: threads, resuming, reuse, verifying, progress; shared by all fronts.

A front takes its options as values, or their fields as keyword arguments: `with_choices` makes one of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from gguf_tools.argument_types import CheckedFields, Threads
from gguf_tools.cluster.address import Address
from gguf_tools.files.named_files import Paths, paths_of
from gguf_tools.findings import Tell, log
from gguf_tools.progress import NO_REPORT, Reporter, Shown
from gguf_tools.system.locks import usable_cores


@dataclass(frozen=True)
class RunOptions(CheckedFields):
    """How to run; nothing here changes a byte of the output.

    n_threads  None: one per core
    restart    start over instead of resuming an interrupted run
    reuse      older GGUF files, one or several: tensors that were made of the same data are copied from them
    verify     check a sample of every tensor before the output gets its name
    compiling  counts the kernels that are loaded or compiled; `progress` sees to it
    progress   True, a function, a bar of tqdm or rich, or a CancelToken
    scheduler  address of a Dask scheduler whose workers fill the outputs, or local:N for N processes here;
               of a calibration they round. None: threads of this process do
    calibrating  counts the seconds that a calibration would take one thread of this machine; `progress`
               sees to it
    tell       told what a user should know of a calibration, before it begins and at its end: it is called
               with each Finding. By default they go to the logger "gguf_tools"
    force      replace outputs that are there, and make anew those that are as asked already
    replace    replace outputs that are there and are not as asked, as llama-quantize does
    label      what `progress` says
    """

    n_threads: Threads | None = None
    restart: bool = False
    reuse: Paths = ()
    verify: bool = False
    compiling: Reporter = NO_REPORT
    progress: Shown = None
    scheduler: Address | None = field(default=None, kw_only=True)
    calibrating: Reporter = field(default=NO_REPORT, kw_only=True)
    tell: Tell = field(default=log, kw_only=True)
    force: bool = field(default=False, kw_only=True)
    replace: bool = field(default=False, kw_only=True)
    label: str = field(default="writing", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reuse", self.old_files)

    @property
    def old_files(self) -> tuple[Path, ...]:
        """The paths in `reuse`."""
        return tuple(paths_of("reuse", self.reuse, least=0))

    @property
    def threads(self) -> int:
        """How many threads to run: `n_threads`, or one for each core that this process may use."""
        return usable_cores() if self.n_threads is None else self.n_threads


class RunChoices(TypedDict, total=False):
    """The fields of RunOptions as keyword arguments."""

    n_threads: Threads | None
    restart: bool
    force: bool
    replace: bool
    reuse: Paths
    verify: bool
    scheduler: Address | None
    compiling: Reporter
    calibrating: Reporter
    tell: Tell
    progress: Shown
    label: str
