"""Reading an untrusted header: never beyond the end of the file, and never more than fits a budget of memory.

A count in a header costs its writer eight bytes. So a reader checks twice before it makes anything of a size
that the file names: that the rest of the file can hold it (`require`), and that the budget allows it
(`charge`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from gguf_tools.errors import FormatError, TruncatedError
from gguf_tools.format.values import Kind

MAX_MEMORY = 160 << 20
"""Budget of memory for the contents of one header: twice what the largest vocabularies take."""

READ_AT_ONCE = 1 << 18

# Of each byte of a text: as it is read, and as characters. One of 4 bytes makes every other take as many.
_ASCII_MEMORY = 1 + 1
_UNICODE_MEMORY = 1 + 4

Read = Callable[[int, int], bytes]
"""Function of (offset, n_bytes) that returns those bytes, fewer where the file ends."""


class Cursor:
    """A position in a file that never leaves it, and a window on the bytes that follow.

    source  the file's name; messages put a method's `what` after it
    order   of the bytes of numbers, as struct has it: "<" or ">"

    All methods that read raise TruncatedError where the file ends, and whatever `read` raises.
    """

    def __init__(self, read: Read, size: int, source: str) -> None:
        self.source = source
        self.size = size
        self.order = "<"
        self.memory_left = MAX_MEMORY
        self._read = read
        self._window = b""
        self._window_start = 0
        self._at = 0

    @property
    def position(self) -> int:
        return self._window_start + self._at

    def require(self, n_bytes: int, what: str) -> None:
        """Raise TruncatedError unless the rest of the file has `n_bytes` bytes."""
        left = self.size - self.position
        if n_bytes > left:
            raise TruncatedError(
                f"{self.source}: {what} at byte {self.position} needs {n_bytes} bytes, "
                f"the file has {left} more; truncated or damaged"
            )

    def charge(self, n_bytes: int, what: str) -> None:
        """Take memory from the budget; raises FormatError if it is exceeded."""
        self.memory_left -= n_bytes
        if self.memory_left < 0:
            raise FormatError(f"{self.source}: {what} would take more than {MAX_MEMORY >> 20} MiB of memory")

    def take(self, n_bytes: int, what: str) -> bytes:
        """Return the next bytes, and move past them."""
        stop = self._at + n_bytes
        if stop > len(self._window):
            self.require(n_bytes, what)
            self._slide(n_bytes)
            stop = n_bytes
        data = self._window[self._at : stop]
        self._at = stop
        return data

    def _slide(self, n_bytes: int) -> None:
        """Move the window so that it starts here and holds at least `n_bytes`."""
        self._window_start, self._at = self.position, 0
        wanted = min(max(n_bytes, READ_AT_ONCE), self.size - self._window_start)
        self._window = self._read(self._window_start, wanted)
        if len(self._window) < wanted:
            raise TruncatedError(
                f"{self.source}: ends at byte {self._window_start + len(self._window)}, "
                f"had {self.size} bytes when it was opened"
            )

    def fixed(self, code: str, n_bytes: int, what: str) -> Any:
        """Read one number with a struct code that takes `n_bytes`."""
        (value,) = struct.unpack(self.order + code, self.take(n_bytes, what))
        return value

    def u32(self, what: str) -> int:
        return int(self.fixed("I", 4, what))

    def u64(self, what: str) -> int:
        return int(self.fixed("Q", 8, what))

    def string(self, what: str, most: int | None = None) -> str:
        """Read a string of at most `most` bytes; those that are not UTF-8 become lone surrogates."""
        n_bytes = self.u64(f"the length of {what}")
        self.require(n_bytes, what)
        if most is not None and n_bytes > most:
            raise FormatError(f"{self.source}: {what} has {n_bytes} bytes, expected at most {most}")
        self.charge(_ASCII_MEMORY * n_bytes, what)
        raw = self.take(n_bytes, what)
        if not raw.isascii():
            self.charge((_UNICODE_MEMORY - _ASCII_MEMORY) * n_bytes, what)
        return raw.decode("utf-8", "surrogateescape")

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        """Read `count` strings. A vocabulary has 100,000 and more, so the loop works on the window itself."""
        unpack_length = struct.Struct(self.order + "Q").unpack_from
        window, at, memory_left = self._window, self._at, self.memory_left
        end = len(window)
        strings: list[str] = []
        for index in range(count):
            start = at + 8
            if start <= end:
                stop = start + unpack_length(window, at)[0]
                if stop <= end and memory_left >= 0:
                    raw = window[start:stop]
                    memory_left -= (stop - start) * (_ASCII_MEMORY if raw.isascii() else _UNICODE_MEMORY)
                    strings.append(raw.decode("utf-8", "surrogateescape"))
                    at = stop
                    continue
            self._at, self.memory_left = at, memory_left
            strings.append(self.string(f"string {index} of {count} of {what}"))
            window, at, memory_left = self._window, self._at, self.memory_left
            end = len(window)
        self._at, self.memory_left = at, memory_left
        return tuple(strings)

    def kind(self, what: str) -> Kind:
        """Read a kind; raises FormatError for a number that stands for none."""
        number = self.u32(f"the kind of {what}")
        try:
            return Kind(number)
        except ValueError:
            raise FormatError(f"{self.source}: {what} has kind {number}, expected 0 to {max(Kind)}") from None
