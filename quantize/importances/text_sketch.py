"""A sketch of a text: enough of its passages to tell later how much of another text was in it.

A file that was calibrated on a text is nearer to its base there than elsewhere. So the file keeps a sketch of
that text, and whoever measures it can see whether the measured text is a new one.

A passage is 50 tokens in a row, and a text has one at each of its tokens but the last 49. Each passage has a
hash. Of every `window` passages in a row the smallest hash is kept (winnowing: Schleimer, Wilkerson, Aiken,
2003). So whichever passages two texts share, if they share 50 + window - 1 tokens in a row, one of them is
kept. About 2 in window + 1 are, by which shares are estimated. The window is chosen so that about MAX_HASHES
are kept, whatever the length of the text: it is 122 for a text of 250,000 tokens.

    gguf_tools.calibration.sketch   array of uint32, two for each hash: the lower half and the upper
    gguf_tools.calibration.window   uint32
    gguf_tools.calibration.sha256   string, of the text's file

The halves are there for readers whose numbers are floats, as in `quantize.fill.provenance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from gguf_tools.format.values import Kind, Metadata, Value

PASSAGE = 50
"""Tokens of a passage: too many to be shared by chance, few enough to find a paragraph."""

MAX_HASHES = 4096
"""About the most that a sketch keeps: 32 KB."""

SKETCH_KEY = "gguf_tools.calibration.sketch"
WINDOW_KEY = "gguf_tools.calibration.window"
SHA256_KEY = "gguf_tools.calibration.sha256"

Hashes = npt.NDArray[np.uint64]

_BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that its powers can be divided by modulo 2**64: the golden ratio, as in splitmix64."""


@dataclass(frozen=True, eq=False)
class TextSketch:
    """Some of a text's passages.

    hashes  uint64 (n,), sorted, each once
    window  of as many passages in a row one is among them
    sha256  of the text's file
    """

    hashes: Hashes
    window: int
    sha256: str

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int64], sha256: str) -> Self:
        """Sketch a text of tokens, int64 (n,)."""
        hashes = hash_passages(tokens)
        window = max(1, -(-2 * len(hashes) // MAX_HASHES) - 1)
        return cls(np.unique(_smallest(hashes, window)), window, sha256)

    @classmethod
    def read(cls, metadata: Metadata) -> Self | None:
        """Read the sketch that a file keeps; None for one that keeps none, or one that makes no sense."""
        kept, window, sha256 = (metadata.get(key) for key in (SKETCH_KEY, WINDOW_KEY, SHA256_KEY))
        if kept is None or window is None or kept.item is not Kind.UINT32 or len(kept.data) % 2:
            return None
        if window.kind is not Kind.UINT32 or window.data < 1:
            return None
        halves = np.array(kept.data, np.uint64)
        told = sha256.data if sha256 is not None and sha256.kind is Kind.STRING else ""
        return cls(np.unique(halves[::2] | halves[1::2] << np.uint64(32)), window.data, told)

    def metadata(self) -> Metadata:
        """Make the keys that a file keeps."""
        halves = np.stack([self.hashes & np.uint64(0xFFFFFFFF), self.hashes >> np.uint64(32)], axis=1)
        return {
            SKETCH_KEY: Value.u32s(map(int, halves.ravel())),
            WINDOW_KEY: Value.u32(self.window),
            SHA256_KEY: Value.string(self.sha256),
        }

    def joined(self, other: Self) -> Self:
        """Sketch this text and another one as one, under the name of this one.

        Of the text with the narrower window more hashes are kept than the wider one tells, so what is shared
        with it is estimated too high.
        """
        hashes = np.union1d(self.hashes, other.hashes)
        return type(self)(hashes, max(self.window, other.window), self.sha256)

    def shared(self, tokens: npt.NDArray[np.int64]) -> float:
        """Estimate how much of another text's passages the sketched text has, 0 to 1.

        tokens   int64 (n,)
        returns  more than 0 if the texts share PASSAGE + window - 1 tokens in a row
        """
        hashes = hash_passages(tokens)
        n_found = int(np.isin(hashes, self.hashes).sum())
        return min(1.0, n_found * (self.window + 1) / 2 / max(len(hashes), 1))


def hash_passages(tokens: npt.NDArray[np.int64]) -> Hashes:
    """Hash each passage of a text.

    tokens   int64 (n,)
    returns  uint64 (n - PASSAGE + 1,), none for a shorter text
    """
    n = len(tokens) - PASSAGE + 1
    if n <= 0:
        return np.zeros(0, np.uint64)
    # A polynomial in _BASE, as a difference of running sums; all is modulo 2**64.
    mixed = _mixed(tokens.astype(np.uint64))
    powers = np.cumprod(np.full(len(tokens), _BASE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * powers)])
    inverses = np.cumprod(np.full(n, np.uint64(pow(int(_BASE), -1, 1 << 64))))
    return _mixed((sums[PASSAGE:] - sums[:-PASSAGE]) * inverses)


def _mixed(values: Hashes) -> Hashes:
    """Make values whose bits all depend on all bits of those given (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _smallest(hashes: Hashes, window: int) -> Hashes:
    """Take the smallest of each `window` hashes in a row."""
    length = 1
    while length < window:  # of windows up to twice as long, from two that overlap
        step = min(length, window - length)
        hashes = np.minimum(hashes[:-step], hashes[step:])
        length += step
    return hashes
