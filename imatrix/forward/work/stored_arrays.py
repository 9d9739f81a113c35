"""Arrays in files of a work folder, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gguf_tools.errors import OutputError
from gguf_tools.files.owned_folder import write_whole_of

if TYPE_CHECKING:
    from imatrix.forward.observe import Arrays


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays to a file, and bring it to the disk; raises OutputError."""
    write_whole_of(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def load_arrays(path: Path) -> Arrays:
    """Return the arrays of a file that was whole when the run began.

    raises  OutputError for a file that another program has changed meanwhile
    """
    try:
        with np.load(path) as stored:
            return dict(stored)
    except Exception as error:  # numpy and zipfile raise all sorts
        raise OutputError(f"{path}: can't be read ({error}); was it changed meanwhile?") from error
