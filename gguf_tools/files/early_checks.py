"""Checks before hours of work: whether outputs can and may be written, and whether a disk has the room.

No input is written over, nobody else's file, and no finished output without --force:

- A file that is named as an output and as something else is refused before anything is opened, whatever it is
  named as: `refuse_shared` compares files, not names, so links and other spellings count.
- An output that is there already is refused without --force, in Python without force=True. One that is what
  the same command would make is done instead: nothing is written. What an interrupted run has left is its
  own, and is resumed: a journal, a partial output or a folder of finished layers beside one of the outputs
  says so. `quantize` replaces its output and says so where all its options are llama-quantize's, because that
  does, and scripts that call it expect it.
- The files beside an output say themselves whose they are: partial_file.py, journal.py and named_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from gguf_tools.errors import BadRequest, MissingModel, OutputError
from gguf_tools.files.named_files import output_path, read_corpus
from gguf_tools.format.shards import set_of
from gguf_tools.system import files
from gguf_tools.text import size_text


def refuse_early(
    outputs: Iterable[Path | None] = (),
    texts: Iterable[Path | None] = (),
    models: Iterable[Path | None] = (),
    *,
    folders: bool = False,
) -> None:
    """Refuse what can be seen at once to be missing or in the way, before anything heavy is loaded.

    None stands for one that isn't asked for.

    folders  a text may be a folder, which is not looked into
    raises   OutputError for an output that can't be written, BadRequest for a text that can't be read,
             MissingModel for a model that isn't there
    """
    for output in outputs:
        if output is not None:
            refuse_unwritable(output)
    for text in texts:
        if text is not None and not (folders and text.is_dir()):
            read_corpus(text)
    for model in models:
        if model is not None:
            refuse_missing_model(model)


def refuse_missing_model(path: Path) -> None:
    """Raise MissingModel for a GGUF file or a folder that isn't there."""
    if not path.exists():
        raise MissingModel(f"{path}: no such file or folder")


def refuse_unwritable(output: Path) -> None:
    """Raise OutputError for a file whose folder isn't there or closed, or for a folder that is closed."""
    found = output_path(output, may_be_folder=True)
    folder = found if found.is_dir() else found.parent
    if not folder.is_dir():
        raise OutputError(f"{output}: there is no folder {folder}; create it first")
    with OutputError.from_os(f"{output}: can't be written"), TemporaryFile(dir=folder):
        pass


def nearest_folder(path: Path) -> Path:
    """Find the folder that is there and that a path is in, or will be."""
    return next(each for each in (path, *files.absolute(path).parents) if each.is_dir())


def refuse_small_disk(folders: Iterable[Path], n_bytes: int, what: str, remedy: str) -> None:
    """Raise OutputError unless the disk has room for `n_bytes` in folders of a run, all together.

    What earlier runs have left in them counts as room.

    what    takes the room, for the message
    remedy  what to do
    """
    paths = list(folders)
    there = 0
    for path in (path for folder in paths if folder.is_dir() for path in folder.iterdir()):
        with suppress(OSError):
            there += files.allocated_bytes(path)
    with OutputError.from_os(f"{paths[0]}: can't be written"):
        free = files.free_bytes(nearest_folder(paths[0]))
    if n_bytes - there > free:
        needed = size_text(n_bytes - there)
        left = size_text(free)
        raise OutputError(f"{paths[0]}: {what} need {needed}, and the disk has {left} left; {remedy}")


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
    """Return device and inode of a file, or the name of one that is not there."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return (files.name_key(path),)
    return status.st_dev, status.st_ino


def refuse_to_replace(outputs: Iterable[Path | None], *, force: bool) -> None:
    """Raise OutputError for an output that is a file already, unless it is a run's own or `force` is given.

    outputs  those of one run; None: one that isn't asked for
    """
    paths = [path for path in outputs if path is not None]
    if force or is_unfinished(paths):
        return
    from gguf_tools.files import leftovers
    from gguf_tools.files.owned_folder import work_path

    for path in paths:
        if path.is_file():
            leftovers.forget(work_path(path))  # of a run that was killed at its very end
            raise OutputError(f"{path}: exists already; --force replaces it")


def is_unfinished(outputs: Iterable[Path]) -> bool:
    """Whether an interrupted run has left something beside one of its outputs, which it may go on from."""
    from gguf_tools.files import leftovers  # loads what no help needs
    from gguf_tools.files.owned_folder import work_path

    return any(leftovers.is_begun(path) or leftovers.is_unfinished(work_path(path)) for path in outputs)
