"""Renaming across the files of a set, in rounds: never do two files have a tensor of the same name.

The files of a set change one after the other. A tensor that takes a name from another file must wait until it
is free there, because a run that is killed in between would leave a set that does not open.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.format.shards import GGUFSet


def rename_rounds(source: GGUFSet, new_names: Mapping[str, str]) -> list[dict[str, str]]:
    """Return new names in the order in which files can take them, as few rounds of them as possible.

    raises  BadRequest where tensors of several files take each other's names in a circle
    """
    home = {name: source.file_of(name).path for name in source.tensors}
    pending = dict(new_names)
    rounds = []
    while pending:
        ready = _ready(pending, home)
        if not ready:
            old, new = next(iter(pending.items()))
            raise BadRequest(
                f"tensor {old!r} can't become {new!r} while there is one in {home[new].name}; rename that one"
                " first, to a name that is free, in a run of its own"
            )
        rounds.append(ready)
        files = {old: home.pop(old) for old in ready}
        home |= {new: files[old] for old, new in ready.items()}
        pending = {old: new for old, new in pending.items() if old not in ready}
    return rounds


def _ready(pending: Mapping[str, str], home: Mapping[str, Path]) -> dict[str, str]:
    """Return the names that can be taken now: free ones, and those that the same file gives up with it."""
    ready = dict(pending)
    while True:
        blocked = [
            old
            for old, new in ready.items()
            if new in home and not (home[new] == home[old] and new in ready)
        ]
        if not blocked:
            return ready
        for old in blocked:
            del ready[old]
