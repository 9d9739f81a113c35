"""Outputs that are there before a run: finished as it would make them, its own in part, or not to be touched.

A finished output of the same plan is done: its header is the one that the run would write, down to every
offset, and it was written after the last change of whatever it is made of. No program can put the time of a
change (ctime) back, so an input that was edited, replaced or downloaded since is noticed.

Everything else under an output's name is replaced with `force` alone. What an interrupted run of the same
outputs has left is its own; see gguf_tools/files/early_checks.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gguf_tools.errors import GGUFError
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.format.layout import FileLayout
from gguf_tools.format.reader import GGUFFile
from gguf_tools.system.files import NO_WAIT, open_file, read_at
from quantize.fill.job import FillJob, Output
from quantize.fill.provenance import PROVENANCE_KEY
from quantize.importances.files import StoredImportance, stored_inputs
from quantize.importances.text_sketch import SHA256_KEY
from quantize.run_options import RunOptions


def are_finished(job: FillJob, *, is_calibrated: bool) -> bool:
    """Whether the outputs of a job are there as it would make them, as far as headers and times can tell.

    is_calibrated  the bytes depend on a text, too, which the metadata name unless provenance is left out
    """
    outputs, sources = job.outputs, job.sources
    if sources.remote or not all(output.path.is_file() for output in outputs):
        return False
    importances = [resolved.matrix for resolved in sources.importances.values()]
    if not all(isinstance(each, StoredImportance) for each in importances):
        return False  # numbers in memory, which no file's time speaks for
    if is_calibrated and SHA256_KEY not in outputs[0].layout.metadata:
        return False
    made_of = [Path(each) for each in (*job.inputs, *stored_inputs(importances))]
    return _are_older(made_of, [output.path for output in outputs]) and all(map(_is_same, outputs))


def refuse_or_replace(job: FillJob, how: RunOptions) -> None:
    """Raise OutputError for outputs that are there and that a run may not replace.

    A file that is to be reused may be the one that is replaced. An input is refused by its writer.
    """
    reused, inputs = set(map(os.path.realpath, how.old_files)), set(map(os.path.realpath, job.inputs))
    outputs = {os.path.realpath(output.path): output.path for output in job.outputs}
    others = [path for real, path in outputs.items() if real not in inputs]
    refuse_to_replace(others, force=how.force or how.replace or not reused.isdisjoint(outputs))


def _are_older(made_of: Iterable[Path], outputs: Iterable[Path]) -> bool:
    """Whether files were last changed, renamed or replaced before any of the outputs was written."""
    try:
        written = min(path.stat().st_mtime_ns for path in outputs)
        return all(path.stat().st_ctime_ns < written for path in made_of)
    except OSError:
        return False


def _is_same(output: Output) -> bool:
    """Whether a file has the size and the header of an output, whatever its provenance says."""
    planned, path = output.layout, output.path
    try:
        if path.stat().st_size != planned.total_bytes:
            return False
        with GGUFFile(path) as file:
            provenance = file.metadata.get(PROVENANCE_KEY)
        if provenance is not None and PROVENANCE_KEY in planned.metadata:
            metadata = {**planned.metadata, PROVENANCE_KEY: provenance}
            planned = FileLayout.of(metadata, planned.tensors, endian=planned.endian, version=planned.version)
        return _start_of(path, len(planned.header)) == planned.header
    except (GGUFError, OSError):
        return False


def _start_of(path: Path, n_bytes: int) -> bytes:
    fd = open_file(path, os.O_RDONLY | NO_WAIT)
    try:
        return read_at(fd, n_bytes, 0)
    finally:
        os.close(fd)
