"""All chains of command lines by which two builds are compared."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.builds import file_cases, mistakes, model_cases, text_cases
from scripts.builds.chains import Chain


def all_chains() -> Iterator[Chain]:
    """Yield the chains, long ones first, so that none runs alone at the end."""
    yield from text_cases.chains()
    yield from model_cases.chains()
    yield from mistakes.chains()
    yield from file_cases.chains()
