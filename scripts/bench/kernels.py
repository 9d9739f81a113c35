"""Time every codec beside ggml's, on one thread: million weights a second.

    python scripts/bench/kernels.py [--json] [--decode] [--types Q4_K Q6_K] [--cols 2048] [--seconds 0.5]

Rows are random normal weights, and importances are random. Ours and the reference take turns on the same
rows, and the best turn of each counts. Compiling is not counted. F32, which passes through, is left out.
Types that ggml lacks are timed alone. --cols is the length of a row, and --seconds the time for each line.
Needs the xllamacpp wheel: pip install ".[test]".
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[2]))

from quantize.formats import available, get_format
from quantize.formats.base import QuantFormat
from quantize.formats.codecs import ignores_importances, requires_importances
from quantize.importances.weighting import ColumnWeights
from scripts.bench.common import machine, measured, parser_of
from tests.quantize.codecs import OF_LLAMA
from tests.support import oracle

OURS_ROWS = 512
SLOW = 100
"""Speed, in million weights a second, below which the reference gets fewer rows to keep its turns short."""


@dataclass(frozen=True)
class Timing:
    """Speeds in million weights a second.

    reference  ggml's; None: it lacks the type
    """

    type: str
    task: str
    importances: bool
    ours: float
    reference: float | None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.reference if self.reference else None


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def speeds(
    ours: Callable[[int], object], reference: Callable[[int], object] | None, n_cols: int, budget: float
) -> tuple[float, float | None]:
    """Return the best speed of each in million weights a second, taking turns for `budget` seconds.

    ours, reference  are called with a number of rows; None: there is no reference
    """
    ours(OURS_ROWS)  # compiles
    if reference is None:
        end, best_ours = time.perf_counter() + budget, math.inf
        while time.perf_counter() < end or best_ours == math.inf:
            best_ours = min(best_ours, seconds(lambda: ours(OURS_ROWS)) / OURS_ROWS)
        return n_cols / best_ours / 1e6, None
    probe = 16 * n_cols / seconds(lambda: reference(16)) / 1e6
    reference_rows = OURS_ROWS // 8 if probe < SLOW else OURS_ROWS
    best_ours = best_reference = math.inf
    end = time.perf_counter() + budget
    while time.perf_counter() < end or best_ours == math.inf:
        best_ours = min(best_ours, seconds(lambda: ours(OURS_ROWS)) / OURS_ROWS)
        best_reference = min(best_reference, seconds(lambda: reference(reference_rows)) / reference_rows)
    return n_cols / best_ours / 1e6, n_cols / best_reference / 1e6


def has_reference(codec: QuantFormat) -> bool:
    return codec.type.name in OF_LLAMA


def time_encoding(
    codec: QuantFormat, rows: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None, budget: float
) -> Timing:
    weighting = None if weights is None else ColumnWeights(weights)
    ours, reference = speeds(
        lambda n: codec.encode(rows[:n], weighting),
        (lambda n: oracle.quantize(codec.type.id, rows[:n], weights)) if has_reference(codec) else None,
        rows.shape[1],
        budget,
    )
    return Timing(codec.type.name, "encode", weights is not None, ours, reference)


def time_decoding(codec: QuantFormat, rows: npt.NDArray[np.float32], budget: float) -> Timing:
    even = ColumnWeights(np.ones(rows.shape[1], np.float32))
    data = codec.encode(rows, even if requires_importances(codec.type.name) else None)
    ours, reference = speeds(
        lambda n: codec.decode(data[:n], rows.shape[1]),
        (lambda n: oracle.dequantize(codec.type.id, data[:n])) if has_reference(codec) else None,
        rows.shape[1],
        budget,
    )
    return Timing(codec.type.name, "decode", False, ours, reference)


def timings(names: list[str], n_cols: int, budget: float, decode: bool) -> Iterator[Timing]:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((OURS_ROWS, n_cols)) * 0.02).astype(np.float32)
    weights = rng.random(n_cols, np.float32)
    for name in names:
        codec = get_format(name)
        if decode:
            yield time_decoding(codec, rows, budget)
            continue
        if not requires_importances(codec.type.name):
            yield time_encoding(codec, rows, None, budget)
        if not ignores_importances(codec.type.name):
            yield time_encoding(codec, rows, weights, budget)


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def line(timing: Timing) -> str:
    kind = "with" if timing.importances else "without"
    theirs = f"{timing.reference:8.1f} {timing.ratio:7.2f}" if timing.reference else ""
    return f"{timing.type:8} {kind:12} {timing.ours:8.1f} {theirs}"


def main() -> None:
    parser = parser_of(__doc__, {"--cols": 2048, "--seconds": 0.5}, folder=False)
    types = [name for name in available() if name != "F32"]
    parser.add_argument("--types", nargs="+", default=types, metavar="TYPE")
    parser.add_argument("--decode", action="store_true", help="time decoding instead of encoding")
    args = parser.parse_args()
    head = [f"{'type':8} {'importances':12} {'ours':>8} {'ggml':>8} {'ratio':>7}   million weights/s"]
    found = measured(args, head, timings(args.types, args.cols, args.seconds, args.decode), line)
    means = {}
    for kind, weighted in (("without", False), ("with", True)):
        ratios = [t.ratio for t in found if t.ratio is not None and t.importances == weighted]
        if ratios:
            means[kind] = geometric_mean(ratios)
    if args.json:
        rows = [{**asdict(t), "ratio": t.ratio} for t in found]
        print(json.dumps({"machine": machine(), "timings": rows, "geometric_mean_ratio": means}, indent=1))
    else:
        mean = ", ".join(f"{kind} importances {ratio:.2f}" for kind, ratio in means.items())
        print("geometric mean of the ratios:", mean or "none")


if __name__ == "__main__":
    main()
