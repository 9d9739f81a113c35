"""Estimates memory, disk and time of a calibrated run, from what its modules say that they hold.

A run has two parts, and takes the memory that the larger one does: the gradients, and the layers one by one.
Both have one layer in memory, and what threads work with. The rest is the program, and free memory that the C
library keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from gguf_tools.findings import Finding, Level
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.locks import usable_cores
from gguf_tools.text import counted, size_text
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.plan import CalibrationPlan, state_bytes
from imatrix.calibrate.run.cluster import values_bytes
from imatrix.calibrate.run.encode import encoding_bytes
from imatrix.calibrate.run.experts import experts_at_once
from imatrix.calibrate.shapes import Shapes, is_block, is_expert
from imatrix.calibrate.statistics.gradient_factors import gradient_text
from imatrix.calibrate.statistics.gradients import (
    GradientOptions,
    chunk_bytes,
    chunks_at_once,
    disk_bytes,
    layer_bytes,
)
from imatrix.calibrate.statistics.inputs import PAIR_BYTES, PIECE_ROWS
from imatrix.calibrate.work import encoding_seconds, planned_work
from imatrix.forward.gradients.backward import gradient_bytes
from imatrix.forward.logits import PIECE_POSITIONS, SLICE_ROWS
from imatrix.forward.workers import MOST_HELD
from imatrix.texts.chunks import Chunks
from imatrix.texts.tokens import Text

_PROGRAM_BYTES = 600 << 20
"""Memory of Python, torch and the kernels, as measured between the two parts of a run."""

_ALONE, _ALONE_COLS, _ALONE_POWER = 0.16, 256, -0.6
"""Share of the work that one thread does while others wait, at so many columns of the hidden states, and how
it falls with more. Measured: 0.16 with 256 and 0.07 with 1024. Beyond that the power is a guess."""

START = 3.0
"""Seconds until torch and the kernels are loaded."""

_LOGIT_COPIES, _FORWARD_SHARE = 3, 0.3
"""Copies of a piece of logits that a thread has for each model; memory of a chunk on the way there, over that
on the way back."""

_LEAST_TOKENS = 32768
"""Tokens that are enough for 256 columns: the sample model's figures were measured with these."""

_FEW_BY_COLUMN, _WANTED_BY_COLUMN = 8, 32
"""Tokens for each column below which a user is told, and that are recommended. Q2_K files of the sample leave
0.26, 0.19, 0.16 and 0.136 of stock's divergence with 8, 20, 40 and 128."""

_WORTH = 0.95
"""Share of the time below which another dtype is told to be faster."""

_LARGE = 2
"""A text is large with more than this many times the tokens that are enough."""


@dataclass(frozen=True)
class Cost:
    """Cost of a piece of work.

    n_bytes   on the disk
    seconds   on all threads
    is_exact  whether n_bytes is known from the plan of a file
    memory    bytes; 0: not estimated
    """

    n_bytes: int
    seconds: float = 0.0
    is_exact: bool = False
    memory: int = 0


def cost_of(plan: CalibrationPlan, n_threads: int, scheduler: str | None = None) -> Cost:
    """Estimate what a run takes, on the disk beside its output until it is done.

    scheduler  whose workers help; None: none do
    """
    options, shapes, text, network = plan.options, plan.shapes, plan.text, plan.network
    disk = plan.stored_bytes
    if plan.collects_gradients:
        every = {info.name: info.shape for info in plan.infos}
        disk += disk_bytes(network, every, gradient_text(text).inputs.size, GradientOptions.expert_bytes)
    if scheduler is not None:
        disk += values_bytes(shapes.made, n_threads)
    memory = memory_bytes(options, shapes, text, n_threads, plan.n_models)
    return Cost(disk, calibration_seconds(plan, text, n_threads), memory=memory)


def calibration_seconds(plan: CalibrationPlan, text: Text, n_threads: int) -> float:
    """Estimate how long a run with this text takes on `n_threads`."""
    alone = _ALONE * (plan.shapes.network.hidden_size / _ALONE_COLS) ** _ALONE_POWER
    return START + planned_work(plan, text).seconds * (alone + (1 - alone) / n_threads)


def seconds_in_bfloat16(plan: CalibrationPlan, n_threads: int) -> float | None:
    """Estimate how long a planned run would take in bfloat16.

    None for one that is in bfloat16, and where products are no faster
    """
    options = plan.options
    if options.forward.dtype == "bfloat16" or plan.probe.bfloat16_gain <= 1:
        return None
    other = replace(plan, options=replace(options, forward=replace(options.forward, dtype="bfloat16")))
    return calibration_seconds(other, plan.text, n_threads)


def estimate_lines(plan: CalibrationPlan, n_threads: int, scheduler: str | None = None) -> Iterator[str]:
    """Tell memory, disk and time of a run; see `cost_of`."""
    text, cost = plan.text, cost_of(plan, n_threads, scheduler)
    yield from cost_lines("calibration", text.chunks, cost, n_threads)
    faster = seconds_in_bfloat16(plan, n_threads)
    if faster is not None and faster < _WORTH * cost.seconds:
        yield f"          about {time_text(faster)} with --dtype bfloat16; the bytes then differ"
    if scheduler is not None:
        share = encoding_seconds(plan.options, plan.probe, text) / planned_work(plan, text).seconds
        yield f"          without the workers of {scheduler}; rounding, {share:.0%} of the work, is for them"


def cost_lines(
    what: str, chunks: Chunks, cost: Cost, n_threads: int, where: str = "beside the output"
) -> Iterator[str]:
    """Tell what a run on a text takes.

    what   the run does
    where  the disk space is
    """
    cores = counted(usable_cores(), "core")
    yield f"{what}: {chunks.n_tokens:,} tokens in {counted(chunks.n_chunks, 'chunk')}"
    yield f"  memory  about {size_text(cost.memory)}"
    yield f"  disk    {size_text(cost.n_bytes)} {where}, until it is done"
    yield f"  time    about {time_text(cost.seconds)}, with {counted(n_threads, 'thread')} on {cores}"


def passing_bytes(shapes: Shapes, chunk_size: int, n_threads: int, n_models: int, *, back: bool) -> int:
    """Estimate the memory of a text's way through models, without hidden states.

    back  whether gradients come back
    """
    logits = 4 * (
        SLICE_ROWS * shapes.network.hidden_size + _LOGIT_COPIES * n_threads * PIECE_POSITIONS * SLICE_ROWS
    )
    of_chunk = (chunk_bytes(infos, shapes.n_heads, chunk_size) for infos in shapes.by_layer())
    share = 1 if back else _FORWARD_SHARE
    most = max(map(_passing_weight_bytes, shapes.by_layer())) + n_threads * int(share * max(of_chunk))
    return _PROGRAM_BYTES + MOST_HELD + max(most, n_models * logits)


def _passing_weight_bytes(infos: Sequence[TensorInfo]) -> int:
    """Count the bytes of a layer's weights: of experts one in use, one read ahead, and one that goes."""
    return _weight_bytes(info for info in infos if not is_expert(info)) + 3 * _expert_bytes(infos)


def memory_bytes(
    options: CalibrationOptions, shapes: Shapes, text: Text, n_threads: int, n_models: int | None = None
) -> int:
    """Estimate how much memory a run takes.

    n_models  that follow the text at the same time; None: those of one run
    """
    budget, network, layers = options.forward.memory_bytes, shapes.network, list(shapes.by_layer())
    dtype, made = getattr(torch, options.forward.dtype), {info.name for info in shapes.made}

    def within_budget(states: int) -> int:
        return states if states <= budget else 0

    n_models = n_models or options.n_models
    states, _ = state_bytes(text, network, dtype, n_models, budget)
    left = max(0, budget - states)
    of_layers = (
        _making_bytes(infos, made, options, n_threads)
        + min(left, _kept_bytes(infos, network.hidden_size, n_models) * text.inputs.size)
        for infos in layers
    )
    most = within_budget(states) + max(of_layers, default=0)
    if options.needs_gradients:
        some = gradient_text(text)
        states = gradient_bytes(some.inputs.size, network, dtype)
        at_once = chunks_at_once(shapes, some.chunk_size, n_threads)
        of_layers = (
            _differentiating_bytes(infos) + at_once * chunk_bytes(infos, shapes.n_heads, some.chunk_size)
            for infos in layers
        )
        most = max(most, within_budget(states) + max(of_layers, default=0))
    return _PROGRAM_BYTES + MOST_HELD + most


def _kept_bytes(infos: Sequence[TensorInfo], hidden_size: int, n_models: int) -> int:
    """Count the bytes of a token's rows that are kept for the next step, with the original and others.

    They are what the original's matrices multiply, but for the first, and what the downs of all multiply.
    """
    n_cols = 0
    for info in infos if n_models > 1 else ():
        if info.name.endswith("ffn_down.weight") or "ffn_down_shexp" in info.name:
            n_cols += min(n_models - 1, 2) * info.n_cols
        elif ".attn_" in info.name and (info.n_cols != hidden_size or "attn_output" in info.name):
            n_cols += info.n_mats * info.n_cols
    return 4 * n_cols


def _differentiating_bytes(infos: Sequence[TensorInfo]) -> int:
    """Count the bytes of a layer in the backward pass, without chunks: weights and sums."""
    return _passing_weight_bytes(infos) + layer_bytes(infos)


def _making_bytes(
    infos: Sequence[TensorInfo], made: Iterable[str], options: CalibrationOptions, n_threads: int
) -> int:
    """Count the bytes of encoding a layer: its largest step, and what all steps need."""
    attention = _weight_bytes(info for info in infos if ".attn_" in info.name)
    block = _weight_bytes(filter(is_block, infos))
    steps = [(options.n_models - 1) * attention]
    for info in infos:
        if info.name in made:
            # Products go into sums while the weights that make them are there.
            of_moments = 4 * info.n_cols**2 * (1 if is_expert(info) else info.n_mats)
            of_pieces = 2 * 4 * PIECE_ROWS * info.n_cols
            steps.append(options.n_models * (block * is_block(info) + of_moments + of_pieces))
            experts = options.n_models * _expert_bytes(infos)
            steps.append(_encoding_bytes(info, options, n_threads) + experts)
    return attention + layer_bytes(infos) * options.needs_gradients + max(steps)


def _encoding_bytes(info: TensorInfo, options: CalibrationOptions, n_threads: int) -> int:
    """Count the bytes of encoding a tensor, once its inputs are known."""
    n_rows, n_moments, n_weights = info.n_rows // info.n_mats, info.n_mats, info.n_elems
    if is_expert(info):
        n_made = experts_at_once(info.n_cols, n_threads)
        n_moments = 1 + n_made  # one that others are shrunk towards
        n_weights = 2 * n_made * n_rows * info.n_cols  # gates and ups
    encoded = encoding_bytes(options.rounding, n_rows, info.n_cols, n_weights, n_threads)
    return PAIR_BYTES * info.n_cols**2 * n_moments + encoded


def _weight_bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(4 * info.n_elems for info in infos)


def _expert_bytes(infos: Iterable[TensorInfo]) -> int:
    """Count the bytes of one expert's weights."""
    return sum(4 * info.n_elems // info.n_mats for info in infos if is_expert(info))


def dtype_findings(plan: CalibrationPlan) -> Iterator[Finding]:
    """Yield what a user should know of the type that matrices are multiplied in: that it is slow here."""
    if plan.options.forward.dtype == "bfloat16" and (gain := plan.probe.bfloat16_gain) < _WORTH:
        yield Finding(
            "slow dtype",
            f"--dtype bfloat16 is emulated here: products take {1 / gain:.1f} times as long as in float32",
        )


def amount_findings(plan: CalibrationPlan, n_threads: int) -> Iterator[Finding]:
    """Yield what a user should know of the amount of text: too little, or more than the model needs."""
    yield from _little_text(plan)
    yield from _large_text(plan, n_threads)


def _little_text(plan: CalibrationPlan) -> Iterator[Finding]:
    """Yield how many tokens each column has, if they are few; experts share theirs and are left out."""
    real = {info.name: plan.n_cols(info) for info in plan.made.values() if not is_expert(info)}
    if not real:
        return
    text, (name, n_cols) = plan.text, max(real.items(), key=itemgetter(1))
    by_column = text.inputs.size / n_cols
    if by_column < _FEW_BY_COLUMN:
        chunks = -(-_WANTED_BY_COLUMN * n_cols // text.chunk_size)
        yield Finding(
            "little text",
            f"the text has {by_column:.1f} tokens for each of the {n_cols:,} columns of {name};"
            f" {chunks:,} chunks have {_WANTED_BY_COLUMN}, and make a better file",
            Level.NOTE,
        )


def _large_text(plan: CalibrationPlan, n_threads: int) -> Iterator[Finding]:
    """Yield how many chunks would do, of a text that is used as a whole and larger than the model needs."""
    options, text = plan.options, plan.text
    if options.cut.n_chunks is not None:
        return
    # Every matrix should see as many rows as it has columns, on average.
    needed = (math.ceil(plan.n_cols(info) / plan.shapes.share(info)) for info in plan.shapes.made)
    enough = -(-max([_LEAST_TOKENS, *needed]) // text.chunk_size)
    if text.n_chunks <= _LARGE * enough:
        return
    part = text.only(range(enough))
    whole, short = (time_text(calibration_seconds(plan, each, n_threads)) for each in (text, part))
    yield Finding(
        "large text",
        f"the text has {text.n_chunks:,} chunks, which take about {whole} on {n_threads} threads; --chunks"
        f" {enough} shows every matrix as many tokens as it has columns, and takes about {short}",
        Level.NOTE,
    )


def time_text(seconds: float) -> str:
    """Write a time for people.

    >>> time_text(5400)
    '1.5 hours'
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return counted(max(1, round(seconds)), "second")
