"""How two programs compare, and why one of them stops."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    kind  equal, both refuse, deliberate, different ...
    text  what differs, or why
    """

    kind: str
    text: str = ""


def why(log: str) -> str:
    """Return the line of a program's log that says why it stops."""
    lines = re.findall(r".*(?:failed to|GGML_ASSERT|GGML_ABORT|fatal error|terminate|Invalid).*", log)
    told = [line for line in lines if "main: failed" not in line]
    return told[-1] if told else log[-200:]
