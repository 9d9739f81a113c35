"""Checks of a server's answers, before the Hub's client sees them.

The client believes what it is told: it makes file names of ETags and commits, keeps an answer of any size in
memory, unpacks what is packed, and waits as long as it is asked to. So every request and answer of its
session passes through here:

    requests   have the token for the endpoint alone, and ask for bytes as they are
    answers    name commits and contents as the Hub does, send nobody's token elsewhere, are not packed, and
               have bounds on size and time; one that means "later" goes to `client.call`, which waits
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from gguf_tools.errors import HubError
from gguf_tools.hub import limits
from gguf_tools.hub.limits import BrokenOff
from gguf_tools.hub.names import is_commit
from gguf_tools.text import say_aside, shown

PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP status codes that mean: later."""

_ETAG = re.compile(r'(?:W/)?"?[0-9A-Za-z_-]{1,128}"?')
_RATE_LIMIT = re.compile(r";\s*t\s*=\s*(\d{1,9})\b")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SLACK_BYTES = 1 << 16


class Later(Exception):
    """An answer that means "later", raised with its `response` where the client would wait without a word."""

    def __init__(self, said: str, response: Any) -> None:
        super().__init__(said)
        self.response = response


@dataclass(frozen=True)
class Fetched:
    """A file that a thread fetches: the commit that it is of, and its size or the most that it may have.

    stop  set when nobody waits for it any more
    """

    commit: str
    n_bytes: int
    stop: threading.Event = field(default_factory=threading.Event)


_fetched: ContextVar[Fetched | None] = ContextVar("fetched", default=None)
_unanswered: ContextVar[dict[tuple[str, str, str | None], float] | None] = ContextVar(
    "unanswered", default=None
)
"""Requests of a call without an answer so far, and when they were made; None: in a thread of the client's."""


@contextmanager
def fetching(file: Fetched) -> Iterator[None]:
    """Let answers that this thread gets be a file's content, and of a commit."""
    token = _fetched.set(file)
    try:
        yield
    finally:
        _fetched.reset(token)


class _Guard:
    """The sessions of the client that pass through here: each that it has while a call of ours is made."""

    def __init__(self) -> None:
        self._lock, self._n_calls = threading.Lock(), 0
        self._guarded: list[tuple[Any, Any]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let what the client asks and is told pass through here meanwhile, whoever has made its session."""
        from gguf_tools.hub.library import get_session

        session, token = get_session(), _unanswered.set({})
        with self._lock:
            self._n_calls += 1
            if not any(each is session for each, _ in self._guarded):
                self._enter(session)
        try:
            yield
        finally:
            _unanswered.reset(token)
            with self._lock:
                self._n_calls -= 1
                if not self._n_calls:
                    self._leave()

    def _enter(self, session: Any) -> None:
        hooks = session.event_hooks
        self._guarded.append((session, session.cookies))
        session.event_hooks = {
            "request": [*hooks["request"], _check_request],
            "response": [_check_answer, *hooks["response"]],
        }
        # No cookie is needed, and one that can't be sent back would end every call from then on.
        session.cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))

    def _leave(self) -> None:
        for session, cookies in self._guarded:
            session.event_hooks = {
                when: [hook for hook in hooks if hook not in (_check_request, _check_answer)]
                for when, hooks in session.event_hooks.items()
            }
            session.cookies = cookies
        self._guarded.clear()


guarded = _Guard()


def without_user(address: str) -> str:
    """Return an address without user name and password."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def origin(address: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of an address."""
    try:
        parts = urlsplit(address)
        return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # a port that is none
        return "", "", None


def endpoint() -> str:
    """Return the address of the Hub, without the user name and password that HF_ENDPOINT may have."""
    from gguf_tools.hub.library import constants

    plain = without_user(constants.ENDPOINT)
    if plain != constants.ENDPOINT:
        _say_what_is_unused(plain)
    return plain


@functools.cache
def _say_what_is_unused(address: str) -> None:
    say_aside(f"{address}: the user name and password in HF_ENDPOINT are not used")


def asked_wait(headers: Any) -> float | None:
    """Return how many seconds an answer asks to wait: as a number, a date, or the end of a rate limit."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    limit = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    if limit is not None:
        return float(limit[1]) + 1
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


def _check_request(request: Any) -> None:
    request.headers["Accept-Encoding"] = "identity"
    given = request.extensions.get("timeout", {})
    if request.method in ("GET", "HEAD"):
        # Where a first try takes too long, the client makes a second one of a minute.
        longest = limits.answer_seconds() if request.method == "HEAD" else limits.silence_seconds()
        capped = {what: longest if asked is None else min(asked, longest) for what, asked in given.items()}
        _ask_once(request, capped.get("read", longest))
    else:  # calls that say none would wait for ever
        capped = {what: limits.allowed() if asked is None else asked for what, asked in given.items()}
    request.extensions = {**request.extensions, "timeout": capped}
    if origin(str(request.url)) != origin(endpoint()):
        request.headers.pop("Authorization", None)


def _ask_once(request: Any, seconds: float) -> None:
    """Refuse to ask again what nobody has answered in time: the client would, several times."""
    waiting, now = _unanswered.get(), time.monotonic()
    if waiting is not None:
        asked_at = waiting.get(asked := _asked(request))
        if asked_at is not None and now - asked_at >= seconds:
            raise BrokenOff(f"no answer in {seconds} s")
        waiting[asked] = now


def _asked(request: Any) -> tuple[str, str, str | None]:
    return request.method, str(request.url), request.headers.get("Range")


def _check_answer(response: Any) -> None:
    subject = f"{response.request.url.host}{response.request.url.path}"
    method, status = response.request.method, response.status_code
    (_unanswered.get() or {}).pop(_asked(response.request), None)
    _check_names(subject, response)
    _keep_token_here(response)
    if method == "HEAD":
        file = None
    else:
        _check_encoding(subject, response)
        file = _fetched.get() if method == "GET" and status in (200, 206) else None
        most = limits.MAX_METADATA_BYTES if file is None else file.n_bytes + _SLACK_BYTES
        if file is None:
            _check_length(subject, response, most)
        make = _bounded(type(response).__module__.partition(".")[0])
        response.stream = make(response.stream, subject, most, file)
    if status in PASSING:
        _later(subject, response)


def _check_names(subject: str, response: Any) -> None:
    """Refuse an ETag or a commit that would make another file name than one of the Hub's."""
    if response.request.method != "HEAD":
        return
    name = "X-Linked-ETag" if response.headers.get("X-Linked-ETag") else "ETag"  # as the client takes them
    found = response.headers.get(name)
    if found is not None and not _ETAG.fullmatch(found):
        raise HubError(f"{subject}: the server's {name} is {shown(repr(found))}, expected a hash")
    found, file = response.headers.get("X-Repo-Commit"), _fetched.get()
    if found is None:
        return
    if not is_commit(found):
        raise HubError(f"{subject}: the server's commit is {shown(repr(found))}, expected 40 hex digits")
    if file is not None and file.commit != found:
        raise HubError(f"{subject}: the server's file is of commit {found}, expected {file.commit}")


def _keep_token_here(response: Any) -> None:
    """Take the address away by which the client would have another server renew its access to Xet.

    The token goes there by a library that doesn't pass through here. Without it, the file is fetched by HTTP.
    """
    links = [link.get("url", "") for rel, link in response.links.items() if "xet" in str(rel)]
    asked = [response.headers.get("X-Xet-Refresh-Route"), *links]
    # The client puts the endpoint in the place of the public Hub.
    allowed = (origin(endpoint()), origin("https://huggingface.co"))
    if any(origin(address) not in allowed for address in asked if address is not None):
        response.headers.pop("X-Xet-Hash", None)


def _check_encoding(subject: str, response: Any) -> None:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise HubError(
            f"{subject}: the server packed its answer ({shown(encoding)}), expected an unpacked answer"
        )


def _check_length(subject: str, response: Any, most: int) -> None:
    length = response.headers.get("Content-Length", "0").strip()
    if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise HubError(f"{subject}: the server's answer is {length[:40]} bytes long, expected at most {most}")


def _later(subject: str, response: Any) -> None:
    """Give an answer that means "later" to who waits for it; where the client waits, see to the time."""
    from gguf_tools.hub.library import hf_raise_for_status

    if response.request.method in ("GET", "HEAD"):
        response.read()
        try:
            hf_raise_for_status(response)
        except Exception as error:  # lists too deep for a message, too
            said = getattr(error, "server_message", None) or str(error)
            raise Later(str(said), response) from None
    wait = asked_wait(response.headers)
    if wait is None:
        return
    check_wait(subject, wait)
    if wait > 10:
        say_aside(f"{subject}: busy ({response.status_code}); going on in {wait:.0f} s")


def check_wait(subject: str, wait: float) -> None:
    """Raise HubError for a wait that is longer than the user allows."""
    if wait > limits.allowed():
        raise HubError(
            f"{subject}: too many requests, or busy: the server asks to wait {wait:.0f} s, and --timeout"
            f" allows {limits.allowed():g} s; try again later, or allow more; finished files are kept"
        )


@functools.cache
def _bounded(library: str) -> Callable[..., Any]:
    """Return a class of bodies that end, or raise; httpx of either generation takes its own streams alone."""
    base: Any = getattr(sys.modules[library], "SyncByteStream", object)

    class Bounded(base):
        """A body of at most `most` bytes; a file's has to keep the pace, others to end in time."""

        def __init__(self, stream: Any, subject: str, most: int, file: Fetched | None) -> None:
            self._stream, self._subject, self._most = stream, subject, most
            self._is_file = file is not None
            self._stop = threading.Event() if file is None else file.stop

        def __iter__(self) -> Iterator[bytes]:
            n_bytes = n_recent = 0
            waited, begun = 0.0, time.monotonic()
            try:
                for piece in self._stream:
                    if self._stop.is_set():
                        raise KeyboardInterrupt
                    waited += time.monotonic() - begun
                    n_bytes += len(piece)
                    n_recent += len(piece)
                    if n_bytes > self._most:
                        raise HubError(
                            f"{self._subject}: the server's answer has no end, or more than the"
                            f" {self._most} bytes that were expected"
                        )
                    if self._is_file and n_recent >= limits.MIN_PROGRESS_BYTES:
                        waited, n_recent = 0.0, 0
                    elif waited > (limits.silence_seconds() if self._is_file else limits.allowed()):
                        raise BrokenOff(f"{n_recent} bytes in {waited:.0f} s")
                    yield piece
                    begun = time.monotonic()
            except (HubError, BrokenOff):
                raise
            except Exception as error:
                if self._is_file and n_bytes < limits.MIN_PROGRESS_BYTES:
                    # Otherwise the client goes on from here, and would do so for ever.
                    raise BrokenOff(str(error)) from error
                raise

        def close(self) -> None:
            self._stream.close()

    return Bounded
