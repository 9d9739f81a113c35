"""How long a server of the Hub may take, and how much it may send.

A timeout of the client is that of one read, and a server that sends a byte in each of them is never late. So
bodies of answers are counted (`answers.py`): each `silence_seconds` of waiting has to bring
MIN_PROGRESS_BYTES.
"""

from __future__ import annotations

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


class BrokenOff(Exception):
    """An answer that ended, or did not come, before it had brought anything worth going on from."""
