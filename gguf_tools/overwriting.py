"""Overwriting: a command refuses to replace an output that is there already, unless it is told to.

What an interrupted run of the same command has left is its own, and is resumed: a journal, a partial output
or a folder of finished layers beside one of the outputs says so. `quantize` alone replaces what is there and
says so, because llama-quantize does, and scripts that call it expect it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.journal import JOURNAL_SUFFIX
from gguf_tools.writer import PARTIAL_SUFFIX

_UNFINISHED = (JOURNAL_SUFFIX, PARTIAL_SUFFIX, ".work")
"""Endings of what an unfinished run keeps beside its outputs."""


def add_force(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Give a parser --force, for what `refuse_to_replace` refuses."""
    parser.add_argument("--force", action="store_true", help="replace outputs that are there already")


def refuse_to_overwrite_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Raise BadRequest, before anything is computed, if `output` is one of `inputs`."""
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise BadRequest(f"{output}: is an input, expected another file to write")


def refuse_to_replace(outputs: Iterable[Path | None], *, force: bool) -> None:
    """Raise OutputError for an output that is a file already, unless it is a run's own or `force` is given.

    outputs  those of one run; None: one that isn't asked for
    """
    paths = [path for path in outputs if path is not None]
    if force or any(path.with_name(path.name + end).exists() for path in paths for end in _UNFINISHED):
        return
    for path in paths:
        if path.is_file():
            raise OutputError(f"{path}: exists already; --force replaces it")
