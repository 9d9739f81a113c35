"""Whether a text is written in one script alone: what it teaches may not hold for texts in others.

On SmolLM2-135M, files that were calibrated on English had 1.16 (Q2_K) and 1.20 (Q4_K_M) of stock's divergence
on Arabic, Chinese, Cyrillic, Devanagari, Hangul and Japanese, and 0.5 to 0.8 on texts in English and on code.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator

from gguf_tools.findings import Finding, Level

_NEARLY_ALL = 0.99


def script_findings(text: str) -> Iterator[Finding]:
    """Yield what a user should know of the scripts of a text that models are calibrated on."""
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            scripts[_script(character)] += count
    if not scripts:
        return
    ((script, count),) = scripts.most_common(1)
    if count >= _NEARLY_ALL * scripts.total():
        share = f"{100 * count / scripts.total():.1f} %"
        yield Finding(
            "one script",
            f"{share} of the text's letters are {script}: in other scripts the file may be worse than without"
            " --calibrate; add some text of each that it is for",
            Level.NOTE,
        )


def _script(letter: str) -> str:
    """Name the script of a letter, which begins its name in Unicode: LATIN SMALL LETTER A."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0].capitalize()
