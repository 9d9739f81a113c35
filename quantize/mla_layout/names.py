"""Names of the layouts of multi-head latent attention, apart from what they mean, for quick importing."""

from __future__ import annotations

from typing import Literal, get_args

MLALayout = Literal["split", "both", "none"]
LAYOUTS: tuple[MLALayout, ...] = get_args(MLALayout)
