"""Files that a user or a folder names: inputs read whole, and outputs, which are written whole.

A name may belong to a pipe, which would be waited for ever, to a link to /dev/zero, or to gigabytes.

What has the name of an output is complete, whatever interrupts the writing. The file grows under a name of
its own, NAME.1f2e...8a9b.partial, which no link can stand for: eight random digits and sixteen that are a
digest of these and of NAME. No other program makes such a name. The next file of NAME removes what killed
processes have left.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import IO

from gguf_tools.argument_types import described
from gguf_tools.errors import BadArgument, BadRequest, MissingFile, OutputError, ToolkitError, WrongType
from gguf_tools.system import files
from gguf_tools.system.files import NO_WAIT, absolute, is_at, open_file, open_own
from gguf_tools.system.locks import NO_LOCKS, try_lock

MAX_BYTES = 1 << 30
"""The largest text or table that is read: a gigabyte of text would be computed for weeks."""


AnyPath = str | os.PathLike[str]
Paths = AnyPath | Iterable[AnyPath]
"""One file or several, as callers name them."""


def paths_of(name: str, files: Paths, *, least: int = 1) -> list[Path]:
    """Return the paths of one file or several.

    name    of the argument, for messages
    raises  WrongType for what is no path, BadRequest for fewer than `least`
    """
    several = [files] if isinstance(files, str | os.PathLike) else list(files)
    if len(several) < least:
        raise BadRequest(f"{name}: found none, expected a file or several")
    for each in several:
        if not isinstance(each, str | os.PathLike):
            raise WrongType(f"{name}: found {described(each)} among them, expected str or PathLike")
    return list(map(Path, several))


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
    if found.name in ("", "..") or (not mode and text.endswith(files.SLASHES)):
        raise BadArgument(f"{text!r} names no file, expected a file to write")
    if stat.S_ISDIR(mode):
        raise OutputError(f"{found}: is a folder, expected a file to write")
    if mode and not stat.S_ISREG(mode):
        raise OutputError(f"{found}: is a device, a pipe or a socket, expected a file to write")
    return found


def output_prefix(path: str | os.PathLike[str]) -> Path:
    """Return the beginning of the names of several outputs; raises BadArgument where it has no name."""
    text, found = os.fspath(path), Path(path)
    if found.name in ("", "..") or text.endswith(files.SLASHES):
        raise BadArgument(f"{text!r} names no file, expected what the names of files begin with")
    return found


def output_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder that is to be filled, and may not be there yet.

    raises  BadArgument for an empty name, OutputError where something else has the name
    """
    if not os.fspath(path):
        raise BadArgument("'' names no folder, expected a folder to write to")
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
            data, left = bytearray(), status.st_size + 1
            while left and (part := file.read(left)):  # None where a device of the system has nothing yet
                data += part
                left -= len(part)
            if not left:
                what = "grows while it is read" if status.st_size else "is of the system, and has no size"
                raise error(f"{path}: {what}, expected an ordinary file")
            return bytes(data)
    except FileNotFoundError as cause:
        kind = MissingFile if error is BadRequest else error
        raise kind(f"{path}: can't be read ({cause.strerror})") from cause
    except OSError as cause:
        raise error(f"{path}: can't be read ({cause.strerror or cause})") from cause
    except ValueError as cause:  # a name with a character that no file name has
        raise error(f"{path}: can't be read ({cause})") from cause


def read_input_text(path: str | os.PathLike[str], most: int = MAX_BYTES) -> str:
    """Return a text in UTF-8; see `read_input`.

    raises  BadRequest for what is no UTF-8, too, with the encoding that it looks like
    """
    data = read_input(path, most)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"{path}: not UTF-8 at byte {error.start}; {remedy_for(os.fspath(path), data)}"
        ) from error
    if "\0" in text and (encoding_of(data) or "").startswith("UTF-"):  # every other byte is 0, and valid
        raise BadRequest(f"{path}: not UTF-8; {remedy_for(os.fspath(path), data)}")
    return text


MAX_CORPUS = 128 << 20
"""Bytes of a text that is cut into tokens: a tokenizer takes more than a hundred times as many in memory."""

MAX_RUN = 1 << 20
"""Characters without a space or a line end, or of spaces alone, that no text has."""


def read_corpus(path: str | os.PathLike[str]) -> str:
    """Return a text that is to be cut into tokens; see `read_input_text`.

    raises  BadRequest, too, for what no tokenizer could cut: more than MAX_CORPUS bytes, and runs of MAX_RUN
            characters that are no space, or are nothing else
    """
    text = read_input_text(path, MAX_CORPUS)
    half = MAX_RUN // 2  # of a run of that length, a part that begins at a multiple of the half is whole
    parts = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    if any(part.isspace() or part.split(None, 1)[0] == part for part in parts):
        raise BadRequest(f"{path}: {half:,} characters without a space, or only spaces; expected a text")
    return text


# --- guesses of the encoding of a text that is not UTF-8

_ENCODING_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
_SCRIPTS = {
    "SHIFT_JIS": ("HIRAGANA", "KATAKANA"), "EUC-JP": ("HIRAGANA", "KATAKANA"), "EUC-KR": ("HANGUL",),
    "GB18030": ("CJK",), "BIG5": ("CJK",), "WINDOWS-1251": ("CYRILLIC SMALL",), "KOI8-R": ("CYRILLIC SMALL",),
}  # fmt: skip
"""Encodings by their names for iconv -> how the names of most characters in them begin."""

_ZEROS = {
    "UTF-32LE": (0, 1, 1, 1), "UTF-32BE": (1, 1, 1, 0), "UTF-16LE": (0, 1, 0, 1), "UTF-16BE": (1, 0, 1, 0),
}  # fmt: skip
"""Which of four bytes are mostly 0 in a text of mostly ASCII."""

_LOOKED_AT = 1 << 16
_MANY = 0.3


def encoding_of(data: bytes) -> str | None:
    """Return the encoding that a text which is no plain UTF-8 text looks like, by its name for iconv.

    None for bytes that look like no text.
    """
    head = data[:_LOOKED_AT]
    marked = next((name for mark, name in _ENCODING_MARKS if data.startswith(mark)), None)
    if marked is not None or not head:
        return marked
    zeros = [head[place::4].count(0) / max(1, len(head[place::4])) for place in range(4)]
    for name, pattern in _ZEROS.items():
        if all(share > 0.5 if zero else share < 0.1 for share, zero in zip(zeros, pattern, strict=True)):
            return name
    if any(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head):
        return None
    high = [byte for byte in head if byte >= 0x80]
    if len(high) < _MANY * len(head):
        return "WINDOWS-1252" if any(byte < 0xA0 for byte in high) else "ISO-8859-1"
    shares = {name: _share(head, name) for name in _SCRIPTS}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] > _MANY else None


def _share(head: bytes, name: str) -> float:
    """Return the share of characters beyond ASCII that are of the scripts that an encoding is for.

    Kana count twice: half of a Japanese text is Chinese characters.
    """
    try:
        text = head[: len(head) - len(head) % 2].decode(name)
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # otherwise the last character is cut in two
            return 0.0
        text = head[: error.start].decode(name)
    others = Counter(char for char in text if not char.isascii())
    of_script = sum(n for char, n in others.items() if unicodedata.name(char, "").startswith(_SCRIPTS[name]))
    return of_script * (2 if "HIRAGANA" in _SCRIPTS[name] else 1) / max(1, others.total())


def remedy_for(path: str, data: bytes) -> str:
    """Say what a text looks like that is not UTF-8, and the command that converts it."""
    name = encoding_of(data)
    if name is None:
        return "expected a text, and this looks like no encoding of one"
    quoted = shlex.quote(path)
    return f"it looks like {name}: iconv -f {name} -t UTF-8 {quoted} > {shlex.quote(path + '.utf8')}"


_START_BYTES = 4096


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to a file beside `path`, which then takes its name.

    raises  OutputError when it can't be written, or when text would replace a file that is no text, such as
            a model; what had the name keeps it
    """
    if b"\0" not in data[:_START_BYTES]:
        refuse_binary(path)
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path, permissions: int = 0o666) -> Iterator[IO[bytes]]:
    """Give a file to write and read, which takes the name `path` when the `with` block ends without an error.

    permissions  mode bits of the file, less those of the umask
    raises       OutputError when it can't be written; what had the name keeps it
    """
    output_path(path)
    with OutputError.from_os(f"{path}: can't be written"):
        remove_leftovers(path)
        partial, fd = _begin(path, permissions)
        try:
            with os.fdopen(fd, "w+b") as file:
                yield file
                file.flush()
                files.sync(fd)
                if not files.IS_HELD_OPEN:
                    files.rename(partial, path)
            if files.IS_HELD_OPEN:
                files.rename(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        files.sync_folder(path.parent)


def _begin(path: Path, permissions: int) -> tuple[Path, int]:
    """Return a new file beside `path`, and its descriptor; it is locked where the file system has locks."""
    while True:
        partial = path.with_name(small_partial(path.name))
        fd = open_own(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
        try:
            try_lock(fd)
            is_ours = is_at(fd, partial)
        except OSError as error:  # another process takes it for left, or the file system has no locks
            is_ours = error.errno in NO_LOCKS
        if is_ours:
            return partial, fd
        os.close(fd)
        with suppress(OSError):  # who only looked at it leaves it
            partial.unlink()


_SMALL_PARTIAL = re.compile(r"(.+)\.([0-9a-f]{8})([0-9a-f]{16})\.partial", re.DOTALL)


def small_partial(name: str) -> str:
    """Return another name under which a file can grow."""
    token = secrets.token_hex(4)
    return f"{name}.{token}{_check(name, token)}.partial"


def output_of_small_partial(name: str) -> str | None:
    """Return the name of the file that is written under another name; None for somebody else's."""
    found = _SMALL_PARTIAL.fullmatch(name)
    return found[1] if found is not None and found[3] == _check(found[1], found[2]) else None


def _check(name: str, token: str) -> str:
    return blake2b(f"gguf-tools {token} {name}".encode(errors="surrogateescape"), digest_size=8).hexdigest()


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left of writing `path`: files with a name of ours that none holds."""
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if output_of_small_partial(entry.name) == path.name:
                _remove_if_free(Path(entry.path))


def _remove_if_free(partial: Path) -> None:
    with suppress(OSError):
        fd = open_own(partial, os.O_RDWR)
        try:
            try_lock(fd)  # who writes it holds this lock
            if not files.IS_HELD_OPEN:
                partial.unlink()
        finally:
            os.close(fd)
        if files.IS_HELD_OPEN:
            partial.unlink()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hexadecimal digits; raises OSError."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def refuse_binary(path: Path) -> None:
    """Raise OutputError if `path` is a file that is no text, which a text would replace."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
    except OSError:
        return
    if b"\0" in start:
        what = "a GGUF file" if start.startswith(b"GGUF") else "no text"
        raise OutputError(f"{path}: is {what}, and a text would replace it; write somewhere else")
