"""Count how often the interval of a paired comparison holds the truth, beside methods that were not chosen.

    python scripts/check/intervals.py [--population FILE.npz] [--chunks 3 8 16 32 64] [--draws 4000]
    python scripts/check/intervals.py --record FILE.npz [--context 256]

A population is what two files of a model in examples/ have measured on all chunks of the calibration text:
real divergences, with their heavy tails and with what tokens of a chunk have in common. Half of the pairs are
of one recipe, with importances of other seeds, and half of two recipes. In pairs named "cut", chunks have
lengths as unequal as those of conversations; "classes" are eight parts of the text that weigh the same. The
truth is the comparison on the whole population. Each draw takes some of its chunks, with replacement, and
asks each method for a 95 % interval of the ratio of the mean divergences.

    percentile   the bootstrap's percentiles of the ratio, over chunks
    bootstrap t  the bootstrap's quantiles of the studentised logarithm of the ratio, over chunks
    linear       logarithm of the ratio, error by linearisation over chunks, quantiles of t
    jackknife    logarithm of the ratio, jackknife over chunks, quantiles of t
    chosen       the same, widened for skewness: imatrix/evaluate/comparison.py
    difference   of the means, by the chosen method
    verdicts     share of false ones, of a class by itself: one file is scaled so that there is no difference

--record makes the files, evaluates them, and writes the population: the one in tests/golden/quality.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import convert
import gguf_tools
import quantize
from gguf_tools.format.shards import open_gguf
from imatrix.evaluate.comparison import (
    ChunkSums,
    Interval,
    difference_interval,
    ratio_interval,
    two_sided_quantile,
    verdict_p,
)
from imatrix.evaluate.divergence import Values
from imatrix.texts.tokens import Cut
from quantize.importances.entries import Importance

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "golden" / "quality" / "chunk-sums.npz"
MODELS = ("tiny-deepseek-v3", "small-llama")
FILES = (("Q2_K", 1), ("Q2_K", 2), ("Q3_K_M", 1), ("Q4_K_M", 1), ("Q4_K_M", 2))
PAIRS = (
    (("Q2_K", 1), ("Q2_K", 2)), (("Q4_K_M", 1), ("Q4_K_M", 2)), (("Q4_K_M", 1), ("Q3_K_M", 1)),
    (("Q2_K", 1), ("Q4_K_M", 1)),
)  # fmt: skip
N_CLASSES = 8
N_RESAMPLES = 400


Population = list[ChunkSums]
"""Whole classes, mostly one, that chunks are drawn from."""

Method = Callable[[Values, Values], tuple[Values, Values]]
"""Returns the ends of intervals for the logarithm of the ratio, (n_draws,), from sums (n_draws, n_chunks)."""


def record(path: Path, context: int) -> None:
    """Write the sums over chunks of every file's divergences, whole and cut to unequal lengths."""
    arrays: dict[str, Values] = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="intervals-") as folder:
            base = Path(folder, "base.gguf")
            convert.convert(ROOT / "examples" / model, base, outtype="f32")
            files = [make(base, *file) for file in FILES]
            text = ROOT / "examples" / MODELS[0] / "calibration.txt"
            options = gguf_tools.EvaluateOptions(cut=Cut(context))
            evaluation = gguf_tools.evaluate(base, text, files, options)
        for (type_, seed), each in zip(FILES, evaluation.models, strict=True):
            tokens = each.tokens
            lengths = np.random.default_rng(0).lognormal(3.5, 0.8, tokens.chunk[-1] + 1)
            short = tokens.position - tokens.position.min() <= lengths[tokens.chunk]
            for name, kept in (("whole", short | True), ("cut", short)):
                sums = ChunkSums.of(tokens.chunk[kept], tokens.kld[kept], tokens.kld[kept])
                arrays[f"{model} {name} {type_} {seed}"] = sums.a.astype(np.float32)
                arrays[f"{model} {name}"] = sums.count.astype(np.int32)
    np.savez_compressed(path, **arrays)


def make(base: Path, type_: str, seed: int) -> Path:
    """Quantize with importances of a seed, as a recording from another text would have them."""
    path, rng = base.with_name(f"{type_}-{seed}.gguf"), np.random.default_rng(seed)
    with open_gguf(base) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    importances = {
        name: Importance(rng.lognormal(0, 0.7, (1, shape[-1])).astype(np.float32), np.ones(1, np.float32))
        for name, shape in shapes.items()
    }
    quantize.quantize(base, path, type_, importances=importances)
    return path


def populations(path: Path) -> Iterator[tuple[str, bool, Population]]:
    """Yield the name of each pair of files, whether both are of one recipe, and the chunks of both."""
    stored = np.load(path)
    for model in MODELS:
        for kind in ("whole", "cut", "classes"):
            source = "cut" if kind == "cut" else "whole"
            for a, b in PAIRS:
                names = [f"{model} {source} {type_} {seed}" for type_, seed in (a, b)]
                arrays = [stored[name].astype(np.float64) for name in (*names, f"{model} {source}")]
                whole = ChunkSums(*arrays)
                parts = [whole] if kind != "classes" else split(whole)
                yield f"{model} {kind} {a[0]}/{b[0]}", a[0] == b[0], parts


def split(sums: ChunkSums) -> Population:
    """Divide the chunks of a text into classes, its parts in order."""
    parts = np.array_split(np.arange(len(sums.count)), N_CLASSES)
    return [picked(sums, part) for part in parts]


def picked(sums: ChunkSums, places: np.ndarray) -> ChunkSums:
    return ChunkSums(sums.a[places], sums.b[places], sums.count[places])


def delta(a: Values, b: Values) -> tuple[Values, Values]:
    """Return the logarithm of the ratio and its error by linearisation, of the last axis."""
    means = a.mean(-1), b.mean(-1)
    spread = a / means[0][..., None] - b / means[1][..., None]
    return np.log(means[0] / means[1]), spread.std(-1, ddof=1) / math.sqrt(a.shape[-1])


def linear(a: Values, b: Values) -> tuple[Values, Values]:
    value, error = delta(a, b)
    half = two_sided_quantile(0.05, a.shape[1] - 1) * error
    return value - half, value + half


def jackknife(a: Values, b: Values) -> tuple[Values, Values]:
    n = a.shape[1]
    without = np.log((a.sum(1, keepdims=True) - a) / (b.sum(1, keepdims=True) - b))
    error = np.sqrt((n - 1) * without.var(1))
    value, half = delta(a, b)[0], two_sided_quantile(0.05, n - 1) * error
    return value - half, value + half


def percentile(a: Values, b: Values) -> tuple[Values, Values]:
    found = [np.percentile(delta(*each)[0], [2.5, 97.5]) for each in resamples(a, b)]
    low, high = np.array(found).T
    return low, high


def bootstrap_t(a: Values, b: Values) -> tuple[Values, Values]:
    value, error = delta(a, b)
    quantiles = []
    for own, each in zip(value, resamples(a, b), strict=True):
        other, spread = delta(*each)
        studentised = (other - own)[spread > 0] / spread[spread > 0]
        quantiles.append(np.percentile(studentised, [2.5, 97.5]))
    low, high = np.array(quantiles).T
    return value - high * error, value - low * error


METHODS: Mapping[str, Method] = {
    "percentile": percentile, "bootstrap t": bootstrap_t, "linear": linear, "jackknife": jackknife,
}  # fmt: skip


def resamples(a: Values, b: Values) -> Iterator[tuple[Values, Values]]:
    """Yield resampled chunks of each draw, (N_RESAMPLES, n_chunks)."""
    rng = np.random.default_rng(2)
    for own, other in zip(a, b, strict=True):
        places = rng.integers(0, len(own), (N_RESAMPLES, len(own)))
        yield own[places], other[places]


@dataclass
class Coverage:
    """How often intervals have held the truth."""

    hits: int = 0
    count: int = 0

    def add(self, interval: Interval, truth: float) -> None:
        self.hits += interval.low <= truth <= interval.high
        self.count += 1

    @property
    def share(self) -> float:
        return self.hits / self.count


def coverages(whole: Population, n_chunks: int, n_draws: int, seed: int = 0) -> tuple[Coverage, Coverage]:
    """Draw chunks and count how often the chosen intervals of ratio and difference hold the truth."""
    rng, ratio, difference = np.random.default_rng(seed), Coverage(), Coverage()
    truths = ratio_interval(whole).value, difference_interval(whole).value
    for _ in range(n_draws):
        sample = [picked(each, rng.integers(0, len(each.count), n_chunks)) for each in whole]
        ratio.add(ratio_interval(sample), truths[0])
        difference.add(difference_interval(sample), truths[1])
    return ratio, difference


def false_verdicts(whole: Population, n_chunks: int, n_draws: int) -> float:
    """Return the share of draws with a verdict after one file is scaled so that both are equal."""
    rng, ratio = np.random.default_rng(3), ratio_interval(whole).value
    count = 0
    for _ in range(n_draws):
        sample = [picked(each, rng.integers(0, len(each.count), n_chunks)) for each in whole]
        count += verdict_p([ChunkSums(each.a, ratio * each.b, each.count) for each in sample]) < 0.05
    return count / n_draws


def others(whole: Population, n_chunks: int, n_draws: int) -> dict[str, float]:
    """Return the coverage of each method that was not chosen; of a single class."""
    (only,) = whole
    places = np.random.default_rng(0).integers(0, len(only.count), (n_draws, n_chunks))
    truth = math.log(only.a.sum() / only.b.sum())
    found = {name: method(only.a[places], only.b[places]) for name, method in METHODS.items()}
    return {name: float(((low <= truth) & (truth <= high)).mean()) for name, (low, high) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FILE.npz")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--population", type=Path, default=RECORDED, metavar="FILE.npz")
    parser.add_argument("--chunks", type=int, nargs="+", default=[3, 8, 16, 32, 64])
    parser.add_argument("--draws", type=int, default=4000)
    args = parser.parse_args()
    if args.record is not None:
        record(args.record, args.context)
        return
    for n_chunks in args.chunks:
        titles = ("chosen", "difference", "verdicts", *METHODS)
        print(f"{n_chunks} chunks of each class".ljust(38), *titles, sep="  ")
        for name, is_one_recipe, whole in populations(args.population):
            ratio, difference = coverages(whole, n_chunks, args.draws // len(whole))
            verdicts = false_verdicts(whole, n_chunks, args.draws // len(whole))
            cells = [("chosen", ratio.share), ("difference", difference.share), ("verdicts", verdicts)]
            if len(whole) == 1:
                cells += others(whole, n_chunks, min(args.draws, 1000)).items()
            shown = "  ".join(f"{share:.3f}".rjust(len(title)) for title, share in cells)
            print(("  " if is_one_recipe else "* ") + name.ljust(36), shown, sep="  ")
    print("* files of two recipes")


if __name__ == "__main__":
    main()
