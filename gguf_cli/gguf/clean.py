"""`gguf-tools clean`: what interrupted runs have left, listed and removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_cli import command
from gguf_tools.errors import MissingFile
from gguf_tools.terminal import say, say_json
from gguf_tools.text import counted, size_text, table

if TYPE_CHECKING:
    from gguf_tools.files.leftovers import Leftover

_DETAIL = """
An interrupted run keeps what is done beside its output: NAME.partial and NAME.journal, and in NAME.work the
layers that are done. The same command resumes from there, and removes them at its end. `clean` finds those of
runs that nobody will resume. It lists them; with --remove they go. What a running command holds, and what is
not ours, stays."""

_EXAMPLES = """\
examples:
  gguf-tools clean .                what is there, and how large
  gguf-tools clean models --remove
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "clean",
        lambda args: _clean(_Request(args.path, args.remove, args.json, args.quiet)),
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
class _Request:
    """What the command line asks for: to list what is left in `path`, and perhaps to remove it."""

    path: Path
    remove: bool
    json: bool
    quiet: bool


def _clean(request: _Request) -> None:
    found = list(_leftovers(request.path))
    free = [each for each in found if not each.is_held]
    if request.remove:
        for each in free:
            _remove(each)
    if request.json:
        entries = [
            {"path": str(each.path), "bytes": each.n_bytes, "in_use": each.is_held} for each in found
        ]
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
        yield "nothing is left of runs that are gone"
        return
    total = f"{counted(len(free), 'leftover')}, {size_text(sum(each.n_bytes for each in free))}"
    yield f"removed {total}" if removed else f"{total}; --remove removes them, and no run goes on from them"


def _leftovers(place: Path) -> Iterator[Leftover]:
    """Yield what runs have left in a folder and those inside, or beside an output."""
    from gguf_tools.files.leftovers import leftover_files

    if place.is_dir():
        folders = [place, *(path for path in sorted(place.rglob("*")) if path.is_dir())]
        for folder in (each for each in folders if not _is_in_work(each, place)):
            yield from leftover_files(folder)
            yield from _work_folders(folder)
    elif place.parent.is_dir():
        beside = [*leftover_files(place.parent), *_work_folders(place.parent)]
        mine = [each for each in beside if each.path.name.startswith(f"{place.name}.")]
        if not mine and not place.exists():
            raise MissingFile(f"{place}: no such file or folder, and nothing of a run beside it")
        yield from mine
    else:
        raise MissingFile(f"{place}: no such file or folder")


def _is_in_work(folder: Path, place: Path) -> bool:
    return any(each.endswith(".work") for each in folder.relative_to(place).parts)


def _work_folders(folder: Path) -> Iterator[Leftover]:
    """Yield the folders of finished layers; without torch nobody has made one."""
    if find_spec("torch") is None:
        return
    from forward.work.work_folder import is_unfinished
    from gguf_tools.files.leftovers import Leftover, is_held

    for path in sorted(folder.glob("*.work")):
        files = [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
        if path.is_dir() and not path.is_symlink() and files and is_unfinished(path.with_suffix("")):
            held = any(is_held(each) for each in files if each.name == "lock")
            yield Leftover(path, sum(each.stat().st_size for each in files), held)


def _remove(each: Leftover) -> None:
    from gguf_tools.files.leftovers import remove

    if not each.path.is_dir():
        remove(each)
        return
    from forward.work.work_folder import forget
    from quality.work_folders import forget_folders

    forget_folders(each.path)  # those of several models, and of the two ways
    forget(each.path.with_suffix(""))
