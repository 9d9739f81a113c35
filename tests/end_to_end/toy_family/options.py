"""What the user may choose about a toy model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True)
class Options:
    """Choices about a toy model.

    rope_rows  "pairs"   rows of queries and keys that are rotated together become neighbours
               "halves"  they stay half a head apart, as in the checkpoint
    """

    rope_rows: Annotated[Literal["pairs", "halves"], "order of rotated rows (default: pairs)"] = "pairs"
