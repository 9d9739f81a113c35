"""How two programs compare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    kind  equal, both refuse, deliberate, different ...
    text  what differs, or why
    """

    kind: str
    text: str = ""
