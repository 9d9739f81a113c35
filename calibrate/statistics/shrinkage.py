"""How far the moments of a text are trusted: less where there is little of it, or nothing to prove them.

Held-out chunks show whether a tensor has become better on text that it was not encoded under. A text of one
chunk leaves none, and those of nonsense are more of the same. Then drift is not corrected: unchecked, the
correction would fit the noise of the text. Little text, and nonsense, is damped more.
"""

from __future__ import annotations

from dataclasses import dataclass

from calibrate.rounding.factor import DAMP
from calibrate.rounding.two_sided import OUTPUT_DAMP
from forward.text.quality import TextQuality
from forward.text.tokens import Text

_LITTLE_TOKENS, _MORE_INPUT_DAMP, _MORE_OUTPUT_DAMP = 8192, 0.1, 0.5
"""Up to how many tokens moments are damped more, and how much; docs/calibrated.md has what was measured."""


@dataclass(frozen=True)
class Trust:
    """How far moments are trusted.

    corrects_drift  whether a tensor is corrected for what the ones before it have changed
    input_damp      what is added to the diagonal of second moments, in units of its mean
    output_damp     the same of the covariances of gradients
    """

    corrects_drift: bool = True
    input_damp: float = DAMP
    output_damp: float = OUTPUT_DAMP

    @classmethod
    def of(cls, text: Text, quality: TextQuality) -> Trust:
        """Return how far a text is trusted."""
        proves = text.n_chunks > 1 and not quality.is_nonsense
        if proves and text.inputs.size > _LITTLE_TOKENS:
            return cls()
        return cls(proves, _MORE_INPUT_DAMP, _MORE_OUTPUT_DAMP)
