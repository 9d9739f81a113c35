"""How a run goes, whatever it makes: threads, resuming, reuse, verifying, progress; shared by all fronts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gguf_tools.progress import Progress
from quantize.prepare import Preparation


@dataclass(frozen=True)
class RunOptions:
    """How to run; nothing here changes a byte of the output.

    n_threads  None: one per core
    restart    start over instead of resuming an interrupted run
    reuse      older GGUF files: tensors that were made of the same data are copied from them
    verify     check a sample of every tensor before the output gets its name
    progress   called once with what was decided; what it returns is then called with the bytes of every chunk
    """

    n_threads: int | None = None
    restart: bool = False
    reuse: Iterable[str | os.PathLike[str]] = ()
    verify: bool = False
    progress: Callable[[Preparation], Progress] | None = None
