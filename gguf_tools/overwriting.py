"""What a command may write over: no input, nobody else's file, no finished output without --force.

- A file that is named as an output and as something else is refused before anything is opened, whatever it is
  named as: `refuse_shared` compares files, not names, so links and other spellings count.
- An output that is there already is refused without --force. What an interrupted run of the same command
  has left is its own, and is resumed: a journal, a partial output or a folder of finished layers beside one
  of the outputs says so. `quantize` alone replaces its output and says so, because llama-quantize does, and
  scripts that call it expect it.
- The files beside an output know by themselves whose they are: see writer.py, journal.py and whole_file.py.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.journal import JOURNAL_SUFFIX
from gguf_tools.shards import set_of
from gguf_tools.writer import PARTIAL_SUFFIX

_UNFINISHED = (JOURNAL_SUFFIX, PARTIAL_SUFFIX, ".work")
"""Endings of what an unfinished run keeps beside its outputs."""


class StoreOutput(argparse.Action):
    """Stores a path that the command writes to, and notes it for `refuse_shared_arguments`.

    may_be  arguments whose file it may be: what is written there takes in what was read
    """

    def __init__(self, *, may_be: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        self._may_be = may_be

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        setattr(namespace, self.dest, values)
        name = option_string or str(self.metavar or self.dest)
        output = _Output(Path(values), frozenset({self.dest, *self._may_be}))
        namespace.written = {**getattr(namespace, "written", {}), name: output}


class _Output(NamedTuple):
    """A path that a command writes to, and the arguments that may name it: its own, and some others."""

    path: Path
    arguments: frozenset[str]


def refuse_shared_arguments(args: argparse.Namespace) -> None:
    """Raise BadRequest if a path that the arguments name as an output stands for something else, too.

    Every other path among the arguments counts as an input; whatever a folder or a split set holds, as well.
    """
    written: Mapping[str, _Output] = getattr(args, "written", {})
    for name, output in written.items():
        own = output.arguments | {"written", "typed"}
        others = [path for each, value in vars(args).items() if each not in own for path in _paths_in(value)]
        refuse_shared({name: output.path}, others)


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
    """Yield what tells a file from others; of a folder, those of its model; of a part of a set, all parts."""
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


def _paths_in(value: Any) -> Iterator[Path]:
    """Yield the paths in the value of an argument; any text may be one."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, str):
        for text in {value, *value.split(",")}:
            if text and len(text) < _LONGEST_NAME and "\0" not in text:
                yield Path(text)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths_in(each)


_LONGEST_NAME = 4096


def add_force(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Give a parser --force, for what `refuse_to_replace` refuses."""
    parser.add_argument("--force", action="store_true", help="replace outputs that are there already")


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
