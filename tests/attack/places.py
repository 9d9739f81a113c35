"""The folder of one trial: what lies there before and after, and whether anything was harmed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.children import Ended
from tests.attack.commands import BYSTANDERS, Command
from tests.attack.material import provide

Tree = dict[str, str]
"""What lies in a folder: path -> digest of a file, or what else it is."""

_RECORDS = {"kept/about.json", "kept/record", "cooked/.cook/record.json"}
"""Files that hold time stamps, inodes or what was done how often: they are not compared."""

_WORKPLACES = ("kept/", "work/", "cooked/.cook/")
"""Folders whose files are not outputs until the command ends."""


class Failure(Exception):
    """A trial that ended as it must not."""


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a command.

    before   its folder at first
    after    and at last
    seconds  that it took
    calls    how often it called the system: name -> times, in the thread that did most
    touched  names that it used for a while, in its folder
    printed  standard output
    """

    before: Tree
    after: Tree
    seconds: float
    calls: dict[str, int] = field(default_factory=dict)
    touched: tuple[str, ...] = ()
    printed: str = ""

    @property
    def outputs(self) -> list[str]:
        """Names of what it wrote."""
        return [name for name in self.after if self.before.get(name) != self.after[name]]

    @property
    def published(self) -> list[str]:
        """Those that are whole as soon as they have their names."""
        return [name for name in self.outputs if not name.startswith(_WORKPLACES)]


def prepare(command: Command, material: Path, folder: Path) -> Path:
    """Make `folder` with the command's inputs, copied from `material`, and bystanders; return it."""
    folder.mkdir(parents=True)
    for name in command.inputs:
        path = provide(material, name)
        if path.is_dir():
            shutil.copytree(path, folder / name)
        else:
            shutil.copyfile(path, folder / name)
    for name, data in BYSTANDERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tree(folder: Path) -> Tree:
    """Return what lies in a folder; links are not followed, and empty folders don't count."""
    found: Tree = {}
    for parent, folders, names in os.walk(folder):
        for name in [*names, *(name for name in folders if Path(parent, name).is_symlink())]:
            path = Path(parent, name)
            found[str(path.relative_to(folder))] = _digest(path)
    return {name: "a record" if name in _RECORDS else digest for name, digest in sorted(found.items())}


def _digest(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(mode):
        return f"special {stat.S_IFMT(mode):o}"
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def check_unharmed(command: Command, before: Tree, now: Tree, reference: Reference) -> None:
    """Raise Failure if a file of `before` has changed, been replaced or vanished, but for what is edited."""
    recovers = any(".undo" in name for name in now)
    for name, digest in before.items():
        if now.get(name) == digest:
            continue
        if command.edits and name in now and now[name] == reference.after[name]:
            continue
        if command.edits and name in reference.outputs and name in now and recovers:
            continue
        raise Failure(f"{name} was {digest}, and is {now.get(name, 'gone')}")


def check_published(reference: Reference, before: Tree, now: Tree) -> None:
    """Raise Failure if an output has its name and other bytes than those of the undisturbed run."""
    for name in reference.published:
        is_edited = name in reference.before
        if name in now and not is_edited and now[name] not in (reference.after[name], before.get(name)):
            raise Failure(f"{name} was published with other bytes")


def is_complete(reference: Reference, now: Tree) -> bool:
    """Return whether all outputs are there and right."""
    return all(now.get(name) == reference.after[name] for name in reference.outputs)


def check_same(reference: Reference, now: Tree) -> None:
    """Raise Failure unless everything is as the undisturbed run left it, without leftovers."""
    for name, digest in reference.after.items():
        if name not in now:
            raise Failure(f"{name} is missing")
        if now[name] != digest:
            raise Failure(f"{name} has other bytes")
    left = [name for name in now if name not in reference.after]
    if left:
        raise Failure(f"left behind: {', '.join(left[:5])}")


def check_one_line(ended: Ended) -> None:
    """Raise Failure unless a command that did not succeed ended with one clear line."""
    if ended.hung:
        raise Failure(f"hung, after {ended.said[-300:]!r}")
    if ended.code not in (1, 2):
        raise Failure(f"ended with code {ended.code} and {ended.said[-700:]!r}")
    if "Traceback" in ended.said:
        raise Failure(f"a traceback: {ended.said[-900:]!r}")
    errors = re.findall(r"^[\w-]+(?: [\w-]+)?: error: .+$", ended.said, re.MULTILINE)
    if len(errors) != 1 or not ended.said.endswith(f"{errors[-1]}\n"):
        raise Failure(f"said no single line: {ended.said[-700:]!r}")


def check_told(command: Command, ended: Ended) -> None:
    """Raise Failure unless a command that did not succeed said why in one line, or printed its findings."""
    found = command.finds and ended.code == 1 and ended.printed and "error:" not in ended.said
    if not found or ended.hung or "Traceback" in ended.said:
        check_one_line(ended)
