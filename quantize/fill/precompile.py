"""Precompiling: the kernels of a run, before its first chunk and several at a time.

numba compiles one function at a time in a process, and one takes seconds. So when compiling is what takes
long, other processes take kernels too, and this process loads what they leave in numba's cache. If they fail,
that only costs time: a kernel that is not in the cache is compiled where it is called.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import numpy as np

from gguf_tools.errors import ToolkitError
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.progress import NO_REPORT, Advance, Reporter
from quantize.fill.encode import RowSources
from quantize.fill.sources import FLOAT_DTYPES, rows_dtype
from quantize.formats import get_decoder, get_format
from quantize.formats.codecs import ignores_importances
from quantize.importances.weighting import ColumnWeights

_PATIENCE_SECONDS = 1.0
"""Time after which other processes help; loading kernels from the cache takes less."""

_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from quantize.fill.precompile import serve; serve()"


@dataclass(frozen=True)
class Encoding:
    """Facts that decide which kernels a tensor needs.

    source, target  names of ggml types
    is_weighted     whether the search uses importances
    """

    source: str
    target: str
    is_weighted: bool

    @classmethod
    def of(cls, sources: RowSources, tensor: str, target: GGMLType) -> Encoding:
        """Say how a tensor is encoded."""
        is_weighted = tensor in sources.importances and not ignores_importances(target.name)
        return cls(sources.tensors[tensor].type.name, target.name, is_weighted)

    def compile(self) -> None:
        """Load or compile the kernels, by encoding a block of zeros."""
        source, target = by_name(self.source), get_format(self.target)
        if source not in FLOAT_DTYPES:
            data = np.zeros((source.rows_interleaved, source.row_bytes(source.block_elems)), np.uint8)
            get_decoder(source)(data, source.block_elems)
        n_cols = target.type.block_elems
        rows = np.zeros((target.type.rows_interleaved, n_cols), rows_dtype(source))
        target.encode(rows, ColumnWeights(np.ones(n_cols, np.float32)) if self.is_weighted else None)


def compile_all(encodings: Iterable[Encoding], n_threads: int, progress: Reporter = NO_REPORT) -> None:
    """Have the kernels of all `encodings` compiled, by up to `n_threads` processes, this one among them.

    progress  counts them
    """
    wanted = tuple(dict.fromkeys(encodings))
    waiting = iter(wanted)  # next() on it is atomic
    progress.start(len(wanted), 0)
    stop = Event()
    helpers = [
        Thread(target=_help, args=(waiting, stop, progress.advance), daemon=True)
        for _ in range(min(n_threads, len(wanted)) - 1)
    ]
    for helper in helpers:
        helper.start()
    try:
        for encoding in waiting:
            _compile(encoding)
            progress.advance(1)
    finally:
        stop.set()
    for helper in helpers:
        helper.join()


def _help(waiting: Iterator[Encoding], stop: Event, advance: Advance = NO_REPORT.advance) -> None:
    """Have another process compile some of `waiting`, if compiling takes long."""
    if stop.wait(_PATIENCE_SECONDS):
        return
    command = [sys.executable, "-P", "-c", _SERVE, str(Path(__file__).parents[2])]
    with (
        suppress(OSError),
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # ctrl-C is for this process; the other ends with its input
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        while not stop.is_set() and (encoding := next(waiting, None)) is not None:
            words = encoding.source, encoding.target, int(encoding.is_weighted)
            print(*words, file=process.stdin, flush=True)
            if not process.stdout.readline():
                return
            advance(1)


def _compile(encoding: Encoding) -> None:
    with suppress(ToolkitError):  # the tensor that it is about will say so, with its name
        encoding.compile()


def serve() -> None:
    """Compile what each line of standard input names, and answer each with a line."""
    for line in sys.stdin:
        source, target, is_weighted = line.split()
        _compile(Encoding(source, target, is_weighted == "1"))
        print(target, flush=True)  # noqa: T201
