"""Which files of a folder belong to a model, and may be shown to the world with it.

A folder of outputs also has what other runs are working on, notes, and links to elsewhere. So a file is taken
because its name says what it is; everything else is named and stays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.files.journal import JOURNAL_SUFFIX
from gguf_tools.files.partial_file import PARTIAL_SUFFIX

PATTERNS = (
    "*.gguf", "*.imatrix", "*.dat", "*.safetensors",
    "README.md", "SHA256SUMS", "LICENSE*", "NOTICE*", "*.license",
    "*.losses.json", "*.evaluation.json", "*.html", "*.svg", "*.png", "*.csv",
    "config.json", "generation_config.json", "*tokenizer*.json", "*.index.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "*.jinja", "*.model",
)  # fmt: skip
"""Quantized files and what they were made with; what speaks of them; and a checkpoint's own files."""

UNFINISHED = (PARTIAL_SUFFIX, JOURNAL_SUFFIX)
"""Endings of outputs that are being written, which are never taken."""

_IN_EDIT = ".undo"


def files_of_a_model(folder: Path, include: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that belong to a model, and the names of the others in it.

    include  patterns of names that are taken besides; a leading dot has to be named
    raises   BadRequest for a link to what is outside of the folder, and for a file whose header is being
             edited
    """
    taken: list[Path] = []
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() or path.name.endswith(UNFINISHED) or not _matches(path.name, include):
            left_out.append(path.name + "/" * path.is_dir())
            continue
        _check_link(folder, path)
        if not path.is_file():
            left_out.append(path.name)
            continue
        if path.with_name(path.name + _IN_EDIT).exists():
            raise BadRequest(
                f"{path}: {path.name}{_IN_EDIT} says that it is being edited; give the command that edits it"
                " again"
            )
        taken.append(path)
    return taken, left_out


def _matches(name: str, include: Sequence[str]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in include):
        return not name.startswith(".") or any(pattern.startswith(".") for pattern in include)
    return not name.startswith(".") and any(fnmatchcase(name, pattern) for pattern in PATTERNS)


def _check_link(folder: Path, path: Path) -> None:
    """Raise BadRequest for a link by which a file from elsewhere would be uploaded."""
    if not path.is_symlink():
        return
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise BadRequest(
            f"{path}: is a link to {target}, outside of the folder; name the file itself to upload it,"
            " or take the link away"
        )
