"""Estimates memory, disk and time of a calibrated run, from shapes and one short measurement.

Time is that of the arithmetic: products of the forward and the backward pass, of second moments and of their
factors at the speed that this machine multiplies at, and rounding at the rates below. Expect it to be right
within a factor of 1.5 on a machine that does nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from calibrate.footprint import Shapes, is_expert, memory_bytes
from calibrate.options import CalibrationOptions
from calibrate.plan import CalibrationPlan
from calibrate.run.context import state_bytes
from calibrate.run.experts import experts_at_once
from calibrate.statistics.gradient_factors import gradient_text
from calibrate.statistics.gradients import stored_bytes
from calibrate.statistics.inputs import HELD_ROWS
from forward.device import CPU, fast_products
from forward.gradients.forward_backward import BACKWARD_WORK
from forward.text.tokens import Text
from gguf_tools.findings import Finding, Level
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import size_text
from quantize.roles import layer_of

_PROBE, _PROBES = 1024, 4
"""Number of rows and columns of the matrices whose product is timed, and how often."""

_EFFICIENCY = 0.6
"""Speed of a pass over that of one large product: chunks are small, and there is more to do than products."""

_ATTENTION_PASSES = 4
"""How often a sequential run computes a layer's attention: up to its first matrices, up to those of heads, up
to the last one, and as a whole."""

_OTHER_PASSES = 4 / 3
"""The same for what follows: once in the original, and in the other gate and up once, then all of them."""

_HELD_PRODUCTS = 5
"""Products with the held-out rows, for each matrix."""

_LEAST_TOKENS = 32768
"""Tokens that are enough for 256 columns: the sample model's figures were measured with these."""

_FEW_BY_COLUMN, _WANTED_BY_COLUMN = 8, 32
"""Tokens for each column below which a user is told, and that are recommended. Q2_K files of the sample leave
0.26, 0.19, 0.16 and 0.136 of stock's divergence with 8, 20, 40 and 128."""

_LARGE = 2
"""A text is large with more than this many times the tokens that are enough."""


@dataclass(frozen=True)
class Work:
    """Work of a run.

    flops    floating point operations of matrix products
    seconds  of rounding, on one thread
    """

    flops: float
    seconds: float

    def seconds_on(self, n_threads: int, speed: float, rounding_threads: int) -> float:
        """Estimate how long it takes.

        speed             products of one thread, operations a second
        rounding_threads  how many of the threads have something to round
        """
        return self.flops / (_EFFICIENCY * speed * n_threads) + self.seconds / rounding_threads


def estimate_lines(plan: CalibrationPlan, n_threads: int) -> Iterator[str]:
    """Tell memory, disk and time of a run."""
    options, shapes, text, network = plan.options, plan.shapes, plan.text, plan.network
    in_memory, on_disk = state_bytes(text, network, plan.dtype, options.n_models)
    fits = in_memory <= options.forward.memory_bytes
    memory = memory_bytes(options, shapes, text, n_threads)
    disk = on_disk if fits else in_memory
    if options.needs_gradients:
        n_values = gradient_text(text).inputs.size * network.state_size
        disk += 4 * n_values * (network.n_layers + 6) + _covariance_bytes(shapes.made)
    seconds = calibration_seconds(options, shapes, text, n_threads, flops_per_second())
    yield f"calibration: {text.inputs.size:,} tokens in {text.n_chunks} chunks"
    yield f"  memory  about {size_text(memory)}"
    yield f"  disk    {size_text(disk)} beside the output, until it is done"
    yield f"  time    about {time_text(seconds)} on {n_threads} threads"


def amount_findings(plan: CalibrationPlan, n_threads: int) -> Iterator[Finding]:
    """Yield what a user should know of the amount of text: too little, or more than the model needs."""
    yield from _little_text(plan)
    yield from _large_text(plan, n_threads)


def _little_text(plan: CalibrationPlan) -> Iterator[Finding]:
    """Yield how many tokens each column has, if they are few; experts share theirs and are left out."""
    matrices = (info for info in plan.made.values() if not is_expert(info))
    widest = max(matrices, key=attrgetter("n_cols"), default=None)
    if widest is None:
        return
    text = plan.text
    by_column = text.inputs.size / widest.n_cols
    if by_column < _FEW_BY_COLUMN:
        chunks = -(-_WANTED_BY_COLUMN * widest.n_cols // text.chunk_size)
        yield Finding(
            "little text",
            f"the text has {by_column:.1f} tokens for each of the {widest.n_cols:,} columns of {widest.name};"
            f" {chunks:,} chunks have {_WANTED_BY_COLUMN}, and leave about two thirds of the divergence",
            Level.NOTE,
        )


def _large_text(plan: CalibrationPlan, n_threads: int) -> Iterator[Finding]:
    """Yield how many chunks would do, of a text that is used as a whole and larger than the model needs."""
    options, shapes, text = plan.options, plan.shapes, plan.text
    if options.cut.n_chunks is not None:
        return
    enough = -(-enough_tokens(shapes) // text.chunk_size)
    if text.n_chunks <= _LARGE * enough:
        return
    part, speed = Text(text.tokens[:enough], text.inputs[:enough]), flops_per_second()
    whole, short = (
        time_text(calibration_seconds(options, shapes, each, n_threads, speed)) for each in (text, part)
    )
    yield Finding(
        "large text",
        f"the text has {text.n_chunks:,} chunks, which take about {whole} on {n_threads} threads; --chunks"
        f" {enough} shows every matrix as many tokens as it has columns, and takes about {short}",
        Level.NOTE,
    )


def enough_tokens(shapes: Shapes) -> int:
    """Count the tokens that show every matrix as many rows as it has columns, on average."""
    return max([_LEAST_TOKENS, *(math.ceil(info.n_cols / shapes.share(info)) for info in shapes.made)])


def calibration_seconds(
    options: CalibrationOptions, shapes: Shapes, text: Text, n_threads: int, speed: float
) -> float:
    """Estimate how long a run takes, if one thread multiplies at `speed` operations a second."""
    return work_of(options, shapes, text).seconds_on(n_threads, speed, _rounding_threads(shapes, n_threads))


def _rounding_threads(shapes: Shapes, n_threads: int) -> int:
    """Count the threads that have something to round: gate and up of the experts that are made together."""
    experts = [info.n_cols for info in shapes.made if is_expert(info)]
    most = 2 * experts_at_once(max(experts), n_threads) if experts else n_threads
    return min(n_threads, most)


def work_of(options: CalibrationOptions, shapes: Shapes, text: Text) -> Work:
    """Add up the products and the rounding of a run."""
    n_tokens, followed = text.inputs.size, options.sequential
    active, attention = 0.0, 0.0
    for info in shapes.infos:
        if layer_of(info.name) is not None:
            active += info.n_elems * shapes.share(info)
            attention += info.n_elems if ".attn_" in info.name else 0
    if followed:
        passes = _ATTENTION_PASSES * attention + _OTHER_PASSES * (active - attention)
        flops = 2 * 2 * passes * n_tokens
    else:
        flops = 2 * active * n_tokens
    if options.needs_gradients:
        flops += 2 * active * gradient_text(text).inputs.size * (1 + BACKWARD_WORK)
    method, rounding = options.rounding, 0.0
    for info in shapes.made:
        n_mats, n_cols = info.n_mats, info.n_cols
        flops += 2 * n_cols**2 * n_tokens * shapes.share(info) * n_mats * (2 if followed else 1)
        # Factor and its inverse; where the model is followed, the step towards W t and what it adds.
        flops += (5 if followed else 1) * n_cols**3 * n_mats
        flops += 2 * info.n_elems * (n_cols if followed else 0)
        flops += 2 * info.n_elems * HELD_ROWS * _HELD_PRODUCTS
        rounding += method.rates(info.type).seconds(info)
    return Work(flops, rounding)


def _covariance_bytes(made: Sequence[TensorInfo]) -> int:
    """Estimate what the covariances of gradients take on the disk."""
    rows = ((info.shape[-2], 1 if is_expert(info) else info.n_mats) for info in made if len(info.shape) > 1)
    return sum(stored_bytes(n_mats, n_rows) for n_rows, n_mats in rows)


def flops_per_second() -> float:
    """Measure how fast one thread multiplies matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones((_PROBE, _PROBE))
        with fast_products(CPU):
            a @ a
            started = time.thread_time()  # what others take of a busy machine is another matter
            for _ in range(_PROBES):
                a @ a
            return _PROBES * 2 * _PROBE**3 / (time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)


def time_text(seconds: float) -> str:
    """Write a time for people.

    >>> time_text(5400)
    '1.5 hours'
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length or unit == "minutes":
            return f"{seconds / length:.1f} {unit}"
    raise AssertionError("minutes are the last")
