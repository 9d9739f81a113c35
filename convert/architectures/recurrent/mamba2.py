"""Layers of Mamba 2 in the files of several families: sizes, tensors and keys.

Facts of llama.cpp's converter (Mamba2Model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.rules import one
from convert.architectures.delta_net.arrange import decay, squeezed
from convert.architectures.rules import OutputTensor, Renamed, Rule, renamed
from convert.weights.base import Weight
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.hparams import HParams
from gguf_tools.format.values import Value

_NO_LIMITS: tuple[list[Any], ...] = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])

LONG_CONTEXT = 2**20
"""Context of a model that rotates nothing, as llama.cpp's converter writes it."""


@dataclass(frozen=True)
class MambaConfig(DecoderConfig):
    """Configuration of a model with Mamba 2; names as in Granite's config.json.

    mamba_layers      layers that are a Mamba 2
    beside_attention  whether they have attention beside it
    """

    mamba_layers: tuple[int, ...] = ()
    beside_attention: bool = False
    mamba_n_heads: int = 0
    mamba_n_groups: int = 1
    mamba_d_head: int = 0
    mamba_d_state: int = 0
    mamba_d_conv: int = 4

    @property
    def mamba_rows(self) -> int:
        """Columns of all heads of a Mamba 2."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def convolved_rows(self) -> int:
        """Rows that go through the convolution: the heads', and those of B and C."""
        return self.mamba_rows + 2 * self.mamba_n_groups * self.mamba_d_state

    @property
    def in_rows(self) -> int:
        """Rows of in_proj: a gate, what is convolved, a step for each head."""
        return self.mamba_rows + self.convolved_rows + self.mamba_n_heads


@dataclass(frozen=True)
class _Folded(Renamed):
    """A vector as a matrix, one row after the other, float32."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        whole = self.weight.read_rows(0, 1).astype(np.float32).reshape(self.shape)
        return np.ascontiguousarray(whole[start:stop])


def _column(name: str, weights: Sequence[Weight], config: MambaConfig) -> OutputTensor:
    """Return a number for each head as a column."""
    (weight,) = weights
    return _Folded(name, (weight.shape[0], 1), F32, weight)


def _by_group(name: str, weights: Sequence[Weight], config: MambaConfig) -> OutputTensor:
    """Return the norm of the output, a row for each group."""
    (weight,) = weights
    return _Folded(name, (config.mamba_n_groups, weight.shape[0] // config.mamba_n_groups), F32, weight)


def _in_mamba(config: MambaConfig, options: Any) -> tuple[int, ...]:
    return config.mamba_layers


def refuse_limits(read: ConfigReader) -> None:
    """Raise BadConfig for a model whose steps have a limit."""
    limit = read.raw.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMITS:
        raise read.bad("time_step_limit", "none: llama.cpp has no limit")


def mamba_rules(prefix: str) -> tuple[Rule, ...]:
    """Return the rules of a Mamba 2 whose weights have names that begin so: "model.layers.{layer}.mamba."."""
    rules = (
        ("ssm_in.weight", "in_proj.weight", "in_rows hidden_size", renamed),
        ("ssm_conv1d.weight", "conv1d.weight", "convolved_rows one mamba_d_conv", squeezed),
        ("ssm_conv1d.bias", "conv1d.bias", "convolved_rows", renamed),
        ("ssm_dt.bias", "dt_bias", "mamba_n_heads", renamed),
        ("ssm_a", "A_log", "mamba_n_heads", decay(_column)),
        ("ssm_d", "D", "mamba_n_heads", _column),
        ("ssm_norm.weight", "norm.weight", "mamba_rows", _by_group),
        ("ssm_out.weight", "out_proj.weight", "hidden_size mamba_rows", renamed),
    )
    return tuple(
        one(_in_mamba, f"blk.{{layer}}.{name}", f"{prefix}{source}", sizes, arrange)
        for name, source, sizes, arrange in rules
    )


def mamba_keys(has_them: Callable[[Any], bool]) -> tuple[Key, ...]:
    """Return the keys about Mamba 2, which stand in the files of models that `has_them` is true of."""

    def key(name: str, value: Callable[[Any], int]) -> Key:
        return Key(name, Value.u32, lambda c, o: value(c) if has_them(c) else None)

    return (
        key(keys.SSM_CONV_KERNEL, lambda c: c.mamba_d_conv),
        key(keys.SSM_STATE_SIZE, lambda c: c.mamba_d_state),
        key(keys.SSM_GROUP_COUNT, lambda c: c.mamba_n_groups),
        key(keys.SSM_INNER_SIZE, lambda c: c.mamba_rows),
        key(keys.SSM_TIME_STEP_RANK, lambda c: c.mamba_n_heads),
    )


def read_mamba_sizes(hparams: HParams) -> dict[str, Any]:
    """Read the sizes of MambaConfig out of the keys of a GGUF file.

    raises  FormatError for heads that are no whole columns, or groups that are no whole heads
    """
    inner, n_heads = hparams.size("ssm_inner_size"), hparams.size("ssm_time_step_rank")
    n_groups = hparams.size("ssm_group_count", 1)
    if not n_heads or inner % n_heads or not n_groups or n_heads % n_groups:
        raise FormatError(
            f"{hparams.path}: {n_heads} heads in {n_groups} groups have {inner} columns: expected a Mamba 2"
        )
    return {
        "mamba_n_heads": n_heads,
        "mamba_n_groups": n_groups,
        "mamba_d_head": inner // n_heads,
        "mamba_d_state": hparams.size("ssm_state_size"),
        "mamba_d_conv": hparams.size("ssm_conv_kernel"),
    }
