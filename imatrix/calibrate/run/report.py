"""The report of a calibration: what it has done, how far the model has diverged, and findings.

A calibration's worth on each class of text is told by the errors of its bytes on held-out chunks. A matrix
under the gradients at its outputs has errors in nats: half of tr(G E H E^T) for a token, about the
divergence that they cause. Those of all such matrices add up. Where no gradients are known, as with
one-sided rounding, the errors of different matrices can't be added, and the mean of their logarithms is
taken.

Each matrix is tested behind the calibrated ones before it, and by the mean gradients of the whole text. So
the share of stock's error is not the share of its divergence that the file will have; docs/calibrated.md
has figures of both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gguf_tools.findings import Finding, Level
from gguf_tools.text import table
from imatrix.calibrate.run.context import RunContext
from imatrix.calibrate.run.output import Record, Records
from imatrix.calibrate.statistics.inputs import HoldoutSplit
from imatrix.evaluate.divergence import Estimate, mean_of
from imatrix.evaluate.visitor import DivergenceVisitor
from imatrix.forward.logits import Head, sweep_vocabulary
from imatrix.forward.network import Network
from imatrix.texts.quality import TextQuality
from imatrix.texts.tokens import Text
from quantize.roles import feed_forward_place, in_layer_ranges


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


_LEAST_TOKENS = 4
"""Number of tokens that a chunk must have for its second half to be measured."""


@dataclass(frozen=True)
class FinalDivergence:
    """Mean divergence of the model that was written from the original, in nats.

    summed    on the chunks that it was encoded under
    held      on the held-out chunks
    by_class  on the held-out chunks of each class of text that has some; empty for a single text
    """

    summed: Estimate
    held: Estimate
    by_class: Mapping[str, Estimate] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield (
            f"divergence from the original on the calibration text: KLD {self.summed.value:.5f} +/-"
            f" {self.summed.error:.5f}, on chunks held back {self.held.value:.5f} +/- {self.held.error:.5f}"
        )


def final_divergence(
    context: RunContext, network: Network, text: Text, n_threads: int
) -> FinalDivergence | None:
    """Return how far the models' predictions are apart; None where there is one model, or chunks are short.

    raises  BadActivation for logits with NaN or infinity
    """
    if not context.is_followed or text.chunk_size < _LEAST_TOKENS:
        return None
    heads = [
        Head.of(network, model.load, model.stream.after(network.n_layers - 1)) for model in context.models
    ]
    paths = [model.load.path for model in context.models]
    visitor = DivergenceVisitor(text.chunks, paths, context.device, lambda chunk, n_chunks: None)
    sweep_vocabulary(heads, visitor.positions, [visitor], n_threads)
    tokens = visitor.values(1)
    holdout = context.holdout
    summed = np.array([holdout.is_summed(chunk) for chunk in range(text.n_chunks)])[tokens.chunk]

    def mean_on(chunks: Iterable[int]) -> Estimate:
        return mean_of(tokens.kld[np.isin(tokens.chunk, list(chunks))])

    held: dict[str, list[int]] = {}
    for chunk in holdout.held if holdout.classes else ():
        held.setdefault(holdout.classes[chunk], []).append(chunk)
    by_class = {name: mean_on(chunks) for name, chunks in held.items()}
    return FinalDivergence(mean_of(tokens.kld[summed]), mean_on(holdout.held), by_class)


@dataclass(frozen=True)
class Report:
    """The outcome of a calibration.

    parts     of all tensors that it has made
    holdout  of the text; None before anything is done
    divergence  how far the model that was written is from the original; None where it was not followed
    quality   of the text; None before anything is done
    """

    parts: tuple[Record, ...] = ()
    holdout: HoldoutSplit | None = None
    divergence: FinalDivergence | None = None
    quality: TextQuality | None = None

    @classmethod
    def of(
        cls,
        n_cols: Mapping[str, int],
        records: Records,
        holdout: HoldoutSplit,
        divergence: FinalDivergence | None,
        quality: TextQuality,
    ) -> Report:
        """Make the report of the tensors that `n_cols` names, with their columns without padding."""
        parts = tuple(replace(part, n_cols=n_cols[part.tensor]) for part in records.of(n_cols))
        return cls(parts, holdout, divergence, quality)

    @property
    def kept(self) -> tuple[Record, ...]:
        """The parts that have the stock encoder's bytes, because others were not better."""
        return tuple(part for part in self.parts if part.is_stock)

    @property
    def close(self) -> tuple[Record, ...]:
        """The parts of which it is chance whether they have the stock encoder's bytes."""
        return tuple(part for part in self.parts if part.is_close)

    @cached_property
    def classes(self) -> list[ClassErrors]:
        """The errors on each class of text."""
        return [] if self.holdout is None else errors_by_class(self.parts, self.holdout)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that a user should know, but those of classes, which are told on their own."""
        if self.quality is not None:
            yield from self.quality.findings()
            if self.quality.is_nonsense:
                yield Finding(
                    "nothing proven",
                    "rows that were held back are like all others of such a text and prove nothing: on"
                    " ordinary text the file may be worse than one made without --calibrate",
                    Level.BAD,
                )
        if self.holdout is not None and self.holdout.n_chunks == 1:
            yield Finding(
                "one chunk",
                "the text has one chunk, so nothing was held back: encodings were compared on the rows that"
                " they were made under, and no tensor makes up for those before it",
            )
        few = [part for part in self.parts if 0 < part.n_seen < part.n_cols]
        if few:
            names = _names(few)
            least = min(few, key=lambda part: part.n_seen / part.n_cols)
            shared = "for experts, statistics of the whole layer were used instead; "
            yield Finding(
                "little text",
                f"{len(few)} of {len(self.parts)} matrices saw fewer tokens than they have columns"
                f" ({least.tensor}: {least.n_seen} for {least.n_cols}):"
                f" {shared * any(map(_is_expert, few))}a longer text makes a better file: {names}",
                about=tuple(dict.fromkeys(part.tensor for part in few)),
            )
        unseen = [part for part in self.parts if part.n_seen == 0 and part.has_factor]
        if unseen:
            yield Finding(
                "unreached experts",
                f"no token reached {len(unseen)} matrices; activations of other matrices of their layer"
                f" were used instead: {_names(unseen)}",
                about=tuple(dict.fromkeys(part.tensor for part in unseen)),
            )
        alone = [part for part in self.parts if part.n_seen == 0 and not part.has_factor]
        if alone:
            yield Finding(
                "not seen",
                f"the text shows nothing of {len(alone)} matrices, which have stock's bytes: {_names(alone)}",
                about=tuple(dict.fromkeys(part.tensor for part in alone)),
            )
        bad = [part for part in self.parts if part.n_seen and not part.has_factor]
        if bad:
            yield Finding(
                "bad moments",
                f"{len(bad)} matrices keep stock's bytes, because their second moments are not positive"
                f" definite: {_names(bad)}",
                Level.WARNING,
                tuple(dict.fromkeys(part.tensor for part in bad)),
            )


def report_lines(report: Report) -> Iterator[str]:
    """Tell what was done, and the findings."""
    parts, kept, close = report.parts, report.kept, report.close
    if not parts:
        return
    n_tensors = len({part.tensor for part in parts})
    yield f"calibrated {len(parts) - len(kept)} of {len(parts)} matrices in {n_tensors} tensors"
    if kept:
        yield f"  {len(kept)} were not better on text held back and keep stock's bytes: {_names(kept)}"
    if close:
        yield (
            f"  for {len(close)}, the text held back shows no clear winner between calibrated and stock"
            f" bytes, and another machine may choose the other: {_names(close)}"
        )
    if report.divergence is not None:
        yield from report.divergence.lines()
    yield from _class_lines(report)
    for finding in report.findings():
        yield f"{'warning' if finding.is_bad else 'note'}: {finding.text}"


def _class_lines(report: Report) -> Iterator[str]:
    """Tell the errors of matrices (as a share of stock's) and the divergence on held-out chunks, by class."""
    divergences = {} if report.divergence is None else report.divergence.by_class
    rows = []
    for each in report.classes:
        share, n_held = "-" if each.share is None else f"{each.share:.2f}", len(each.by_chunk)
        if not each.name and each.share is not None:
            chunks = ", ".join(f"{value:.2f} on chunk {n + 1}" for n, value in each.by_chunk.items())
            yield f"errors of matrices on chunks held back: {share} of stock's ({chunks})"
        elif each.name:
            kld = divergences.get(each.name)
            told = "-" if kld is None else f"{kld.value:.5f} +/- {kld.error:.5f}"
            rows.append((f"  {each.name}", str(each.n_chunks), str(n_held), share, told))
    if rows:
        heads = ("  class", "chunks", "held back", "errors of matrices / stock's", "KLD held back")
        yield from table([heads, *rows], right=(1, 2, 3, 4))


def _is_expert(part: Record) -> bool:
    place = feed_forward_place(part.tensor)
    return place is not None and place.part == "routed"


def _names(parts: Iterable[Record]) -> str:
    """Return the tensors of parts, each with the number of its parts."""
    counts = Counter(part.tensor for part in parts)
    return ", ".join(in_layer_ranges(counts))
