"""What the user may choose about the conversion of a GLM-4 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Options:
    """Choices about a GLM-4 with experts.

    mtp  keep the multi-token-prediction layers; None: if the checkpoint has them
    """

    mtp: Annotated[bool | None, "keep the multi-token-prediction layers, or leave them out"] = None
