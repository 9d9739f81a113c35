"""Calls of the Hub's client: refusals become one line, and what passes is tried again."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gguf_tools.errors import HubError

T = TypeVar("T")

TRIES = 5
"""How often a call is made that fails for a reason that passes."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 300.0
"""Seconds before the second try, doubled for each further one; and the longest wait that a server gets."""

PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP status codes that mean: later."""

_BROKEN = (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT)


@contextmanager
def quiet_client(*, bars: bool) -> Iterator[None]:
    """Keep the client from logging what is told in an error anyway; without `bars`, from drawing any."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    verbosity, had_bars = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    if had_bars and not bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars and not bars:
            enable_progress_bars()


def call(subject: str, action: Callable[[], T], *, is_first: bool = False) -> T:
    """Return what `action` does; try again what passes: rate limits, servers that are busy, broken lines.

    subject   what the error names, OWNER/NAME or OWNER/NAME@REVISION
    is_first  nothing has been asked yet, and the name may be a mistyped path: without a way to the Hub there
              is no second try
    raises    HubError
    """
    for number in range(TRIES):
        try:
            return action()
        except Exception as error:
            if number == TRIES - 1 or not is_passing(error) or (is_first and _is_unreachable(error)):
                raise _explained(subject, error) from error
            asked = _asked_wait(error)
            wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**number if asked is None else asked)
            if wait > 10:
                print(f"{subject}: {_reason(error)}; going on in {wait:.0f} s", file=sys.stderr, flush=True)
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def is_passing(error: BaseException) -> bool:
    """Whether a call that failed in this way may well succeed when it is made again."""
    for cause in _causes(error):
        status = _status(cause)
        if status is not None:
            return status in PASSING
        if isinstance(cause, OSError) and cause.errno in _BROKEN:
            return True
        if _is_of_transport(cause):
            return type(cause).__name__ not in ("UnsupportedProtocol", "InvalidURL")
    return False


def is_unknown(error: BaseException) -> bool:
    """Whether it is open if there is such a model: the Hub knows none, or could not or must not be asked."""
    from huggingface_hub import errors

    unknown = (errors.RepositoryNotFoundError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)
    causes = list(_causes(error))
    is_gated = any(isinstance(cause, errors.GatedRepoError) for cause in causes)
    return not is_gated and (_is_unreachable(error) or any(isinstance(cause, unknown) for cause in causes))


def endpoint() -> str:
    """Return the address of the Hub that is used."""
    from huggingface_hub import constants

    return constants.ENDPOINT


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
        asked = getattr(getattr(cause, "response", None), "headers", {}).get("Retry-After", "")
        if asked.isdecimal():
            return float(asked)
    return None


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
    """Return what a failed call means, as an error of one line; a bug or a full disk stays what it is."""
    if isinstance(error, HubError):
        return error
    reason = _reason(error)
    if reason is None and isinstance(error, RuntimeError | ValueError) and _is_of_client(error):
        # How the client tells of storage that refuses a file, and its part in Rust of anything.
        reason = _last_line(error)
    return error if reason is None else HubError(f"{subject}: {reason}")


def _reason(error: BaseException) -> str | None:
    from huggingface_hub import errors

    login = "log in (`hf auth login`, or HF_TOKEN)"
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, errors.GatedRepoError):
            return f"gated: ask for access at {endpoint()}/{subject_of(cause)} and {login}"
        if isinstance(cause, errors.RevisionNotFoundError):
            return "there is no such revision on the Hub"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return f"not found at {endpoint()}; check the name, and if it is private, {login}"
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return "not whole in the cache, and HF_HUB_OFFLINE forbids to ask the Hub"
        if isinstance(cause, errors.HFValidationError):
            return "not a name that the Hub accepts, expected OWNER/NAME"
        if (status := _status(cause)) is not None:
            return _of_status(status, cause, login)
        if _is_of_transport(cause):
            return f"{endpoint()} can't be reached, or broke off ({_first_line(cause)})"
    if isinstance(causes[0], errors.LocalEntryNotFoundError):
        return "not whole in the cache, and the Hub is not asked (HF_HUB_OFFLINE) or can't be reached"
    if isinstance(causes[0], errors.EntryNotFoundError):
        return f"the Hub has no such file ({_first_line(causes[0])})"
    return None


def _of_status(status: int, error: BaseException, login: str) -> str:
    if status == 401:
        return f"the Hub wants to know who asks (401); {login}"
    if status == 403:
        return f"the token has no right to this (403): {_first_line(error)}"
    if status == 404:
        return f"the Hub has no such file (404): {_first_line(error)}"
    if status == 429:
        return "too many requests (429); try again later, finished files are kept"
    return f"the Hub answered {status}: {_first_line(error)}"


def subject_of(error: BaseException) -> str:
    """Return the OWNER/NAME that an error of the client knows of, or nothing."""
    return str(getattr(error, "repo_id", None) or "")


def _is_of_client(error: BaseException) -> bool:
    """Whether the client raised an error, and not what called it."""
    trace, module = error.__traceback__, ""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return module.partition(".")[0] in ("huggingface_hub", "hf_xet")


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    """Return what the server said, or else the first line of the client's text that says something."""
    said = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
