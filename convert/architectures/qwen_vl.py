"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, the text part: a Qwen 2 or 3 that rotates by time, height and width.

Without images the three positions of a token are one, and M-RoPE is plain RoPE. The towers of Qwen3-VL are in
`convert.architectures.vision`; what its deepstack adds to hidden states comes from images alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    fix_head_dim,
    read_mrope_section,
    window_fields,
    with_defaults,
)
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_WIDTH,
    MROPE_SECTIONS,
    inserted,
    read_decoder,
)
from convert.architectures.decoder.rules import (
    dense_decoder,
    expert_stacks,
    gate_rows,
    layers,
    mixture_decoder,
    up_rows,
)
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.options import NoOptions
from convert.architectures.rules import Arrange, Output, OutputTensor, Rule, Where, renamed
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from quantize.fill.sources import TransposedHeads


@dataclass(frozen=True)
class QwenVLConfig(DecoderConfig):
    """Configuration of a text part.

    n_deepstack  first layers that a tower adds to; None for a model without deepstack
    """

    n_deepstack: int | None = None

    @property
    def unrotated_pairs(self) -> tuple[int, ...]:
        """Pairs of columns that llama.cpp leaves unrotated: interleaved M-RoPE has no section for them."""
        if self.n_deepstack is None or self.mrope_section is None:
            return ()
        section = self.mrope_section
        return tuple(
            pair
            for pair in range(self.head_dim // 2)
            if pair % sum(section) >= 3 * section[pair % sum(section) % 3]
        )


_METADATA = inserted(COMMON, MROPE_SECTIONS, after=keys.HEAD_COUNT_KV)


# ---- Qwen2-VL and Qwen2.5-VL


def _read_qwen2vl(raw: Mapping[str, Any], path: str | Path) -> QwenVLConfig:
    """Return the configuration of the text part of a Qwen2-VL or Qwen2.5-VL."""
    stated = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if isinstance(stated, dict) and "mrope" in (stated.get("rope_type"), stated.get("type")):
        plain = merged(stated, {"rope_type": "default", "type": None})
        raw = merged(raw, {"rope_scaling": plain, "rope_parameters": None})
    read = with_defaults(raw, path)
    fields = decoder_fields(read, theta=1e6)
    fix_head_dim(read, fields, "qwen2vl")
    section = read_mrope_section(read, fields["head_dim"], (16, 24, 24))
    return QwenVLConfig(**fields, **window_fields(read), attention_bias=True, mrope_section=section)


_NO_EPSILON = 1e-30
"""Stands for no epsilon, and keeps a row of zeros finite."""


def _qwen2vl_notes(config: QwenVLConfig, options: NoOptions) -> tuple[str, ...]:
    note = f"rms_norm_eps is {config.rms_norm_eps:g}: llama.cpp's qwen2vl does not read it, and adds nothing"
    return (*decoder_notes(config), *((note,) if config.rms_norm_eps > _NO_EPSILON else ()))


def _read_qwen2vl_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with the epsilon that llama.cpp has."""
    return replace(read_decoder(family, metadata, shapes, path), rms_norm_eps=_NO_EPSILON)


_QWEN2VL = decoder(
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    gguf_name="qwen2vl",
    read_config=_read_qwen2vl,
    rules=dense_decoder(),
    metadata=_METADATA,
    drops=vision_drops,
    notes=_qwen2vl_notes,
    reader=_read_qwen2vl_file,
)


# ---- Qwen3-VL


def _read_qwen3vl(raw: Mapping[str, Any], path: str | Path) -> QwenVLConfig:
    """Return the configuration of the text part of a Qwen3-VL, with experts or without."""
    read = with_defaults(raw, path)
    tower = ConfigReader(raw.get("vision_config") or {}, path, "vision_config.")
    added = tower.raw.get("deepstack_visual_indexes") or []
    if not isinstance(added, list):
        raise tower.bad("deepstack_visual_indexes", "a list of layers")
    fields = {**decoder_fields(read, theta=5e5), "attention_bias": read.flag("attention_bias", False)}
    if raw["architectures"][0].startswith("Qwen3VLMoe"):
        for key, value in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            read.fixed(key, value, "llama.cpp's qwen3vlmoe has experts in every layer")
        fields |= expert_fields(read) | {"moe_intermediate_size": read.size("moe_intermediate_size")}
    section = read_mrope_section(read, fields["head_dim"], (24, 20, 20))
    return QwenVLConfig(**fields, qk_norm=True, mrope_section=section, n_deepstack=len(added))


def _qwen3vl_notes(config: QwenVLConfig, options: NoOptions) -> tuple[str, ...]:
    if not config.unrotated_pairs:
        return decoder_notes(config)
    numbers = ", ".join(map(str, config.unrotated_pairs))
    return (
        *decoder_notes(config),
        f"mrope_section is {list(config.mrope_section or ())}: llama.cpp does not rotate pairs {numbers}"
        f" of {config.head_dim // 2} columns, which the original rotates by the position",
    )


_DEEPSTACK = Key(keys.N_DEEPSTACK_LAYERS, Value.u32, lambda c, o: c.n_deepstack)


def _half(rows: Arrange) -> Arrange:
    """Return the arrangement of gate or of up in gate_up_proj, whichever way round it is stored."""

    def arrange(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
        return rows(name, [_turned(weight, config.gate_up_rows) for weight in weights], config)

    return arrange


def _down(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
    return renamed(name, [_turned(weight, config.hidden_size) for weight in weights], config)


def _turned(weight: Weight, rows: int) -> Any:
    """Return a stack of matrices with so many rows each, from one that may have them as columns."""
    n_mats, n_rows, n_cols = weight.shape
    if n_cols != rows:
        return weight
    return TransposedHeads(weight.name, (n_mats, n_cols, n_rows), weight, n_rows, 0, n_rows)


def _stored_sizes(rows: str, cols: str) -> Any:
    """Make the rule for a stack's shape: as published, with rows as columns, or as transformers saves it."""

    def sizes(weight: Weight, config: DecoderConfig) -> str:
        is_published = weight.shape[-1] == getattr(config, rows)
        return f"num_experts {cols} {rows}" if is_published else f"num_experts {rows} {cols}"

    return sizes


_STACK = "model.layers.{layer}.mlp.experts."
_BOTH = f"{_STACK}gate_up_proj"


def turned_stacks(where: Where) -> tuple[Rule, ...]:
    """Return the rules of `expert_stacks` for two stacks that may have rows as columns."""
    others = (rule for rule in expert_stacks(where) if _BOTH not in rule.when)
    halves = tuple(
        Output(
            f"blk.{{layer}}.ffn_{part}_exps.weight",
            _BOTH,
            _stored_sizes("gate_up_rows", "hidden_size"),
            _half(rows),
        )
        for part, rows in (("gate", gate_rows), ("up", up_rows))
    )
    down = Output(
        "blk.{layer}.ffn_down_exps.weight",
        f"{_STACK}down_proj",
        _stored_sizes("hidden_size", "moe_intermediate_size"),
        _down,
    )
    return *others, Rule(where, halves, when=(_BOTH,)), Rule(where, (down,), when=(_BOTH,))


_QWEN3VL = decoder(
    "Qwen3VLForConditionalGeneration",
    gguf_name="qwen3vl",
    read_config=_read_qwen3vl,
    rules=dense_decoder(),
    metadata=(*_METADATA, _DEEPSTACK),
    drops=vision_drops,
    notes=_qwen3vl_notes,
    ranks=True,
)

_QWEN3VL_MOE = decoder(
    "Qwen3VLMoeForConditionalGeneration",
    gguf_name="qwen3vlmoe",
    read_config=_read_qwen3vl,
    rules=mixture_decoder(
        (*(rule for rule in expert_stacks(layers) if _BOTH not in rule.when), *turned_stacks(layers))
    ),
    metadata=(*_METADATA, EXPERT_WIDTH, _DEEPSTACK),
    drops=vision_drops,
    notes=_qwen3vl_notes,
)

FAMILIES = (_QWEN2VL, _QWEN3VL, _QWEN3VL_MOE)
