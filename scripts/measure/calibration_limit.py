"""Measure how far a calibrated run is from the limit of this machine's own products of matrices.

    python -m scripts.measure.calibration_limit BASE.gguf TEXT --types Q4_K_M,Q2_K --chunks 64 [--threads 2]
                                                 [--dtype bfloat16]

The limit counts the floating-point operations that the method needs, nothing twice, from shapes and tokens by
the formulas of docs/calibrated.md, and divides them by the rate at which this machine multiplies 2048 x 2048
matrices with the run's threads, the median of five products in this process. What multiplies the model's
matrices has the rate of --dtype, all else that of float32. Beside it stands what the phases of the run took.
A thread looks every few milliseconds at what all other threads do, and the function that they are in tells
the phase. So a phase has thread seconds, which divided by the threads compare with the limit. "waiting" is
what threads did not use.

Several types are made in one command, which computes the original once. For models with ordinary attention.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import get_args

import torch

import gguf_tools
from gguf_tools.format.hparams import architecture_of, known_hparams
from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.shapes import Shapes, network_of_model, promises
from imatrix.calibrate.statistics.gradient_factors import GRADIENT_TOKENS
from imatrix.calibrate.statistics.gradients import row_pieces
from imatrix.calibrate.statistics.inputs import HELD_ROWS
from imatrix.calibrate.work import is_summed_through
from imatrix.forward.options import DType
from imatrix.forward.workers import torch_threads
from scripts.bench.common import machine

_INTERVAL = 0.005

PASSES, GRADIENTS, COVARIANCES, MOMENTS = "both models", "gradients", "their covariances", "moments"
FACTORS, ROUNDING, JUDGING, LOGITS = "factors", "rounding", "stock and held-out rows", "logits"
OTHER, WAITING = "other", "waiting"

_PHASES = {
    "Covariances.": COVARIANCES,
    "_Drawing.": LOGITS,
    "draw_labels": LOGITS,
    "sweep_vocabulary": LOGITS,
    "final_divergence": LOGITS,
    "Moments.": MOMENTS,
    "Inputs.": MOMENTS,
    "gather": MOMENTS,
    "_weighed": MOMENTS,
    "conditions_of": FACTORS,
    "_upper_root": FACTORS,
    "_invert_upper": FACTORS,
    "damped_inverse": FACTORS,
    "GradientFactors.": FACTORS,
    "with_blocks": FACTORS,
    "_stock": JUDGING,
    "_held_out_errors": JUDGING,
    "encode_strips": ROUNDING,
    "choose_cheaper": ROUNDING,
    "_Backward.": GRADIENTS,
    "take_chunk": PASSES,
    "take_piece": PASSES,
    "LayerRun.": PASSES,
    "ExpertRun.": PASSES,
    "embed": PASSES,
}
"""Phases by how a function's qualified name begins; the innermost function that has one decides."""

_IN_DTYPE = PASSES, GRADIENTS, LOGITS
"""Phases that multiply the model's matrices."""


def main() -> None:
    """Run the script."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--types", default="Q4_K_M", help="separated by commas (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--chunk-size", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--dtype", choices=get_args(DType), default="float32", help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="keep the files under this name, with {FTYPE} in it")
    args = parser.parse_args()
    types = args.types.split(",")
    rates = {name: product_rate(args.threads, name) for name in dict.fromkeys(("float32", args.dtype))}
    needed = operations(args.base, args.chunks, args.chunk_size, len(types))
    cut = gguf_tools.Cut(args.chunk_size, n_chunks=args.chunks)
    calibration = gguf_tools.Calibration(args.text, cut, forward=gguf_tools.ForwardOptions(dtype=args.dtype))
    options = gguf_tools.QuantizeOptions(calibration=calibration)
    with tempfile.TemporaryDirectory(dir=args.base.parent) as folder, sampled() as seen:
        started, before = time.perf_counter(), time.process_time()
        output = args.output or Path(folder) / "{FTYPE}.gguf"
        gguf_tools.quantize_many(args.base, output, types, options, n_threads=args.threads, progress=True)
        wall, cpu = time.perf_counter() - started, time.process_time() - before
    limits = {
        phase: count / rates[args.dtype if phase in _IN_DTYPE else "float32"]
        for phase, count in needed.items()
    }
    for line in table(needed, limits, seen, wall, args.threads):
        print(line)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    speeds = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in rates.items())
    print(f"\n{cpu:.0f} CPU seconds, {memory / 1e9:.2f} GB at most, {speeds}, {machine()}")


def product_rate(n_threads: int, dtype: DType) -> float:
    """Measure floating-point operations a second, in products of 2048 x 2048 matrices."""
    size = 2048
    x = torch.full((size, size), 0.5, dtype=getattr(torch, dtype))
    seconds = []
    with torch_threads(n_threads):
        for _ in range(6):
            started = time.perf_counter()
            x @ x
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[1:])


def operations(base: Path, n_chunks: int, chunk_size: int, n_types: int) -> Mapping[str, float]:
    """Count the floating-point operations that each phase needs, from the shapes of a model."""
    with gguf_tools.open_gguf(base) as source:
        infos, metadata = list(source.tensors.values()), source.metadata
    network = network_of_model(base, metadata, infos)
    made = [each for each in infos if promises(network, each)]
    shapes = Shapes.of(network, infos, made, metadata)
    hparams = known_hparams(metadata, architecture_of(metadata) or "")
    n_heads, size = shapes.n_heads, hparams.size("embedding_length")
    head_size = hparams.size("key_length", size // n_heads)
    tokens = n_chunks * chunk_size
    some = min(tokens, GRADIENT_TOKENS)
    # A token attends to half of its chunk: scores, and their products with values.
    scores = 4.0 * n_heads * head_size * chunk_size / 2 * network.n_layers
    matrices = sum(2.0 * shapes.share(each) * each.n_elems for each in made)
    vocab = 2.0 * network.vocab_size * size
    counts = defaultdict[str, float](float)
    counts[PASSES] = (1 + n_types) * tokens * (matrices + scores)
    # The way back takes gradients of inputs alone: once through matrices, twice through scores.
    counts[GRADIENTS] = some * (2 * matrices + 3 * scores)
    counts[LOGITS] = 2 * some * vocab + n_types * tokens * vocab
    for each in made:
        rows, n_mats = shapes.share(each), each.n_mats
        pieces = [stop - start for start, stop in row_pieces(each.n_rows // n_mats)]
        counts[COVARIANCES] += some * rows * n_mats * sum(piece**2 for piece in pieces)
        # Errors go to the columns and to the rows of a piece that follow, half of each on average. The
        # weights aimed at are products with sums of drift, unless these are W's, and two triangular matrices.
        of_drift = 0 if is_summed_through(each) else 2
        counts[ROUNDING] += n_types * each.n_elems * ((3 + of_drift) * each.n_cols + max(pieces))
        counts[JUDGING] += n_types * each.n_elems * 6.0 * min(HELD_ROWS, tokens)
    for each in _inputs(made):
        rows = tokens * shapes.share(each) * each.n_mats
        # x x^T is symmetric, (t - x) x^T is not. W (t - x) x^T takes two products with the rows of W.
        of_drift = 4 * each.n_rows if is_summed_through(each) else 2 * each.n_cols
        counts[MOMENTS] += n_types * rows * each.n_cols * (each.n_cols + of_drift)
        # Three times a root and its inverse, and a product of triangular matrices: n^3 / 3 each.
        counts[FACTORS] += n_types * 7 / 3 * each.n_mats * each.n_cols**3
    return counts


def _inputs(made: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield one tensor for each input: q, k and v share one, and so do gate and up."""
    others = ("attn_k.", "attn_v.", "ffn_up")
    for each in made:
        if not any(f".{other}" in each.name for other in others):
            yield each


@contextmanager
def sampled() -> Iterator[Mapping[str, float]]:
    """Count the processor's seconds by phase, of all threads but this one's observer."""
    seen, is_over = defaultdict[str, float](float), threading.Event()

    def look() -> None:
        mine, used = threading.get_ident(), dict[int, float]()
        while not is_over.wait(_INTERVAL):
            frames = sys._current_frames()
            is_back = any(_is_in(frame, "_collect") for frame in frames.values())
            for number, frame in frames.items():
                try:
                    now = time.clock_gettime(time.pthread_getcpuclockid(number))
                except OSError:  # it has ended
                    continue
                moved, used[number] = now - used.get(number, 0.0), now
                if number != mine and moved > 0:
                    phase = phase_of(frame)
                    seen[GRADIENTS if is_back and phase == PASSES else phase] += moved

    observer = threading.Thread(target=look, daemon=True)
    observer.start()
    try:
        yield seen
    finally:
        is_over.set()
        observer.join()


def phase_of(frame: FrameType | None) -> str:
    """Return the phase that a thread is in."""
    while frame is not None:
        name = frame.f_code.co_qualname
        found = next((phase for start, phase in _PHASES.items() if name.startswith(start)), None)
        if found is not None:
            return found
        frame = frame.f_back
    return OTHER


def _is_in(frame: FrameType | None, name: str) -> bool:
    while frame is not None and frame.f_code.co_qualname != name:
        frame = frame.f_back
    return frame is not None


def table(
    needed: Mapping[str, float],
    limits: Mapping[str, float],
    seen: Mapping[str, float],
    wall: float,
    n_threads: int,
) -> Iterator[str]:
    """Yield the lines of the table; all seconds are those of the clock."""
    yield "| phase | TFLOP | limit, s | taken, s | ratio |"
    yield "|---|--:|--:|--:|--:|"
    for phase, count in needed.items():
        limit, taken = limits[phase], seen.get(phase, 0.0) / n_threads
        yield f"| {phase} | {count / 1e12:.2f} | {limit:.1f} | {taken:.1f} | {taken / limit:.2f} |"
    yield f"| {OTHER} | | | {seen.get(OTHER, 0.0) / n_threads:.1f} | |"
    yield f"| {WAITING} | | | {wall - sum(seen.values()) / n_threads:.1f} | |"
    total, limit = sum(needed.values()), sum(limits.values())
    yield f"| all | {total / 1e12:.2f} | {limit:.1f} | {wall:.1f} | {wall / limit:.2f} |"


if __name__ == "__main__":
    main()
