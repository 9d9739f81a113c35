"""gpt-oss: biases everywhere, a sink per head, a sliding window in every second layer, MXFP4 experts.

A checkpoint stores experts as stacks with gate and up interleaved:

    gate_up_proj       packed (experts, 2 width, hidden_size): rows of gate and up by turns
                       plain  (experts, hidden_size, 2 width): the same transposed
    down_proj          packed (experts, hidden_size, width), plain (experts, width, hidden_size)
    gate_up_proj_bias  (experts, 2 width), gate and up by turns

Published checkpoints are packed (MXFP4), and their codes are kept. Finetunes may be plain. Two programs store
them in other ways, with rows as everywhere else:

    Unsloth  gate_up_projs.0.weight (2 width, hidden_size) ..., down_projs.0.weight: expert by expert
    MLX      gate_proj, up_proj (experts, width, hidden_size), down_proj, without interleaving
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, with_defaults
from convert.architectures.decoder.family import decoder, rope_notes
from convert.architectures.decoder.metadata import COMMON, EXPERT_WIDTH, SLIDING_WINDOW
from convert.architectures.decoder.rules import attention, ends, in_layer, layers, norm_of_blocks, stack_of
from convert.architectures.options import NoOptions
from convert.architectures.rules import Arrange, Output, OutputTensor, Renamed, Rule, renamed, stacked
from convert.weights.base import TYPES, Weight
from gguf_tools.format.ggml_types import MXFP4
from quantize.fill.sources import TransposedHeads, raw_rows

GATE, UP = 0, 1
"""Which of two rows, or columns, is the gate's and which is up's."""


def is_packed(weight: Weight) -> bool:
    """Return whether a stack of experts is stored as codes, with its rows as everywhere else."""
    return weight.stored_as not in TYPES


@dataclass(frozen=True)
class AlternateRows(Renamed):
    """Every second row of a tensor, from `first` on."""

    first: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(super().read_rows(2 * start, 2 * stop)[self.first :: 2])

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        rows = raw_rows(self.weight, 2 * start, 2 * stop).reshape(2 * (stop - start), -1)
        return np.ascontiguousarray(rows[self.first :: 2]).reshape(-1)


@dataclass(frozen=True)
class AlternateCols(Renamed):
    """Every second column of a matrix, from `first` on."""

    first: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = super().read_rows(start, stop)
        return np.ascontiguousarray(rows[:, self.first :: 2])


def half_of_gate_up(first: int) -> Arrange:
    """Return the arrangement of gate or of up in gate_up_proj, (experts, width, hidden_size)."""

    def arrange(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
        (weight,) = weights
        shape = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        rows = weight if is_packed(weight) else _transposed(name, weight)
        return AlternateRows(name, shape, rows.type, rows, first)

    return arrange


def half_of_each(first: int) -> Arrange:
    """Return the arrangement of gate or of up, weight or bias, in what experts have one by one."""

    def arrange(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
        stack = stacked(name, weights, config)
        shape = (len(weights), config.moe_intermediate_size, *weights[0].shape[1:])
        if len(shape) == 2:
            return AlternateCols(name, shape, stack.type, stack, first)
        return AlternateRows(name, shape, stack.type, stack, first)

    return arrange


def half_of_bias(first: int) -> Arrange:
    """Return the arrangement of the bias of gate or of up, (experts, width)."""

    def arrange(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
        (weight,) = weights
        shape = (config.num_experts, config.moe_intermediate_size)
        return AlternateCols(name, shape, weight.type, weight, first)

    return arrange


def down(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
    """Return down, (experts, hidden_size, width)."""
    (weight,) = weights
    if is_packed(weight):
        return Renamed(name, weight.shape, weight.type, weight)
    return _transposed(name, weight)


def _transposed(name: str, weight: Weight) -> TransposedHeads:
    n_mats, n_rows, n_cols = weight.shape
    return TransposedHeads(name, (n_mats, n_cols, n_rows), weight, n_rows, 0, n_rows)


_DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

_KINDS = ("sliding_attention", "full_attention")


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a gpt-oss."""
    stated = raw.get("rope_scaling") or raw.get("rope_parameters")
    rope = {} if stated else {"rope_scaling": _DEFAULT_ROPE}
    read = with_defaults(merged(raw, rope), path)
    read.fixed("swiglu_limit", 7.0, "llama.cpp's gpt-oss clamps its gates there")
    read.fixed("swiglu_alpha", 1.702, "llama.cpp's gpt-oss has no other gate")
    read.fixed("attention_bias", True, "llama.cpp's gpt-oss always has biases")
    fields = {**decoder_fields(read, theta=150000.0), **expert_fields(read)}
    return DecoderConfig(
        **fields,
        attention_bias=True,
        output_bias=True,
        sliding_window=read.size("sliding_window"),
        sliding_layers=_sliding_layers(read, fields["num_hidden_layers"]),
        moe_intermediate_size=fields["intermediate_size"],
    )


def _sliding_layers(read: ConfigReader, n_layers: int) -> tuple[int, ...]:
    kinds = read.raw.get("layer_types")
    if kinds is None:
        return tuple(range(0, n_layers, 2))
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in _KINDS for kind in kinds):
        raise read.bad("layer_types", f"{n_layers} of {' and '.join(map(repr, _KINDS))}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _KINDS[0])


def _notes(config: DecoderConfig, options: NoOptions) -> tuple[str, ...]:
    notes = []
    if config.sliding_layers != tuple(range(0, config.num_hidden_layers, 2)):
        notes.append(
            "layer_types: llama.cpp's gpt-oss has its sliding window in layers 0, 2, 4 ..., this model not"
        )
    return (*notes, *rope_notes(config.rope))


def _gate_up_sizes(weight: Weight, config: DecoderConfig) -> str:
    return f"num_experts {'gate_up_rows hidden_size' if is_packed(weight) else 'hidden_size gate_up_rows'}"


def _down_sizes(weight: Weight, config: DecoderConfig) -> str:
    sizes = ("hidden_size", "moe_intermediate_size")
    return " ".join(("num_experts", *(sizes if is_packed(weight) else reversed(sizes))))


_EXPERTS = "model.layers.{layer}.mlp.experts"
_BY_EXPERT, _APART = f"{_EXPERTS}.gate_up_projs.0.weight", f"{_EXPERTS}.gate_proj"
_EACH_GATE_UP, _EACH_DOWN = f"{_EXPERTS}.gate_up_projs.{{expert}}", f"{_EXPERTS}.down_projs.{{expert}}"


def _halves(end: str, source: str, sizes: Any, half: Callable[[int], Arrange], **where: Any) -> Rule:
    """Return the rule of gate and up that are stored as one; `end` is "weight" or "bias"."""
    return Rule(layers, tuple(
        Output(f"blk.{{layer}}.ffn_{part}_exps.{end}", source, sizes, half(first))
        for part, first in (("gate", GATE), ("up", UP))
    ), **where)  # fmt: skip


def _down(end: str, source: str, sizes: Any, arrange: Arrange, **where: Any) -> Rule:
    return Rule(layers, (Output(f"blk.{{layer}}.ffn_down_exps.{end}", source, sizes, arrange),), **where)


def _published() -> tuple[Rule, ...]:
    elsewhere = (_BY_EXPERT, _APART)
    return (
        _halves("weight", f"{_EXPERTS}.gate_up_proj", _gate_up_sizes, half_of_gate_up, early=is_packed,
                unless=elsewhere),
        _down("weight", f"{_EXPERTS}.down_proj", _down_sizes, down, early=is_packed, unless=elsewhere),
        _halves("bias", f"{_EXPERTS}.gate_up_proj_bias", "num_experts gate_up_rows", half_of_bias,
                unless=elsewhere),
        _down("bias", f"{_EXPERTS}.down_proj_bias", "num_experts hidden_size", renamed, unless=(_BY_EXPERT,)),
    )  # fmt: skip


def _by_expert() -> tuple[Rule, ...]:
    here = {"when": (_BY_EXPERT,)}
    return (
        _halves("weight", f"{_EACH_GATE_UP}.weight", "gate_up_rows hidden_size", half_of_each, **here),
        _down("weight", f"{_EACH_DOWN}.weight", "hidden_size moe_intermediate_size", stacked, **here),
        _halves("bias", f"{_EACH_GATE_UP}.bias", "gate_up_rows", half_of_each, **here),
        _down("bias", f"{_EACH_DOWN}.bias", "hidden_size", stacked, **here),
    )


def _apart() -> Iterator[Rule]:
    for part in ("gate", "up", "down"):
        yield stack_of(part, layers, f"{_EXPERTS}.", _APART)
    for part in ("gate", "up"):
        bias = Output(f"blk.{{layer}}.ffn_{part}_exps.bias", f"{_EXPERTS}.{part}_proj_bias",
                      "num_experts moe_intermediate_size")  # fmt: skip
        yield Rule(layers, (bias,), when=(_APART,))


_GPT_OSS = decoder(
    "GptOssForCausalLM",
    gguf_name="gpt-oss",
    read_config=read_config,
    rules=(
        *ends(needs_output=True),
        *attention(),
        in_layer(layers, "attn_sinks.weight", "self_attn.sinks", "num_attention_heads"),
        norm_of_blocks("post_attention_norm"),
        in_layer(layers, "ffn_gate_inp.weight", "mlp.router.weight", "num_experts hidden_size"),
        in_layer(layers, "ffn_gate_inp.bias", "mlp.router.bias", "num_experts"),
        *_published(),
        *_by_expert(),
        *_apart(),
    ),
    metadata=(*COMMON, SLIDING_WINDOW, EXPERT_WIDTH),
    notes=_notes,
    canonical_name=lambda name: name.replace(".mlp.router.linear.", ".mlp.router.", 1),  # Unsloth's
    kept=frozenset({MXFP4}),
    windows="stretched",
    clamped=True,
)  # fmt: skip

FAMILIES = (_GPT_OSS,)
