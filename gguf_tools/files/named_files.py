"""Files that a user or a folder names: outputs that can have the name, inputs read whole, and JSON.

A name may belong to a pipe, which would be waited for ever, to a link to /dev/zero, or to gigabytes. JSON of
unknown origin is read within bounds on memory and nesting: it grows as it is read, `{},` takes three bytes in
a text and seventy in memory.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadArgument, BadRequest, MissingFile, OutputError, ToolkitError
from gguf_tools.system.files import NO_WAIT, absolute, open_file

MAX_BYTES = 1 << 30
"""The largest text or table that is read: a gigabyte of text would be computed for weeks."""


def output_path(path: str | os.PathLike[str], *, may_be_folder: bool = False) -> Path:
    """Return the path of an output, if a file can be written there.

    may_be_folder  a folder that is there may be named too
    raises         BadArgument for a name that no file can have; MissingFile for a relative one where the
                   working directory is gone; OutputError where something other than a
                   file has it. A device would be replaced by a file, and with it what other programs need
    """
    text, found = os.fspath(path), Path(path)
    absolute(found)
    try:
        mode = found.stat().st_mode if text else 0
    except FileNotFoundError:
        mode = 0
    except NotADirectoryError as error:
        file = next(parent for parent in found.parents if parent.is_file())
        raise OutputError(f"{found}: {file} is a file, expected a folder") from error
    except OSError as error:
        raise OutputError(f"{found}: can't be written ({error.strerror})") from error
    if may_be_folder and stat.S_ISDIR(mode):
        return found
    if found.name in ("", "..") or (not mode and text.endswith(os.sep)):
        raise BadArgument(f"{text!r} names no file, expected one to write")
    if stat.S_ISDIR(mode):
        raise OutputError(f"{found}: is a folder, expected a file to write")
    if mode and not stat.S_ISREG(mode):
        raise OutputError(f"{found}: is a device, a pipe or a socket, expected a file to write")
    return found


def output_prefix(path: str | os.PathLike[str]) -> Path:
    """Return the beginning of the names of several outputs; raises BadArgument where it has no name."""
    text, found = os.fspath(path), Path(path)
    if found.name in ("", "..") or text.endswith(os.sep):
        raise BadArgument(f"{text!r} names no file, expected what the names of files begin with")
    return found


def output_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder that is to be filled, and may not be there yet.

    raises  BadArgument for an empty name, OutputError where something else has the name
    """
    if not os.fspath(path):
        raise BadArgument("'' names no folder, expected one to write to")
    found = Path(path)
    try:
        is_other = not stat.S_ISDIR(found.stat().st_mode)
    except FileNotFoundError:
        is_other = False
    except OSError as error:
        raise OutputError(f"{found}: can't be written to ({error.strerror})") from error
    if is_other:
        raise OutputError(f"{found}: is a file, expected a folder")
    return found


def read_input(
    path: str | os.PathLike[str], most: int = MAX_BYTES, error: type[ToolkitError] = BadRequest
) -> bytes:
    """Return the bytes of a text or a table.

    raises  `error` for what is not a regular file, has more than `most` bytes, or can't be read; MissingFile
            in place of BadRequest for what is not there
    """
    try:
        # Opening a pipe must not wait for a writer, and a device has no end.
        with open(open_file(path, os.O_RDONLY | NO_WAIT), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise error(f"{path}: is a folder, expected a file")
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path}: not a regular file")
            if status.st_size > most:
                raise error(f"{path}: {status.st_size} bytes, expected at most {most}")
            return b"".join(iter(lambda: file.read(most), b""))
    except FileNotFoundError as cause:
        kind = MissingFile if error is BadRequest else error
        raise kind(f"{path}: can't be read ({cause.strerror})") from cause
    except OSError as cause:
        raise error(f"{path}: can't be read ({cause.strerror or cause})") from cause
    except ValueError as cause:  # a name with a character that no file name has
        raise error(f"{path}: can't be read ({cause})") from cause


def read_input_text(path: str | os.PathLike[str]) -> str:
    """Return a text in UTF-8; see `read_input`.

    raises  BadRequest for what is no UTF-8, too
    """
    try:
        return read_input(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: not UTF-8 at byte {error.start}; expected a text") from error


MAX_MEMORY = 160 << 20
"""Bytes that what a file says may take in memory, but for tokenizers."""

MAX_NESTING = 100

# What JSON becomes, in bytes at most; with a hook, the pairs of an object are in a list and in a dictionary.
_OBJECT_MEMORY = 200
_LIST_MEMORY = 72
_PAIR_MEMORY = 160
_ITEM_MEMORY = 50


def parse_json(
    data: bytes,
    objects: Callable[[list[tuple[str, Any]]], Any] | None = None,
    *,
    most_memory: int = MAX_MEMORY,
) -> Any:
    """Return the value of JSON in UTF-8.

    objects      makes an object of its pairs, as in json.loads
    most_memory  bytes that the value may take
    raises       ValueError for anything else, for JSON that would take more memory, and for lists and objects
                 nested deeper than MAX_NESTING
    """
    if not data.isascii():
        _check_memory(5 * len(data), most_memory)
    text = data.decode("utf-8")
    # The content is held as bytes, as one text, and as the texts in it, which a single \u widens throughout.
    in_texts = 4 * len(text) if b"\\u" in data else sys.getsizeof(text)
    _check_memory(
        len(data)
        + sys.getsizeof(text)
        + in_texts
        + _OBJECT_MEMORY * data.count(b"{")
        + _LIST_MEMORY * data.count(b"[")
        + _PAIR_MEMORY * data.count(b":")
        + _ITEM_MEMORY * data.count(b","),
        most_memory,
    )
    try:
        value = json.loads(text, object_pairs_hook=objects)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if data.count(b"[") + data.count(b"{") > MAX_NESTING:
        _check_nesting(value)
    return value


_TOO_DEEP = f"lists and objects are nested deeper than {MAX_NESTING}"


def _check_nesting(value: Any) -> None:
    """Raise ValueError for nesting in which a recursive reader could exhaust the stack."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_memory(n_bytes: int, most: int) -> None:
    if n_bytes > most:
        raise ValueError(f"would take more than {most >> 20} MiB of memory")
