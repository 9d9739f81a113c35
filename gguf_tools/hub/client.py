"""Calls of the Hub's client: refusals become one line, and what passes is tried again."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from gguf_tools.errors import HubError, ToolkitError
from gguf_tools.hub.answers import PASSING, asked_wait, check_wait, endpoint, guarded
from gguf_tools.hub.limits import MIN_PROGRESS_BYTES, BrokenOff
from gguf_tools.system.settings import SharedContext
from gguf_tools.text import cut_short, say_aside

T = TypeVar("T")

TRIES = 5
"""How often a call is made that a busy server puts off."""

TRIES_WITHOUT_PROGRESS = 3
"""How often it is made when the line breaks, or what comes is of no use."""

FIRST_WAIT_SECONDS = 1.0
"""Seconds before the second try, doubled for each further one, unless the server asks for another time."""

MAX_REASON_CHARS = 400

_NEVER_PASSING = ("UnsupportedProtocol", "InvalidURL", "TooManyRedirects", "DecodingError")
"""Errors of the transport that come again with every try."""

_BROKEN = (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT)


@contextmanager
def quiet_client(*, bars: bool) -> Iterator[None]:
    """Keep the client from logging what is told in an error anyway; without `bars`, from drawing any."""
    with _ERRORS_ALONE, nullcontext() if bars else _NO_BARS:
        yield


@contextmanager
def _errors_alone() -> Iterator[None]:
    from gguf_tools.hub.library import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _no_bars() -> Iterator[None]:
    from gguf_tools.hub import library

    had_bars = not library.are_progress_bars_disabled()
    if had_bars:
        library.disable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            library.enable_progress_bars()


_ERRORS_ALONE, _NO_BARS = SharedContext(_errors_alone), SharedContext(_no_bars)


def call(
    subject: str,
    action: Callable[[], T],
    *,
    is_first: bool = False,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """Call `action`; try again what passes: rate limits, servers that are busy, broken lines.

    subject   what the error names, OWNER/NAME or OWNER/NAME@REVISION
    is_first  nothing has been asked yet, and the name may be a mistyped path: without a way to the Hub there
              is no second try
    progress  how many bytes have come in all tries; when enough have, the tries are counted anew
    raises    HubError
    """
    busy = stuck = n_bytes = 0
    while True:
        try:
            with guarded():
                return action()
        except Exception as error:
            if progress() - n_bytes >= MIN_PROGRESS_BYTES:
                busy, stuck, n_bytes = 0, 0, progress()
            is_busy = any(_status(cause) in PASSING for cause in _causes(error))
            busy, stuck = busy + is_busy, stuck + (not is_busy)
            is_last = busy >= TRIES or stuck >= TRIES_WITHOUT_PROGRESS
            if is_last or not is_passing(error) or (is_first and _is_unreachable(error)):
                explained = _explained(subject, error)
                if explained is error:
                    raise
                raise explained from error
            asked = _asked_wait(error)
            wait = FIRST_WAIT_SECONDS * 2 ** (busy + stuck - 1) if asked is None else asked
            if asked is not None:
                check_wait(subject, asked)
            if wait > 10:
                say_aside(f"{subject}: {_reason(error)}; going on in {wait:.0f} s")
            time.sleep(wait)


def is_passing(error: BaseException) -> bool:
    """Whether a call that failed in this way may well succeed when it is made again."""
    for cause in _causes(error):
        status = _status(cause)
        if status is not None:
            return status in PASSING
        if isinstance(cause, BrokenOff) or _is_inconsistent(cause):
            return True
        if isinstance(cause, OSError) and cause.errno in _BROKEN:
            return True
        if _is_of_transport(cause):
            return type(cause).__name__ not in _NEVER_PASSING
    return False


def is_unknown(error: BaseException) -> bool:
    """Whether it is open if there is such a model: the Hub knows none, or could not or must not be asked."""
    from gguf_tools.hub.library import errors

    unknown = (errors.RepositoryNotFoundError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)
    causes = list(_causes(error))
    is_gated = any(isinstance(cause, errors.GatedRepoError) for cause in causes)
    return not is_gated and (_is_unreachable(error) or any(isinstance(cause, unknown) for cause in causes))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _asked_wait(error: BaseException) -> float | None:
    """Return how many seconds the server asks to wait."""
    for cause in _causes(error):
        if (headers := getattr(getattr(cause, "response", None), "headers", None)) is not None:
            return asked_wait(headers)
    return None


def _is_inconsistent(error: BaseException) -> bool:
    """Whether the client has got fewer bytes than it was promised, or more."""
    return type(error) is OSError and error.errno is None and _is_of_client(error)


def _is_of_transport(error: BaseException) -> bool:
    """Whether an error comes from below the client: httpx in its several generations, requests, urllib3."""
    package = type(error).__module__.partition(".")[0]
    return package.startswith(("httpx", "httpcore", "requests", "urllib3"))


def _is_unreachable(error: BaseException) -> bool:
    """Whether no connection was made: no network, no such host, nobody listening there."""
    return any(
        type(cause).__name__ in ("ConnectError", "ConnectTimeout") and _is_of_transport(cause)
        for cause in _causes(error)
    )


def _explained(subject: str, error: Exception) -> Exception:
    """Turn the failure of a call into an error of one line; a bug or a full disk stays what it is."""
    for cause in _causes(error):
        if isinstance(cause, ToolkitError):  # which the client may have wrapped
            return error if cause is error else HubError(str(cause))
    reason = _reason(error)
    if reason is None and _is_of_client(error):
        reason = _of_client(error)
    if reason is None:
        return error
    # It may have a server's words in it.
    return HubError(f"{subject}: {cut_short(' '.join(reason.split()), MAX_REASON_CHARS)}")


def _reason(error: BaseException) -> str | None:
    from gguf_tools.hub.library import errors

    login = "log in (`hf auth login`, or HF_TOKEN)"
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, errors.GatedRepoError):
            return (
                f"gated: ask for access at {endpoint()}/{getattr(cause, 'repo_id', None) or ''} and {login}"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return "there is no such revision on the Hub"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return f"not found at {endpoint()}; check the name, and if it is private, {login}"
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return "not complete in the cache, and HF_HUB_OFFLINE forbids asking the Hub"
        if isinstance(cause, errors.HFValidationError):
            return "not a name that the Hub accepts, expected OWNER/NAME"
        if (status := _status(cause)) is not None:
            return _of_status(status, cause, login)
        if isinstance(cause, BrokenOff) or _is_of_transport(cause):
            return f"{endpoint()} can't be reached, or broke off ({_first_line(cause)})"
        if isinstance(cause, errors.FileMetadataError):
            return f"the Hub's answer lacks what it says of a file ({_first_line(cause)})"
    if isinstance(causes[0], errors.LocalEntryNotFoundError):
        return "not complete in the cache, and the Hub is not asked (HF_HUB_OFFLINE) or can't be reached"
    if isinstance(causes[0], errors.EntryNotFoundError):
        return f"the Hub has no such file ({_first_line(causes[0])})"
    return None


def _of_status(status: int, error: BaseException, login: str) -> str:
    if status == 401:
        return f"the Hub asks for a login (401); {login}"
    if status == 403:
        return f"the token lacks permission for this (403): {_first_line(error)}"
    if status == 404:
        return f"the Hub has no such file (404): {_first_line(error)}"
    if status == 429:
        return "too many requests (429); try again later, finished files are kept"
    return f"the Hub answered {status}: {_first_line(error)}"


def _of_client(error: Exception) -> str | None:
    """Explain an error that the client did not mean to raise: an answer that it did not expect."""
    if isinstance(error, RecursionError):
        return "the Hub's answer is nested too deep, or broke off again and again"
    if _is_inconsistent(error):
        return _first_line(error)
    if isinstance(error, RuntimeError):
        # How the client tells of storage that refuses a file, and its part in Rust of anything.
        return _last_line(error)
    if isinstance(error, LookupError | TypeError | ValueError | AttributeError | ArithmeticError):
        return f"the Hub's answer is not what it should be ({type(error).__name__}: {_last_line(error)})"
    return "the Hub's answer lacks something" if isinstance(error, AssertionError) else None


def _is_of_client(error: BaseException) -> bool:
    """Whether an error was raised by the client, or by what it called."""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in ("huggingface_hub", "hf_xet"):
            return True
        trace = trace.tb_next
    return False


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    """Return the server's text, or else the first line of the client's text that says something."""
    said = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
