"""Checks before hours of work: whether outputs can be written, and whether a disk has the room."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from gguf_tools.errors import MissingModel, OutputError
from gguf_tools.files.named_files import output_path, read_corpus
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
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{output}: can't be written ({error.strerror})") from error


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
    try:
        free = files.free_bytes(nearest_folder(paths[0]))
    except OSError as error:
        raise OutputError(f"{paths[0]}: can't be written ({error.strerror})") from error
    if n_bytes - there > free:
        needed = size_text(n_bytes - there)
        left = size_text(free)
        raise OutputError(f"{paths[0]}: {what} need {needed}, and the disk has {left} left; {remedy}")
