"""Compare calibrated files with stock ones of the same types and size: mean divergence on another text.

    python scripts/measure/calibrated.py MODEL --calibrate TEXT --evaluate OTHER [--imatrix FILE]
        [--chunks 64] [--evaluate-chunks 40] [--types Q2_K,Q4_K_M] [--ways default]
        [--seeds 0,1,2] [--folder DIR] [--json FILE] [--threads N]

Every type is made with the stock encoder and an importance matrix, and then in these ways:

    one-sided    under what the original's matrices multiply
    embedding    the same, and token_embd under the gradients there
    default      what --calibrate does: from both sides, and each tensor sees what those before it have become
    refined      the default's file, whose scales `refine` has moved over the same chunks

A seed decides which labels are drawn for the gradients; each makes files of its own.

The matrix is collected from the calibration text where none is given. Files have the same tensors, to the
byte, or the comparison ends. A share is a way's mean divergence over stock's. Its range is that of 95 % of
4000 draws of chunks, the same for both files. With --folder, files that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gguf_tools

sys.path.insert(0, str(Path(__file__).parents[2]))

import convert
import quantize
from gguf_tools.format.shards import open_gguf
from imatrix.collecting import collect
from imatrix.evaluate.divergence import TokenValues
from imatrix.forward.options import ForwardOptions
from imatrix.options import CollectOptions
from imatrix.store import load
from imatrix.texts.tokens import Cut
from quantize.importances.entries import ImportanceFile

TYPES = ("Q2_K", "IQ2_XS", "IQ3_XXS", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_M", "Q5_K_M")

WAYS: Mapping[str, Mapping[str, bool]] = {
    "one-sided": {"sequential": False, "method": "one-sided", "embedding": False},
    "embedding": {"sequential": False, "method": "one-sided", "embedding": True},
    "default": {},
    "refined": {},
}
"""Fields of `gguf_tools.Calibration` for each way; a refined file is the default one, refined."""

Variant = tuple[str, int]
"""A way and a seed."""

DRAWS = 4000


@dataclass(frozen=True)
class Comparison:
    """A calibrated file beside the stock one.

    seed        of the calibration's labels
    kld, stock  mean divergences
    error       standard error of kld
    share       kld / stock, with the ends of its range
    seconds     that making the file took; 0 where it was there
    """

    type: str
    way: str
    seed: int
    kld: float
    error: float
    stock: float
    share: float
    least: float
    most: float
    same_top: float
    stock_same_top: float
    n_bytes: int
    seconds: float


def main() -> None:
    args = parse()
    types = args.types.split(",")
    variants = [(way, seed) for way in args.ways.split(",") for seed in map(int, args.seeds.split(","))]
    comparisons: list[Comparison] = []
    with folder_of(args.folder) as folder:
        base, matrix = make_base(args, folder), None
        for type_ in types:
            matrix = matrix or importances(args, base, folder)
            stock = folder / f"stock-{type_}.gguf"
            if not stock.exists():
                quantize.quantize(base, stock, type_, importances=matrix, n_threads=args.threads)
            files = {(way, seed): folder / f"{way}-{seed}-{type_}.gguf" for way, seed in variants}
            seconds = {variant: make(args, base, path, type_, variant) for variant, path in files.items()}
            for path in files.values():
                refuse_another_size(stock, path)
            comparisons += compare(args, base, stock, type_, files, seconds)
            for each in comparisons[-len(variants) :]:
                print(line(each), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(each) for each in comparisons], indent=1) + "\n")
    for way, seed in variants:
        shares = [each.share for each in comparisons if (each.way, each.seed) == (way, seed)]
        mean = np.exp(np.mean(np.log(shares)))
        print(f"{way}, seed {seed}: geometric mean of {len(shares)} shares {mean:.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--evaluate", type=Path, required=True)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--evaluate-chunks", type=int, default=40)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


@contextmanager
def folder_of(given: Path | None) -> Iterator[Path]:
    """Give the folder for files; a temporary one where none is named."""
    if given is not None:
        given.mkdir(exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def make_base(args: argparse.Namespace, folder: Path) -> Path:
    """Return the model as a GGUF file: itself, or a folder's weights in F32."""
    if args.model.is_file():
        return Path(args.model)
    base = folder / "base.gguf"
    if not base.exists():
        convert.convert(args.model, base, outtype="f32", n_threads=args.threads)
    return base


def importances(args: argparse.Namespace, base: Path, folder: Path) -> ImportanceFile:
    """Return the matrix that is given, or that of the calibration text."""
    if args.imatrix is not None:
        return load(args.imatrix)
    matrix = folder / "stock.imatrix"
    if matrix.exists():
        return load(matrix)
    options = CollectOptions(Cut(n_chunks=args.chunks), perplexity=False)
    return collect(base, args.calibrate, matrix, options).importances


def make(args: argparse.Namespace, base: Path, path: Path, type_: str, variant: Variant) -> float:
    """Make a calibrated file if it isn't there, and return how long that took."""
    if path.exists():
        return 0.0
    started = time.monotonic()
    (way, seed), cut, forward = variant, Cut(n_chunks=args.chunks), ForwardOptions(n_threads=args.threads)
    if way == "refined":
        calibrated = path.with_name(f"default-{seed}-{type_}.gguf")
        make(args, base, calibrated, type_, ("default", seed))
        gguf_tools.refine(calibrated, base, args.calibrate, path, cut=cut, seed=seed, forward=forward)
        return time.monotonic() - started
    calibration = gguf_tools.Calibration(
        args.calibrate, cut, seed=seed, forward=ForwardOptions(), **WAYS[way]
    )
    result = quantize.quantize(base, path, type_, calibration=calibration, n_threads=args.threads)
    for text in result.written.calibration:
        print(f"  {type_} {way} {seed}: {text}", flush=True)
    return time.monotonic() - started


def refuse_another_size(stock: Path, path: Path) -> None:
    """End the comparison unless both files have the same tensors: names, shapes, types, bytes."""
    with open_gguf(stock) as one, open_gguf(path) as other:
        if one.tensors != other.tensors:
            raise SystemExit(f"{path}: has other types than {stock}")


def compare(
    args: argparse.Namespace,
    base: Path,
    stock: Path,
    type_: str,
    files: Mapping[Variant, Path],
    seconds: Mapping[Variant, float],
) -> list[Comparison]:
    """Return how far the files are from their base, beside the stock file."""
    options = gguf_tools.EvaluateOptions(
        Cut(n_chunks=args.evaluate_chunks), ForwardOptions(n_threads=args.threads)
    )
    evaluation = gguf_tools.evaluate(base, args.evaluate, [stock, *files.values()], options)
    plain, *others = evaluation.models
    stock_kld = plain.divergence.kld.mean.value
    comparisons = []
    for (way, seed), model in zip(files, others, strict=True):
        kld = model.divergence.kld.mean
        least, most = share_range(by_chunk(model.tokens), by_chunk(plain.tokens))
        comparisons.append(
            Comparison(
                type=type_,
                way=way,
                seed=seed,
                kld=kld.value,
                error=kld.error,
                stock=stock_kld,
                share=kld.value / stock_kld,
                least=least,
                most=most,
                same_top=model.divergence.same_top.value,
                stock_same_top=plain.divergence.same_top.value,
                n_bytes=model.n_bytes,
                seconds=seconds[way, seed],
            )
        )
    return comparisons


def by_chunk(tokens: TokenValues) -> npt.NDArray[np.float64]:
    """Return the mean divergence of each chunk."""
    means: npt.NDArray[np.float64] = np.bincount(tokens.chunk, tokens.kld) / np.bincount(tokens.chunk)
    return means


def share_range(own: npt.NDArray[np.float64], stock: npt.NDArray[np.float64]) -> Sequence[float]:
    """Return the 2.5th and 97.5th percentile of the share over draws of chunks.

    own, stock  mean divergence of each chunk
    """
    draws = np.random.default_rng(0).integers(0, len(own), (DRAWS, len(own)))
    shares = own[draws].mean(1) / stock[draws].mean(1)
    ends: Sequence[float] = np.percentile(shares, [2.5, 97.5]).tolist()
    return ends


def line(each: Comparison) -> str:
    return (
        f"{each.type:8} {each.way:10} seed {each.seed}: KLD {each.kld:.5f} +/- {each.error:.5f},"
        f" stock {each.stock:.5f}, share {each.share:.3f} [{each.least:.3f}, {each.most:.3f}],"
        f" same top {each.same_top:.1%} (stock {each.stock_same_top:.1%}), {each.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
