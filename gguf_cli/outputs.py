"""Arguments that name outputs: noted, so that no input is written over; and --force."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.files.overwriting import refuse_shared


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
