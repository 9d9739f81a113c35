"""A text of a few words in random order, which the small models' tokenizers know."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"]


def write_words(path: Path, n_words: int) -> Path:
    """Write so many words."""
    order = np.random.default_rng(3).integers(0, len(_WORDS), n_words)
    path.write_text(" ".join(_WORDS[number] for number in order))
    return path
