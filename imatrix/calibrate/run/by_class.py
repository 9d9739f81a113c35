"""Worth of a calibration on each class of text, by the errors of its bytes on held-out chunks.

A matrix under the gradients at its outputs has errors in nats: half of tr(G E H E^T) for a token, about the
divergence that they cause. Those of all such matrices add up. Where no gradients are known, as with one-sided
rounding, the errors of different matrices can't be added, and the mean of their logarithms is taken.

Each matrix is tested behind the calibrated ones before it, and by the mean gradients of the whole text. So
the share of stock's error is not the share of its divergence that the file will have; docs/calibrated.md has
figures of both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from gguf_tools.findings import Finding, Level
from imatrix.calibrate.run.output import Record
from imatrix.calibrate.statistics.inputs import HoldoutSplit


@dataclass(frozen=True)
class ClassErrors:
    """The errors on a class of text, as shares of what the stock encoder's bytes have there.

    name       empty for a single text
    n_chunks   of the class
    share      on all of its held-out chunks; None where nothing is known
    by_chunk   on each of them, by the chunk's number
    """

    name: str
    n_chunks: int
    share: float | None
    by_chunk: dict[int, float]

    @property
    def is_worse(self) -> bool:
        """Whether calibrated bytes are not better than stock's."""
        return self.share is not None and self.share >= 1


def errors_by_class(parts: Sequence[Record], holdout: HoldoutSplit) -> list[ClassErrors]:
    """Sum up the errors of all parts on each class of a text; nothing of a text without held-out chunks."""
    if holdout.n_chunks == 1:
        return []
    found = []
    for name in dict.fromkeys(holdout.classes) or ("",):
        held = [chunk for chunk in holdout.held if not name or holdout.classes[chunk] == name]
        shares = {chunk: _share(parts, (chunk,)) for chunk in held}
        by_chunk = {chunk: share for chunk, share in shares.items() if share is not None}
        n_chunks = holdout.classes.count(name) if name else holdout.n_chunks
        found.append(ClassErrors(name, n_chunks, _share(parts, held), by_chunk))
    return found


def class_findings(classes: Sequence[ClassErrors]) -> Iterator[Finding]:
    """Yield the classes on which calibrated bytes are not better than stock's, as one finding."""
    worse = [each for each in classes if each.is_worse]
    if worse:
        names = ", ".join(f"{each.name or 'the text'} ({each.share:.2f} of stock's error)" for each in worse)
        yield Finding(
            "class not better",
            f"on chunks held back, calibrated bytes are no better than stock's for {names}: the file may be"
            " worse there than one made without --calibrate; give it more text of that kind, and measure the"
            " file with evaluate",
            Level.BAD,
        )


def _share(parts: Sequence[Record], chunks: Collection[int]) -> float | None:
    """Compute the share of stock's error on some chunks; None where nothing is known."""
    sums, logarithms = [0.0, 0.0], []
    for part in parts:
        own = [each for each in part.chunks if each.chunk in chunks]
        stock = sum(each.stock_error for each in own)
        written = stock if part.is_stock else sum(each.error for each in own)
        if part.in_nats:
            sums = [sums[0] + written, sums[1] + stock]
        elif written > 0 and stock > 0:
            logarithms.append(math.log(written / stock))
    if sums[1]:
        return sums[0] / sums[1]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None
