"""How routers score experts, as expert_gating_func says it."""

from __future__ import annotations

from collections.abc import Mapping

from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format.hparams import HParams

GATING_FUNCTIONS: Mapping[str, int] = {"softmax": 1, "sigmoid": 2}
"""Number in expert_gating_func for each scoring function that most families have."""


def scoring_function(hparams: HParams, functions: Mapping[str, int], unset: str | None = None) -> str:
    """Return the scoring function that the keys name.

    functions  the number of each that the family has
    unset      the function where the key is 0 or missing; None: there must be one
    raises     UnsupportedCheckpoint for another number
    """
    number = hparams.size("expert_gating_func", 0)
    if not number and unset is not None:
        return unset
    for name, known in functions.items():
        if number == known:
            return name
    raise UnsupportedCheckpoint(
        f"{hparams.path}: {hparams.key('expert_gating_func')} is {number},"
        f" expected {' or '.join(f'{known} ({name})' for name, known in functions.items())}"
    )
