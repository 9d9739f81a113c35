"""How long a server of the Hub may take and how much it may send, and connections that keep to it.

A timeout of the client is that of one read, and a server that sends a byte in each of them is never late. So
the streams below the client count: each `silence_seconds` of waiting has to bring MIN_PROGRESS_BYTES. What
comes before the body of an answer has a bound of its own, because a server may send any number of answers
with 100 to 199 before the one that counts.
"""

from __future__ import annotations

import sys
import time
from typing import Any

MAX_METADATA_BYTES = 32 << 20
"""Maximum size of an answer that is no file: a list of files, an error's text."""

MIN_PROGRESS_BYTES = 64 << 10
"""How much has to come in a time, or by a try, for it to count."""

DEFAULT_SECONDS = 300.0

_LONGEST_ANSWER, _LONGEST_SILENCE = 10.0, 60.0

_allowed = DEFAULT_SECONDS


def allow(seconds: float) -> None:
    """Set how long a server may let this process wait."""
    global _allowed
    _allowed = seconds


def allowed() -> float:
    """Return how many seconds a server may ask to wait, and an answer that is no file may take in all."""
    return _allowed


def answer_seconds() -> float:
    """Return the seconds to wait for a connection to the Hub, and for its first word."""
    return min(_allowed, _LONGEST_ANSWER)


def silence_seconds() -> float:
    """Return the seconds in which a line has to bring MIN_PROGRESS_BYTES, or the end."""
    return min(_allowed, _LONGEST_SILENCE)


MAX_HEAD_BYTES = 1 << 20
"""Bytes before the body of an answer, and the first piece of it."""


class BrokenOff(Exception):
    """An answer that ended, or did not come, before it had brought anything worth going on from."""


def keep_pace(client: Any) -> None:
    """Let all connections that an httpx client will make keep the pace.

    A client of another make, whose connections can't be reached, keeps its own timeouts alone.
    """
    transports = [getattr(client, "_transport", None), *getattr(client, "_mounts", {}).values()]
    for transport in transports:
        pool = getattr(transport, "_pool", None)
        backend = getattr(pool, "_network_backend", None)
        if backend is not None and not isinstance(backend, _Backend):
            setattr(pool, "_network_backend", _Backend(backend))  # noqa: B010


def body_begins(response: Any) -> None:
    """Tell the connection of an answer that its headers are complete."""
    stream = response.extensions.get("network_stream")
    if isinstance(stream, _Stream):
        stream.is_in_head = False


class _Around:
    """Wrapper that leaves as it was all that is not changed here."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Backend(_Around):
    def connect_tcp(self, *args: Any, **kwargs: Any) -> _Stream:
        return _Stream(self._inner.connect_tcp(*args, **kwargs))


class _Stream(_Around):
    """A connection whose waiting is counted, from the first byte of each answer."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.is_in_head, self._is_question = True, False
        self._n_bytes = self._n_recent = 0
        self._waited = 0.0

    def start_tls(self, *args: Any, **kwargs: Any) -> _Stream:
        return _Stream(self._inner.start_tls(*args, **kwargs))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)
        if buffer:  # a question without a body ends with nothing
            self._is_question = buffer.startswith((b"GET ", b"HEAD "))
        self._begin()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return self._read(max_bytes, timeout)
        except Exception as error:
            if self.is_in_head and self._is_question and type(error).__name__ == "ReadTimeout":
                # The client would ask again by itself, several times, and wait longer each time.
                raise BrokenOff(f"no answer in {timeout} s") from error
            raise

    def _read(self, max_bytes: int, timeout: float | None) -> bytes:
        begun = time.monotonic()
        data: bytes = self._inner.read(max_bytes, timeout)
        if self._n_bytes:  # the wait for the first byte is bounded by `timeout`
            self._waited += time.monotonic() - begun
        self._n_bytes += len(data)
        self._n_recent += len(data)
        if self.is_in_head and self._n_bytes > MAX_HEAD_BYTES:
            raise self._error("RemoteProtocolError", f"{self._n_bytes} bytes of headers")
        if self._n_recent >= MIN_PROGRESS_BYTES:
            self._waited, self._n_recent = 0.0, 0
        elif data and self._waited > silence_seconds():
            raise self._error("ReadTimeout", f"{self._n_recent} bytes in {self._waited:.0f} s")
        return data

    def _begin(self) -> None:
        self.is_in_head = True
        self._n_bytes = self._n_recent = 0
        self._waited = 0.0

    def _error(self, name: str, text: str) -> Exception:
        """Return an error as the library raises it, which is httpcore's of one generation or another."""
        library = sys.modules[type(self._inner).__module__.partition(".")[0]]
        error: Exception = getattr(library, name)(text)
        return error
