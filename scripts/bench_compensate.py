"""Time encoding under second moments beside the stock encoders, on one thread: million weights a second.

    python scripts/bench_compensate.py [--json] [--types Q4_K Q2_K] [--cols 2048] [--rows 256]

For each type: the stock encoder with importances; feedback alone; feedback with the default number of sweeps;
and what each costs, tr(E H E^T) as a share of the stock encoder's. Rows are random normal weights, inputs
are random and correlated. The first run, which compiles, is not counted; of the others the best is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from gguf_tools.ggml_types import TYPES
from quantize.compensate.base import Effort
from quantize.compensate.factor import Factor
from quantize.compensate.feedback import costs, encode_compensated, stock_weighting
from quantize.compensate.rounders import ROUNDERS
from quantize.formats import get_format
from quantize.formats.base import Bytes
from scripts.bench_kernels import machine

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Timing:
    """Speeds in million weights a second, and costs as a share of the stock encoder's."""

    type: str
    stock: float
    feedback: float
    default: float
    feedback_cost: float
    default_cost: float


def speed(encode: Callable[[Floats], object], rows: Floats, runs: int) -> float:
    """Return the best speed of so many runs in million weights a second, compiling not counted."""
    encode(rows[:1])
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


def time_type(name: str, rows: Floats, factor: Factor, runs: int) -> Timing:
    type_ = next(type_ for type_ in TYPES if type_.name == name)
    codec, weighting = get_format(type_), stock_weighting(factor)

    def stock(rows: Floats) -> Bytes:
        return codec.encode(rows, weighting)

    def feedback(rows: Floats) -> Bytes:
        return encode_compensated(rows, type_, factor, Effort(sweeps=0))

    def default(rows: Floats) -> Bytes:
        return encode_compensated(rows, type_, factor)

    def cost(encode: Callable[[Floats], Bytes]) -> float:
        return float(costs(rows, codec.decode(encode(rows), rows.shape[1]), factor).sum())

    speeds = [speed(encode, rows, runs) for encode in (stock, feedback, default)]
    return Timing(name, *speeds, cost(feedback) / cost(stock), cost(default) / cost(stock))


def timings(names: list[str], n_rows: int, n_cols: int, runs: int) -> Iterator[Timing]:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((n_rows, n_cols)) * 0.02).astype(np.float32)
    factor = Factor.of(correlated_moments(n_cols, rng))
    for name in names:
        yield time_type(name, rows, factor, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=list(ROUNDERS), metavar="TYPE")
    parser.add_argument("--cols", type=int, default=2048, help="row length")
    parser.add_argument("--rows", type=int, default=256, help="rows that are encoded at once")
    parser.add_argument("--runs", type=int, default=2, help="how often each encoder runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    facts = machine()
    measured = []
    if not args.json:
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print(f"{args.rows} x {args.cols}, million weights/s        cost, share of stock's")
        print(f"{'type':8} {'stock':>8} {'feedback':>9} {'default':>8}   {'feedback':>9} {'default':>8}")
    for timing in timings(args.types, args.rows, args.cols, args.runs):
        measured.append(timing)
        if not args.json:
            rates = f"{timing.stock:8.1f} {timing.feedback:9.2f} {timing.default:8.2f}"
            print(
                f"{timing.type:8} {rates}   {timing.feedback_cost:9.3f} {timing.default_cost:8.3f}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"machine": facts, "timings": [asdict(timing) for timing in measured]}, indent=1))


if __name__ == "__main__":
    main()
