"""Time encoding under second moments beside the stock encoders, on one thread: million weights a second.

    python scripts/bench/rounding.py [--json] [--types Q4_K Q2_K] [--cols 2048] [--rows 256]

For each type: the stock encoder with importances; feedback alone; feedback with the default number of sweeps;
the same from both sides, the rows as two matrices side by side. And what each costs as a share of the stock
encoder's: tr(E H E^T), from both sides tr(G E H E^T). Rows are random normal weights, inputs and gradients
are random and correlated; the number of rows is even. The first run, which compiles, is not counted; of
the others the best is.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[2]))

from gguf_tools.format.ggml_types import TYPES
from quantize.formats import get_format
from quantize.formats.base import Bytes
from quantize.rounding.base import Effort
from quantize.rounding.factor import Factor, Moments
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import costs
from quantize.rounding.methods.diagonal import encode_stock
from quantize.rounding.rounders import ROUNDERS
from quantize.rounding.two_sided import OutputFactor, encode_side_by_side
from scripts.bench.common import machine, measured, parser_of

Floats = npt.NDArray[np.float32]

N_MATRICES = 2
"""Number of matrices that the rows are taken for when they are rounded from both sides."""


@dataclass(frozen=True)
class Timing:
    """Speeds in million weights a second, and costs as a share of the stock encoder's."""

    type: str
    stock: float
    feedback: float
    default: float
    two_sided: float
    feedback_cost: float
    default_cost: float
    two_sided_cost: float


def speed(encode: Callable[[Floats], object], rows: Floats, runs: int) -> float:
    """Return the best speed of so many runs in million weights a second, compiling not counted."""
    encode(rows[:N_MATRICES])
    best = float("inf")
    for _ in range(runs):
        start = time.thread_time()
        encode(rows)
        best = min(best, time.thread_time() - start)
    return rows.size / best / 1e6


def correlated_moments(n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return moments of inputs that hang together and differ in size, float64 (n, n)."""
    inputs = rng.standard_normal((2 * n, n), np.float32)
    mixing = np.eye(n, dtype=np.float32) + 0.6 * rng.standard_normal((n, n), np.float32) / np.float32(n**0.5)
    inputs = inputs @ mixing * np.exp(0.5 * rng.standard_normal(n)).astype(np.float32)
    return (inputs.T @ inputs).astype(np.float64)


def time_type(name: str, rows: Floats, factor: Factor, moments: Moments, runs: int) -> Timing:
    """Time all ways for a type.

    moments  of the gradients at the outputs of each matrix that is rounded from both sides
    """
    type_ = next(type_ for type_ in TYPES if type_.name == name)
    codec = get_format(type_)

    def stock(rows: Floats) -> Bytes:
        return encode_stock(rows, type_, factor)

    def feedback(rows: Floats) -> Bytes:
        return encode_compensated(rows, type_, factor, Effort(sweeps=0))

    def default(rows: Floats) -> Bytes:
        return encode_compensated(rows, type_, factor)

    outputs = {n: OutputFactor.of(moments[:n, :n]) for n in (1, len(moments))}

    def two_sided(rows: Floats) -> Bytes:
        matrices = [(each, outputs[len(each)]) for each in np.split(rows, N_MATRICES)]
        return np.concatenate(encode_side_by_side(matrices, type_, factor))

    def errors(encode: Callable[[Floats], Bytes]) -> Floats:
        return rows - codec.decode(encode(rows), rows.shape[1])

    def cost(errors: Floats) -> float:
        return float(costs(errors.copy(), factor).sum())

    def damage(errors: Floats) -> float:
        left, right = moments, factor.hessian
        return sum(float((left @ each @ right * each).sum()) for each in np.split(errors, N_MATRICES))

    speeds = [speed(encode, rows, runs) for encode in (stock, feedback, default, two_sided)]
    of_stock = errors(stock)
    shares = [cost(errors(encode)) / cost(of_stock) for encode in (feedback, default)]
    return Timing(name, *speeds, *shares, damage(errors(two_sided)) / damage(of_stock))


def timings(names: list[str], n_rows: int, n_cols: int, runs: int) -> Iterator[Timing]:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((n_rows, n_cols)) * 0.02).astype(np.float32)
    factor = Factor.of(correlated_moments(n_cols, rng))
    gradients = correlated_moments(n_rows // N_MATRICES, rng)
    for name in names:
        yield time_type(name, rows, factor, gradients, runs)


def line(timing: Timing) -> str:
    rates = f"{timing.feedback:9.2f} {timing.default:8.2f} {timing.two_sided:10.2f}"
    shares = f"{timing.feedback_cost:9.3f} {timing.default_cost:8.3f} {timing.two_sided_cost:10.3f}"
    return f"{timing.type:8} {timing.stock:8.1f} {rates}   {shares}"


def main() -> None:
    parser = parser_of(__doc__, {"--cols": 2048, "--rows": 256, "--runs": 2}, folder=False)
    parser.add_argument("--types", nargs="+", default=list(ROUNDERS), metavar="TYPE")
    args = parser.parse_args()
    ways = f"{'feedback':>9} {'default':>8} {'two-sided':>10}"
    head = [
        f"{args.rows} x {args.cols}, million weights/s{'':19}cost, share of stock's",
        f"{'type':8} {'stock':>8} {ways}   {ways}",
    ]
    found = measured(args, head, timings(args.types, args.rows, args.cols, args.runs), line)
    if args.json:
        print(json.dumps({"machine": machine(), "timings": [asdict(timing) for timing in found]}, indent=1))


if __name__ == "__main__":
    main()
