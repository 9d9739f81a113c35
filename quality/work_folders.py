"""Where an evaluation keeps what it has computed, until all is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import forward.work.work_folder as folders_of_models
from forward.work.work_folder import forget
from gguf_tools.errors import BadRequest
from gguf_tools.spoken import spoken
from quality.options import EvaluateOptions

_BASE = "base"
"""Name of the base's work folder."""

_LASTING = Path("/var/tmp")
"""Folder for large temporary files: /tmp may be in memory, which hidden states are to spare."""


@contextmanager
def work_folders(options: EvaluateOptions, has_base: bool, n_models: int) -> Iterator[list[Path]]:
    """Give each model a name for its work folder; the folders go unless an error ends the run.

    Whatever else is in the folder that they are in stays there.

    has_base  whether the first is the base's
    """
    models = [f"model-{number}" for number in range(1, n_models + 1)]
    names = [_BASE, *models] if has_base else models
    if options.work is None:
        with TemporaryDirectory(prefix="evaluate-", dir=temporary_folder()) as folder:
            try:
                yield [Path(folder, name) for name in names]
            except KeyboardInterrupt as error:
                error.__notes__ = [spoken("nothing is kept without --json, --html or --work DIR")]
                raise
        return
    try:
        options.work.mkdir(exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{options.work}: can't be written ({error.strerror})") from error
    outputs = [options.work / name for name in names]
    yield outputs
    for name in (_BASE, *models):  # a run that had no kept states of its base has left those of the base
        forget(options.work / name)
    with suppress(OSError):  # it is not empty
        options.work.rmdir()


def forget_folders(work: Path) -> None:
    """Delete what an evaluation that was interrupted has left in `work`; whatever else is there stays."""
    for path in sorted(work.glob("*.work")):
        forget(path.with_suffix(""))
    with suppress(OSError):  # it is not empty, or not there
        work.rmdir()


def is_unfinished(work: Path) -> bool:
    """Tell whether an evaluation that was interrupted has left its folders in `work`."""
    return any(folders_of_models.is_unfinished(path.with_suffix("")) for path in work.glob("*.work"))


def temporary_folder() -> Path | None:
    """Choose where temporary folders go: $TMPDIR, or /var/tmp; None: Python decides."""
    if os.environ.get("TMPDIR") or not os.access(_LASTING, os.W_OK):
        return None
    return _LASTING
