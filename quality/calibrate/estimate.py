"""What a calibrated run will need: memory, disk and time, told from shapes and one short measurement.

Time is that of the arithmetic: products of the forward and the backward pass, of second moments and of their
factors at the speed that this machine multiplies at, and rounding at the rates of docs/calibrated.md. Expect
it to be right within a factor of two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from forward.families import Network
from forward.text import Text
from gguf_tools.tensors import TensorInfo
from gguf_tools.text import size_text
from quality.calibrate.choices import Choices
from quality.calibrate.covariances import BLOCK_ROWS
from quality.calibrate.output_side import gradient_text
from quality.calibrate.streams import state_bytes
from quantize.roles import Role, layer_of, tensor_role

_SCALAR_RATE, _GRID_RATE = 2.0e6, 0.4e6
"""Weights a second that one thread rounds, of types whose weights stand alone and of types with grids."""

_PROBE = 1024
"""Number of rows and columns of the matrices whose product is timed."""

_PASSES = 3
"""How often a layer is computed where the model that is being written is followed: attention up to its last
matrix, attention as a whole, and what follows, once for each stage."""

_BACKWARD = 4
"""Cost of gradients, in forward passes."""


@dataclass(frozen=True)
class Shapes:
    """What an estimate has to know of a model.

    infos   all tensors of the output
    made    those that are calibrated
    n_used  experts per token
    """

    network: Network
    infos: Sequence[TensorInfo]
    made: Sequence[TensorInfo]
    n_used: int

    def share(self, info: TensorInfo) -> float:
        """Return the share of the tokens that one matrix of a tensor sees."""
        return self.n_used / info.n_mats if is_expert(info) else 1.0


def is_expert(info: TensorInfo) -> bool:
    """Whether a tensor is a stack of routed experts."""
    role = tensor_role(info.name, info.shape).role
    return info.n_mats > 1 and role in (Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN)


@dataclass(frozen=True)
class Work:
    """What a run computes.

    flops    floating point operations of matrix products
    seconds  of rounding, on one thread
    """

    flops: float
    seconds: float


def estimate_lines(choices: Choices, shapes: Shapes, text: Text, n_threads: int) -> Iterator[str]:
    """Yield what a run needs."""
    infos, made, network = shapes.infos, shapes.made, shapes.network
    n_models = 2 if choices.sequential else 1
    dtype = getattr(torch, choices.forward.dtype)
    in_memory, on_disk = state_bytes(text, network.hidden_size, dtype, n_models)
    fits = in_memory <= choices.forward.memory_bytes
    memory = layer_bytes(infos, made, n_models) + (in_memory if fits else 0)
    disk = on_disk if fits else in_memory
    if choices.two_sided or choices.embedding:
        n_values = gradient_text(text).inputs.size * network.hidden_size
        disk += 4 * n_values * (network.n_layers + 6) + _covariance_bytes(made)
    work = work_of(choices, shapes, text)
    seconds = (work.flops / flops_per_second() + work.seconds) / n_threads
    yield f"calibration: {text.inputs.size:,} tokens in {text.n_chunks} chunks"
    yield f"  memory  about {size_text(memory)}"
    yield f"  disk    {size_text(disk)} beside the output, until it is done"
    yield f"  time    about {time_text(seconds)} on {n_threads} threads"


def layer_bytes(infos: Sequence[TensorInfo], made: Sequence[TensorInfo], n_models: int) -> int:
    """Return about how much memory the largest layer takes.

    That is its weights, of routed experts one, and the moments of one input with what is made of them
    """
    weights: dict[int | None, int] = {}
    for info in infos:
        n_elems = info.n_elems // info.n_mats if is_expert(info) else info.n_elems
        layer = layer_of(info.name)
        if layer is not None:
            weights[layer] = weights.get(layer, 0) + 4 * n_models * n_elems
    # Sums in float64, crossed ones and the correction where two models go, and a factor of two in float32.
    per_value = 8 * (4 if n_models > 1 else 2) + 8
    stacks = [1 if is_expert(info) else info.n_mats for info in made]
    moments = [n * info.n_cols**2 * per_value for n, info in zip(stacks, made, strict=True)]
    return max(weights.values(), default=0) + max(moments, default=0)


def work_of(choices: Choices, shapes: Shapes, text: Text) -> Work:
    """Return what a run computes, all products and all rounding."""
    n_tokens, followed = text.inputs.size, choices.sequential
    layers = (info for info in shapes.infos if layer_of(info.name) is not None)
    active = sum(info.n_elems * shapes.share(info) for info in layers)
    forward = 2 * active * n_tokens * (2 * _PASSES if followed else 1)
    if choices.two_sided or choices.embedding:
        forward += 2 * active * gradient_text(text).inputs.size * _BACKWARD
    moments = seconds = 0.0
    for info in shapes.made:
        n_mats = info.n_mats
        moments += 2 * info.n_cols**2 * n_tokens * shapes.share(info) * n_mats * (2 if followed else 1)
        # Factor, its inverse, and the correction where the model is followed.
        moments += (6 if followed else 3) * info.n_cols**3 * n_mats
        moments += 2 * info.n_elems * info.n_cols
        rate = _GRID_RATE if info.type.name.startswith(("IQ1", "IQ2", "IQ3")) else _SCALAR_RATE
        seconds += info.n_elems / rate
    return Work(forward + moments, seconds)


def _covariance_bytes(made: Sequence[TensorInfo]) -> int:
    """Return about what the covariances of gradients take on the disk."""
    rows = ((info.shape[-2], 1 if is_expert(info) else info.n_mats) for info in made if len(info.shape) > 1)
    return sum(4 * n_mats * n_rows * min(n_rows, BLOCK_ROWS) for n_rows, n_mats in rows)


def flops_per_second() -> float:
    """Return how fast one thread multiplies matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones((_PROBE, _PROBE))
        a @ a
        started = time.perf_counter()
        a @ a
        return 2 * _PROBE**3 / (time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)


def time_text(seconds: float) -> str:
    """Return a time for people.

    >>> time_text(5400)
    '1.5 hours'
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length or unit == "minutes":
            return f"{seconds / length:.1f} {unit}"
    raise AssertionError("minutes are the last")
