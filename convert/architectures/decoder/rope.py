"""RopeConfig: how a model scales its rotation, from either spelling in config.json. Yarn: the same for YaRN.

    rope_scaling     `rope_type` or `type`; `rope_theta` stands beside it (the published models)
    rope_parameters  `rope_type`, with `rope_theta` inside (transformers 5)

Where both stand, rope_scaling counts. A type that isn't in KINDS is an error: no file can say what is meant.
The context before stretching is `original_max_position_embeddings` beside them, else inside, else
max_position_embeddings, as transformers 5.24 has it (standardize_rope_params).

PairedRows are rows of queries and keys in the order in which a file's architecture rotates them.

A checkpoint of these families rotates column i of a head of d columns together with column i + d/2. The
file's architecture ("llama", "deepseek") rotates neighbours. So the rows of q_proj and k_proj, weights and
biases, change places within each head:

    row 2j + s of the file = row s * d/2 + j of the checkpoint,  j = 0 .. d/2 - 1,  s = 0, 1

Whole rows move, with their scales, so it does not matter how the checkpoint stores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.architectures.config_reader import ConfigReader, shown
from convert.architectures.rules import Computed, Output, OutputTensor, Renamed, Rule
from convert.weights.base import Weight
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint
from quantize.fill.sources import joined, raw_rows, rows_dtype, split_rows

KINDS = ("default", "none", "linear", "dynamic", "yarn", "llama3", "longrope", "su")
"""Values of rope_type that are read; "su" is an older name of "longrope", "none" of "default"."""

_NEED_FACTOR = ("linear", "dynamic", "yarn")


@dataclass(frozen=True)
class Yarn:
    """RoPE scaled by YaRN (arXiv 2309.00071).

    factor                how much longer the context has become
    original_context      its length before, in tokens
    beta_fast, beta_slow  turns within the original context: above the first a frequency stays, below the
                          second it is slowed down by the whole factor
    mscale, mscale_all_dim, attention_factor  None where config.json has none
    truncate              whether the ramp between the two begins and ends at whole pairs
    log_multiplier        what a file says as yarn_log_multiplier; None where its family has no such key
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    log_multiplier: float | None = None

    @property
    def rotary_factor(self) -> float:
        """Factor of the rotated part of queries and of keys in transformers."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpness(self.mscale) / self.sharpness(self.mscale_all_dim)
        return self.sharpness(1.0)

    @property
    def remaining_factor(self) -> float | None:
        """Part of this factor that llama.cpp does not multiply by itself; None where nothing is left."""
        factor = self.rotary_factor / self.sharpness(1.0) * self.sharpness(self.log_multiplier or 0.0)
        return None if abs(factor - 1.0) < 1e-6 else factor

    def sharpness(self, weight: float) -> float:
        """Return how much sharper attention gets: 0.1 * weight * ln(factor) + 1, never below 1."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of a model; None where config.json says nothing.

    kind              of KINDS, without the older names
    original_context  length of the context before it was stretched
    attention_factor  what the rotated parts are multiplied by, as transformers reads it
    written_factor    the same as llama.cpp's converter reads it, which knows `attn_factor` too
    truncate          whether YaRN's ramp begins and ends at whole pairs
    log_multiplier    see Yarn
    partial           share of a head's columns that are rotated
    """

    theta: float
    kind: str = "default"
    factor: float | None = None
    original_context: int | None = None
    extrapolation_factor: float | None = None
    attention_factor: float | None = None
    written_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True
    log_multiplier: float | None = None
    partial: float | None = None

    @property
    def slowed(self) -> float:
        """Divisor of all frequencies; YaRN divides some of them."""
        return 1.0 if self.kind in ("none", "yarn") else self.factor or 1.0

    @property
    def yarn(self) -> Yarn | None:
        """YaRN with its defaults; None where the rotation is of another kind."""
        if self.kind != "yarn" or self.factor is None or self.original_context is None:
            return None
        return Yarn(
            self.factor,
            self.original_context,
            self.beta_fast or 32.0,
            self.beta_slow or 1.0,
            self.mscale,
            self.mscale_all_dim,
            self.attention_factor,
            self.truncate,
            self.log_multiplier,
        )


def read_rope(
    read: ConfigReader, context: int, default_theta: float = 10000.0, *, kinds: tuple[str, ...] = KINDS
) -> RopeConfig:
    """Return the rotation that config.json describes.

    context  max_position_embeddings, the original context where nothing else says it
    kinds    values of rope_type that the model may have
    raises   UnsupportedCheckpoint for another rope_type, BadConfig for an impossible value
    """
    raw, path = read.raw, read.path
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(key) or {}
    if not isinstance(values, dict):
        raise BadConfig(f"{path}: {key} is {shown(values)}, expected an object or null")
    inside = ConfigReader(values, path, prefix=f"{key}.")
    theta = inside.number("rope_theta", read.number("rope_theta", default_theta))
    kind = values.get("rope_type") or values.get("type") or "default"
    if {**values}.get("type") == kind:
        inside.overruled("type")
    if kind not in kinds:
        raise UnsupportedCheckpoint(
            f"{path}: {key}: RoPE of type {shown(kind)}, expected {' or '.join(map(repr, kinds))}"
        )
    kind = {"none": "default", "su": "longrope"}.get(kind, kind)
    partial = inside.number_or_null("partial_rotary_factor")
    if partial is None:
        partial = read.number_or_null("partial_rotary_factor")
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    attention = inside.number_or_null("attention_factor")
    beside = read.size_or_null("original_max_position_embeddings", None)
    original = beside or inside.size("original_max_position_embeddings", context)
    return RopeConfig(
        theta,
        kind,
        factor=_factor(inside, kind, context / original),
        original_context=original,
        extrapolation_factor=inside.number_or_null("extrapolation_factor"),
        attention_factor=attention,
        written_factor=inside.number_or_null("attn_factor") if attention is None else attention,
        beta_fast=_turns(inside, "beta_fast"),
        beta_slow=_turns(inside, "beta_slow"),
        mscale=inside.number_or_null("mscale"),
        mscale_all_dim=inside.number_or_null("mscale_all_dim"),
        low_freq_factor=inside.number("low_freq_factor", 1.0),
        high_freq_factor=inside.number("high_freq_factor", 4.0),
        truncate="truncate" not in inside.raw or inside.flag("truncate", False),
        partial=partial,
    )


def _turns(inside: ConfigReader, key: str) -> float | None:
    return None if inside.raw.get(key) is None else inside.number(key)


def _factor(inside: ConfigReader, kind: str, stretch: float) -> float | None:
    """Return the factor. YaRN's may be null, and is then by how much the context is longer than before."""
    if kind == "yarn" and inside.raw.get("factor", 0) is None:
        return stretch
    if kind in _NEED_FACTOR:
        return inside.number("factor")
    return inside.number("factor", 8.0) if kind == "llama3" else inside.number_or_null("factor")


def llama3_divisors(rope: RopeConfig, n_cols: int) -> np.ndarray:
    """Return the divisors of the frequencies of all pairs of rotated columns, float32 (n_cols / 2,).

    Long waves are stretched by the factor, short ones stay, and those in between are blended. Computed in
    float32 like the tensor of llama.cpp's converter (LlamaModel.generate_extra_tensors), step by step: torch
    divides a number by a tensor as the tensor's reciprocal times the number.
    """
    assert rope.factor is not None
    assert rope.original_context is not None
    one, low, high = np.float32(1), rope.low_freq_factor, rope.high_freq_factor
    context, factor = rope.original_context, np.float32(rope.factor)
    exponents = np.arange(0, n_cols, 2, dtype=np.float32) / np.float32(n_cols)
    # Rounded once: numpy's own power of float32 is less exact than torch's.
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    waves = one / (one / powers) * np.float32(2 * np.pi)
    share = (one / waves * np.float32(context) - np.float32(low)) / np.float32(high - low)
    blended = one / ((one - share) / factor + share)
    divisors = np.where(waves > np.float32(context / low), factor, blended)
    return np.where(waves < np.float32(context / high), one, divisors)


def _stretched(config: Any, options: Any) -> Iterable[int | None]:
    return (None,) if config.rope.kind == "llama3" else ()


def _divisors(name: str, weights: Sequence[Weight], config: Any) -> Computed:
    """Return the divisors of the frequencies of all pairs of a head, (head_dim / 2,)."""
    return Computed(name, llama3_divisors(config.rope, config.head_dim))


LLAMA3_ROTATION = Rule(_stretched, (Output("rope_freqs.weight", "", "", _divisors),))
"""Rule for the rotation of Llama 3 in families whose loader reads the tensor."""


@dataclass(frozen=True)
class PairedRows(Renamed):
    """A matrix whose heads of `head_rows` rows have rows i and i + head_rows / 2 side by side."""

    head_rows: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        dtype = rows_dtype(self.type)
        parts = []
        for low, high, offset, count in self._runs(start, stop):
            first, second = (
                self.weight.read_rows(low + half, high + half).astype(dtype, copy=False)
                for half in (0, self.head_rows // 2)
            )
            parts.append(_interleaved(first, second)[offset : offset + count])
        return joined(parts, (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        parts = []
        for low, high, offset, count in self._runs(start, stop):
            first, second = (
                raw_rows(self.weight, low + half, high + half).reshape(high - low, -1)
                for half in (0, self.head_rows // 2)
            )
            parts.append(_interleaved(first, second)[offset : offset + count].reshape(-1))
        return joined(parts, (), np.dtype(np.uint8))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (low, high, offset, count) for each head that rows `start` to `stop` touch.

        low, high      rows of the checkpoint in the first half of the head; those in its second half match
        offset, count  which of the interleaved rows are wanted
        """
        for head, low, high in split_rows(start, stop, self.head_rows):
            first = head * self.head_rows
            yield first + low // 2, first + -(-high // 2), low % 2, high - low


def _interleaved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the rows first[0], second[0], first[1] ..."""
    both = np.empty((2 * len(first), *first.shape[1:]), first.dtype)
    both[0::2], both[1::2] = first, second
    return both


@dataclass(frozen=True)
class PairedVector(Renamed):
    """A vector with one number for each row of such a matrix."""

    head_rows: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        heads = super().read_rows(start, stop)
        heads = heads.reshape(stop - start, -1, 2, self.head_rows // 2)
        return np.ascontiguousarray(heads.swapaxes(2, 3)).reshape(stop - start, -1)


def paired(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the one weight, a matrix or a vector, with its rotated rows side by side."""
    (weight,) = weights
    kind = PairedRows if len(weight.shape) > 1 else PairedVector
    return kind(name, weight.shape, weight.type, weight, config.head_dim)
