"""How long a server of the Hub may take, and how much it may send."""

from __future__ import annotations

import math

MAX_METADATA_BYTES = 32 << 20
"""Maximum size of an answer that is no file: a list of files, an error's text."""

MIN_PROGRESS_BYTES = 64 << 10
"""How much has to come in a time, or by a try, for it to count."""

DEFAULT_SECONDS = 300.0
MAX_SECONDS = 7 * 86400.0

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


def seconds(text: str) -> float:
    """Return an argument as seconds that a server may take; ValueError for anything else."""
    number = float(text)
    if not (math.isfinite(number) and 0 < number <= MAX_SECONDS):
        raise ValueError(f"{text} is not a time of up to {MAX_SECONDS:.0f} s")
    return number
