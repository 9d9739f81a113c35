"""Model families that can be computed.

A family is a row of FAMILIES: the name that GGUF files give it, what reads its configuration from a file's
metadata, and what makes a `Network` of that configuration. Of a folder, the metadata are those that its
conversion would have. All that follows sees the network alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import quoted
from imatrix.forward.families.decoder import DECODERS
from imatrix.forward.families.deepseek2 import DEEPSEEK2
from imatrix.forward.families.deepseek4 import DEEPSEEK4
from imatrix.forward.families.gemma4 import GEMMA4
from imatrix.forward.families.nemotron_h import NEMOTRON_H
from imatrix.forward.network import Family

FAMILIES: Mapping[str, Family] = {
    **DEEPSEEK2, "deepseek4": DEEPSEEK4, "gemma4": GEMMA4, **NEMOTRON_H, **DECODERS,
}  # fmt: skip
"""Families that can be computed, by the name that general.architecture gives them."""


def find_family(path: Path, name: object) -> Family:
    """Find the family that GGUF files call `name`; UnsupportedCheckpoint if it can't be computed."""
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = " or ".join(map(repr, FAMILIES))
        raise UnsupportedCheckpoint(f"{path}: general.architecture is {quoted(name)}, expected {known}")
    return family
