"""Which known family an unknown architecture resembles, and what that family lacks.

The names of its weights say it: numbers of layers and experts are left out of them, and what remains is
compared with the sources of every family's rules. Without weights the name alone is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from gguf_tools.text import first_of

if TYPE_CHECKING:
    from convert.architectures.base import Architecture

LISTED = 4
"""Number of kinds of tensors that the message lists before it counts the rest."""

_COMPARED = 200
"""Characters of an architecture's name that are compared; a hostile config.json may have a million."""

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_CODES = re.compile(r"\.(?:qweight|weight_packed)$")
"""Names of a weight's codes in formats of quantized checkpoints."""
_SIDE = re.compile(
    r"scales?$|scale_\w+$|[._](?:qzeros|g_idx|zero_point|weight_shape|absmax|quant_map)$|quant_state"
)
"""Names of what belongs to those codes."""


def nearest(name: str, families: Iterable[Architecture], weights: Iterable[str] | None) -> str:
    """Return words that name the family nearest to an architecture, and what that family lacks.

    name      of the architecture in config.json
    families  all that are known
    weights   names of stored tensors; None where they aren't known
    """
    name, stored = name[:_COMPARED], list(weights or ())
    best = max(families, key=lambda family: _likeness(family, name, stored))
    words = f"the nearest is {_closest_name(best, name)} ({best.gguf_name})"
    if not stored:
        return words
    known, kinds = _sources(best), _kinds(best, stored)
    lacking = [kind for kind in dict.fromkeys(kinds) if kind not in known]
    if not lacking:
        return f"{words}, which knows all of its tensors; what is missing is how its config.json is read"
    return f"{words}, which has no rule for {first_of(lacking, LISTED, 'more kinds')}"


def _likeness(family: Architecture, name: str, stored: list[str]) -> tuple[float, float, float]:
    """Return how much of the checkpoint a family knows, how much of it is there, and how like its name is."""
    known, kinds = _sources(family), set(_kinds(family, stored))
    both = len(known & kinds)
    ratio = SequenceMatcher(None, name, _closest_name(family, name)).ratio()
    return both / max(len(kinds), 1), both / max(len(known), 1), ratio


def _closest_name(family: Architecture, name: str) -> str:
    return max(family.hf_names, key=lambda known: SequenceMatcher(None, name, known).ratio())


def _sources(family: Architecture) -> set[str]:
    """Return the names of weights that a family's rules ask for, with N in place of numbers."""
    sources = (source for rule in family.rules for output in rule.outputs for source in output.source.split())
    return {_NUMBER.sub(".N", source.format(layer="N", expert="N", part="N")) for source in sources}


def _kinds(family: Architecture, stored: list[str]) -> Iterator[str]:
    """Yield the names of weights as the family's rules would know them, with N in place of numbers."""
    canonical = family.stored_names
    for name in stored:
        if not _SIDE.search(name):
            name = _CODES.sub(".weight", name).removesuffix("_blocks")
            yield _NUMBER.sub(".N", canonical(name))
