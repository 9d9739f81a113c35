"""Where an evaluation keeps what it has computed, until all is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf_tools.files.leftovers import forget
from gguf_tools.files.run_lock import in_use
from gguf_tools.spoken import spoken
from imatrix.evaluate.options import EvaluateOptions

_LASTING = Path("/var/tmp")
"""Folder for large temporary files: /tmp may be in memory, which hidden states are to spare."""


@contextmanager
def work_folders(options: EvaluateOptions, has_base: bool, n_models: int) -> Iterator[list[Path]]:
    """Give each model a name for its work folder; the folders go unless an error ends the run.

    Whatever else is in the folder that they are in stays there.

    has_base  whether the first is the base's
    """
    models = [f"model-{number}" for number in range(1, n_models + 1)]
    names = ["base", *models] if has_base else models
    if options.work is None:
        with TemporaryDirectory(prefix="evaluate-", dir=temporary_folder()) as folder:
            try:
                yield [Path(folder, name) for name in names]
            except KeyboardInterrupt as error:
                error.__notes__ = [spoken("nothing is kept without --json, --html or --work DIR")]
                raise
        return
    with in_use(options.work):
        yield [options.work / name for name in names]
        forget(options.work)


def temporary_folder() -> Path | None:
    """Choose where temporary folders go: $TMPDIR, or /var/tmp; None: Python decides."""
    if os.environ.get("TMPDIR") or not os.access(_LASTING, os.W_OK):
        return None
    return _LASTING
