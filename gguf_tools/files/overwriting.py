"""Rules for writing over files: no input, nobody else's file, no finished output without --force.

- A file that is named as an output and as something else is refused before anything is opened, whatever it is
  named as: `refuse_shared` compares files, not names, so links and other spellings count.
- An output that is there already is refused without --force, in Python without force=True. One that is what
  the same command would make is done instead: nothing is written. What an interrupted run has left is its
  own, and is resumed: a journal, a partial output or a folder of finished layers beside one of the outputs
  says so. `quantize` replaces its output and says so where all its options are llama-quantize's, because that
  does, and scripts that call it expect it.
- The files beside an output say themselves whose they are: partial_file.py, journal.py and atomic_write.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.format.shards import set_of


def refuse_shared(outputs: Mapping[str, Path], others: Iterable[Path]) -> None:
    """Raise BadRequest if one of `outputs` is one of `others`, one of their files, or another output.

    outputs  by the name that the message gives them
    others   inputs, and outputs that something else looks after; those that are not there count by name
    """
    if not outputs:
        return
    known = {identity: path for path in others for identity in _identities(path)}
    for name, output in outputs.items():
        identity = _identity(output)
        if identity in known:
            other = "" if known[identity] == output else f" ({known[identity]})"
            raise BadRequest(
                f"{name} {output}: is an input or another output of this command{other}; write somewhere else"
            )
        known[identity] = output


_OF_A_MODEL = re.compile(
    r".*\.(safetensors|bin|pth?|gguf|model|jinja|py)|.*(config|index|tokenizer|token|tokens_map|vocab).*\.json"
    r"|merges\.txt"
)
"""Files in a Hugging Face folder that a command may read; reports may lie in the same folder."""


def _identities(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the identities of a file; of a folder, those of its model; of a part of a set, all parts."""
    yield _identity(path)
    try:
        if path.is_dir():
            yield from (_identity(each) for each in path.iterdir() if _OF_A_MODEL.fullmatch(each.name))
        elif (parts := set_of(path)) is not None and path.is_file():
            yield from map(_identity, path.parent.glob(f"{escape(parts[0].name)}-*-of-*.gguf"))
    except (OSError, ValueError):
        return


def _identity(path: Path) -> tuple[Any, ...]:
    """Return device and inode of a file, or the absolute name of one that is not there."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return (os.path.abspath(path),)
    return status.st_dev, status.st_ino


def refuse_to_replace(outputs: Iterable[Path | None], *, force: bool) -> None:
    """Raise OutputError for an output that is a file already, unless it is a run's own or `force` is given.

    outputs  those of one run; None: one that isn't asked for
    """
    paths = [path for path in outputs if path is not None]
    if force or is_unfinished(paths):
        return
    for path in paths:
        if path.is_file():
            _forget_lock(path)
            raise OutputError(f"{path}: exists already; --force replaces it")


def _forget_lock(output: Path) -> None:
    """Remove what a run that was killed at its very end has left beside its output."""
    from gguf_tools.files import leftovers
    from gguf_tools.files.work_names import work_path

    leftovers.forget(work_path(output))


def is_unfinished(outputs: Iterable[Path]) -> bool:
    """Whether an interrupted run has left something beside one of its outputs, which it may go on from."""
    from gguf_tools.files import leftovers  # loads what no help needs
    from gguf_tools.files.work_names import work_path

    return any(leftovers.is_begun(path) or leftovers.is_unfinished(work_path(path)) for path in outputs)
