"""Estimates memory, disk and time of a calibrated run, from shapes and one short measurement.

Time is counted in seconds of one thread, from what `Probe` measures of this machine. Expect it to be right
within a factor of 1.5 on a machine that does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from gguf_tools.findings import Finding, Level
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.locks import usable_cores
from gguf_tools.text import counted, size_text
from imatrix.calibrate.footprint import is_expert, memory_bytes
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.plan import CalibrationPlan
from imatrix.calibrate.probe import LayerTimes, Probe
from imatrix.calibrate.run.context import state_bytes
from imatrix.calibrate.run.experts import experts_at_once
from imatrix.calibrate.statistics.gradient_factors import gradient_text
from imatrix.calibrate.statistics.gradients import row_pieces, stored_bytes
from imatrix.calibrate.statistics.inputs import HELD_ROWS
from imatrix.forward.gradients.forward_backward import BACKWARD_WORK
from imatrix.forward.network import EMBEDDINGS, OUTPUT
from imatrix.texts.tokens import Text
from quantize.roles import layer_of

_SWEEPS = 4
"""Softmaxes that a logit of one model takes: sums, probabilities, and what is made of them, in float64."""

_COPIES = 8
"""Copies of a matrix' inputs on the way into sums: they are kept, joined, widened and weighed."""

_HELD_PRODUCTS = 5
"""Products with the held-out rows, for each matrix."""

_ALONE, _ALONE_COLS, _ALONE_POWER = 0.16, 256, -0.6
"""Share of the work that one thread does while others wait, at so many columns of the hidden states, and how
it falls with more. Measured: 0.16 with 256 and 0.07 with 1024. Beyond that the power is a guess."""

_START = 3.0
"""Seconds until torch and the kernels are loaded."""

_STOCK_RATE = 50e6
"""Weights a second that one thread encodes as the stock encoder does: scripts/bench/kernels.py."""

_LEAST_TOKENS = 32768
"""Tokens that are enough for 256 columns: the sample model's figures were measured with these."""

_FEW_BY_COLUMN, _WANTED_BY_COLUMN = 8, 32
"""Tokens for each column below which a user is told, and that are recommended. Q2_K files of the sample leave
0.26, 0.19, 0.16 and 0.136 of stock's divergence with 8, 20, 40 and 128."""

_LARGE = 2
"""A text is large with more than this many times the tokens that are enough."""


@dataclass(frozen=True)
class Work:
    """Work of a run, in seconds of one thread.

    others      of tensors that are encoded by themselves, which come first
    gradients   of the pass forward and back
    embeddings  of rounding them
    layers      of each layer: its passes, moments, factors and rounding
    end         of the output matrix, and of the divergence
    """

    others: float
    gradients: float
    embeddings: float
    layers: tuple[float, ...]
    end: float

    @property
    def seconds(self) -> float:
        return self.before(len(self.layers)) + self.end

    def before(self, layer: int) -> float:
        """The work before a layer."""
        return self.others + self.gradients + self.embeddings + sum(self.layers[:layer])


def estimate_lines(plan: CalibrationPlan, n_threads: int, scheduler: str | None = None) -> Iterator[str]:
    """Tell memory, disk and time of a run.

    scheduler  whose workers help; None: none do
    """
    options, shapes, text, network = plan.options, plan.shapes, plan.text, plan.network
    in_memory, on_disk = state_bytes(text, network, plan.dtype, options.n_models)
    fits = in_memory <= options.forward.memory_bytes
    memory = memory_bytes(options, shapes, text, n_threads)
    disk = on_disk if fits else in_memory
    if options.needs_gradients:
        n_values = gradient_text(text).inputs.size * network.state_size
        disk += 4 * n_values * (network.n_all_layers + 6) + _covariance_bytes(shapes.made)
    if scheduler is not None:
        disk += _stored_bytes(shapes.made, n_threads)
    seconds = calibration_seconds(options, plan.probe, text, n_threads)
    yield f"calibration: {text.inputs.size:,} tokens in {text.n_chunks} chunks"
    yield f"  memory  about {size_text(memory)}"
    yield f"  disk    {size_text(disk)} beside the output, until it is done"
    cores = counted(usable_cores(), "core")
    yield f"  time    about {time_text(seconds)}, with {counted(n_threads, 'thread')} on {cores}"
    if scheduler is not None:
        share = encoding_seconds(options, plan.probe, text) / work_of(options, plan.probe, text).seconds
        yield f"          without the workers of {scheduler}; rounding, {share:.0%} of the work, is for them"


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
    enough = -(-_enough_tokens(plan) // text.chunk_size)
    if text.n_chunks <= _LARGE * enough:
        return
    part = text.only(range(enough))
    whole, short = (
        time_text(calibration_seconds(options, plan.probe, each, n_threads)) for each in (text, part)
    )
    yield Finding(
        "large text",
        f"the text has {text.n_chunks:,} chunks, which take about {whole} on {n_threads} threads; --chunks"
        f" {enough} shows every matrix as many tokens as it has columns, and takes about {short}",
        Level.NOTE,
    )


def _enough_tokens(plan: CalibrationPlan) -> int:
    """Count the tokens that show every matrix as many rows as it has columns, on average."""
    needed = (math.ceil(plan.n_cols(info) / plan.shapes.share(info)) for info in plan.shapes.made)
    return max([_LEAST_TOKENS, *needed])


def calibration_seconds(options: CalibrationOptions, probe: Probe, text: Text, n_threads: int) -> float:
    """Estimate how long a run takes on `n_threads`."""
    alone = _ALONE * (probe.shapes.network.hidden_size / _ALONE_COLS) ** _ALONE_POWER
    return _START + work_of(options, probe, text).seconds * (alone + (1 - alone) / n_threads)


def work_of(options: CalibrationOptions, probe: Probe, text: Text) -> Work:
    """Estimate the work of a run from shapes, and from what was measured of this machine."""
    shapes = probe.shapes
    made = {info.name for info in shapes.made}
    by_layer: list[list[TensorInfo]] = [[] for _ in range(shapes.network.n_all_layers)]
    others, outside = 0.0, {EMBEDDINGS: 0.0, OUTPUT: 0.0}
    for info in shapes.infos:
        layer = layer_of(info.name)
        if layer is not None and layer < len(by_layer):
            by_layer[layer].append(info)
        elif info.name in made:
            outside[info.name] = _rounding_seconds(options, probe, info, text.inputs.size)
        if info.name not in made and info.type.is_quantized:
            others += info.n_elems / _STOCK_RATE
    layers = tuple(
        _layer_seconds(options, probe, text, probe.layer(number), [i for i in infos if i.name in made])
        for number, infos in enumerate(by_layer)
    )
    gradients = 0.0
    if options.needs_gradients:
        some = gradient_text(text)
        passes = sum(pass_seconds(probe, some, number) for number in range(len(by_layer)))
        gradients = (1 + BACKWARD_WORK) * passes + 2 * _logit_seconds(probe, some.inputs.size)
        gradients += sum(_covariance_seconds(probe, info, some.inputs.size) for info in shapes.infos)
    end = outside[OUTPUT] + _logit_seconds(probe, options.n_models * text.inputs.size / 2)
    return Work(others, gradients, outside[EMBEDDINGS], layers, end)


def encoding_seconds(options: CalibrationOptions, probe: Probe, text: Text) -> float:
    """Estimate the part of the work that workers of a scheduler take: rounding."""
    made = probe.shapes.made
    return sum(_encoding_seconds(options, probe, info, text.inputs.size) for info in made)


def pass_seconds(probe: Probe, text: Text, layer: int) -> float:
    """Estimate how long one thread takes to compute a layer for a text."""
    times = probe.layer(layer)
    of_experts = text.inputs.size * probe.shapes.n_used * times.expert
    return text.n_chunks * (times.attention + times.block) + of_experts


def logit_seconds(probe: Probe, text: Text) -> float:
    """Estimate how long one thread takes for the logits of a model that are scored in a text."""
    return _logit_seconds(probe, text.inputs.size / 2)


def _logit_seconds(probe: Probe, n_tokens: float) -> float:
    network, speeds = probe.shapes.network, probe.speeds
    by_logit = network.hidden_size * speeds.product + _SWEEPS * speeds.logit
    return n_tokens * network.vocab_size * by_logit


def _layer_seconds(
    options: CalibrationOptions, probe: Probe, text: Text, times: LayerTimes, made: Sequence[TensorInfo]
) -> float:
    """Estimate the work of a layer: what goes through it, what is summed up, and rounding.

    Where the model that is written follows the original, its attention is computed once up to each input, and
    once as a whole; so is the original's. What comes after is computed once to see what down multiplies, and
    of the model that is written once more.
    """
    n_chunks, n_tokens, models = text.n_chunks, text.inputs.size, options.n_models
    names = {info.name for info in made}
    attention = models * times.attention
    if options.sequential:
        stages = (seconds for group, seconds in times.stages.items() if names.intersection(group))
        attention += models * sum(stages)
    after = models + options.sequential
    seconds = n_chunks * (attention + after * times.block)
    seconds += after * n_tokens * probe.shapes.n_used * times.expert
    sharing = {name: group[0] for group in times.stages for name in group}
    seen = set[str]()
    for info in made:
        key = sharing.get(info.name, info.name.replace("ffn_up", "ffn_gate"))
        if key not in seen:  # those with the same input share its moments
            seen.add(key)
            seconds += _moments_seconds(options, probe, info, n_tokens)
        seconds += _rounding_seconds(options, probe, info, n_tokens)
    return seconds


def _moments_seconds(options: CalibrationOptions, probe: Probe, info: TensorInfo, n_tokens: int) -> float:
    """Estimate sums of products of a tensor's inputs, and their factors."""
    speeds, n_cols = probe.speeds, info.n_cols
    rows = n_tokens * probe.shapes.share(info) * info.n_mats
    copied = 4 * _COPIES * options.n_models * rows * n_cols * speeds.move
    # What rounding reads is lifted by an inverse, and factored. The step towards W t takes another inverse
    # and a product of whole matrices. An inverse is a factor and half of such a product.
    inverse = speeds.factor + speeds.product / 2
    corrected = inverse + speeds.product if options.sequential else 0.0
    factors = info.n_mats * n_cols**3 * (speeds.factor + inverse + corrected)
    return rows * n_cols**2 * options.n_models * speeds.product + copied + factors


def _rounding_seconds(options: CalibrationOptions, probe: Probe, info: TensorInfo, n_tokens: int) -> float:
    """Estimate the rounding of a tensor, with what goes before and after it."""
    seconds = _encoding_seconds(options, probe, info, n_tokens)
    if options.rounding.needs_gradients and layer_of(info.name) is not None:
        blocks = sum((stop - start) ** 3 for start, stop in row_pieces(info.n_rows // info.n_mats))
        seconds += info.n_mats * blocks * probe.speeds.factor
    return seconds


def _encoding_seconds(options: CalibrationOptions, probe: Probe, info: TensorInfo, n_tokens: int) -> float:
    """Estimate how long the strips of a tensor take, see `imatrix.calibrate.run.strips`."""
    method, speeds = options.rounding, probe.speeds
    products = _HELD_PRODUCTS * min(HELD_ROWS, n_tokens) + (info.n_cols if options.sequential else 0)
    seconds = info.n_elems * (products * speeds.product + 1 / _STOCK_RATE)
    if method.can_encode(info.type):
        seconds += speeds.rounding * method.rates(info.type).seconds(info)
    return seconds


def _covariance_seconds(probe: Probe, info: TensorInfo, n_tokens: int) -> float:
    """Estimate the covariances of the gradients at a matrix."""
    if layer_of(info.name) is None or len(info.shape) < 2:
        return 0.0
    rows = n_tokens * probe.shapes.share(info) * info.n_mats
    pieces = sum((stop - start) ** 2 for start, stop in row_pieces(info.n_rows // info.n_mats))
    return rows * pieces * probe.speeds.product


def _stored_bytes(made: Sequence[TensorInfo], n_threads: int) -> int:
    """Estimate what is in files for workers at a time: factors, steps towards W t, covariances of blocks."""

    def of(info: TensorInfo) -> int:
        n_rows = info.n_rows // info.n_mats
        n_mats = experts_at_once(info.n_cols, n_threads) if is_expert(info) else info.n_mats
        return 12 * n_mats * (info.n_cols**2 + sum((stop - start) ** 2 for start, stop in row_pieces(n_rows)))

    return max(map(of, made), default=0)


def _covariance_bytes(made: Sequence[TensorInfo]) -> int:
    """Estimate what the covariances of gradients take on the disk."""
    rows = ((info.shape[-2], 1 if is_expert(info) else info.n_mats) for info in made if len(info.shape) > 1)
    return sum(stored_bytes(n_mats, n_rows) for n_rows, n_mats in rows)


def time_text(seconds: float) -> str:
    """Write a time for people.

    >>> time_text(5400)
    '1.5 hours'
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return counted(max(1, round(seconds)), "second")
