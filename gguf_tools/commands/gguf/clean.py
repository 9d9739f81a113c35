"""`gguf-tools clean`: what interrupted runs have left, listed and removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.text import counted, say, say_json, size_text, table

if TYPE_CHECKING:
    from gguf_tools.files.leftovers import Leftover

_DETAIL = """
An interrupted run keeps what is done beside its output: NAME.partial and NAME.journal, and in NAME.work the
layers that are done. The same command resumes from there, and removes them at its end. `clean` lists such
leftovers of runs that have ended, and with --remove removes them. It never removes what a running command
uses, or files that gguf-tools did not make."""

_EXAMPLES = """\
examples:
  gguf-tools clean .                what was left, and how large it is
  gguf-tools clean models --remove
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "clean",
        lambda args: _clean(filled(_Request, args)),
        "list what interrupted runs have left, and remove it",
        _DETAIL,
        epilog=_EXAMPLES,
    )
    sub.add_argument(
        "path", type=Path, metavar="PATH",
        help="a folder, with the folders in it; or an output, for what is beside it",
    )  # fmt: skip
    sub.add_argument("--remove", action="store_true", help="remove what is listed")
    command.add_quiet(sub)


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line: to list what is left in `path`, and perhaps to remove it."""

    path: Path
    remove: bool


def _clean(request: _Request) -> None:
    from gguf_tools.files.leftovers import leftovers

    found = list(leftovers(request.path, remove=request.remove))
    if request.json:
        entries = [{"path": str(each.path), "bytes": each.n_bytes, "in_use": each.is_held} for each in found]
        say_json(entries)
    elif not request.quiet:
        say(*_lines(found, removed=request.remove))


def _lines(found: Iterable[Leftover], *, removed: bool) -> Iterator[str]:
    found = list(found)
    free = [each for each in found if not each.is_held]
    rows = [
        (str(each.path), size_text(each.n_bytes), "in use by a run" if each.is_held else "") for each in found
    ]
    yield from table(rows, right=(1,)) if rows else ()
    if not free:
        yield "found no leftovers of ended runs"
        return
    total = f"{counted(len(free), 'leftover')}, {size_text(sum(each.n_bytes for each in free))}"
    yield f"removed {total}" if removed else f"{total}; --remove removes them, and no run can resume then"
