"""The toy family: all in one module, as a family is that shares little with others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.rules import Arrange, Drop, Output, OutputTensor, Renamed, Rule, Where, renamed
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from quantize.fill.sources import joined, rows_dtype


@dataclass(frozen=True)
class ToyOptions:
    """Choices about a toy model.

    rope_rows  "pairs"   rows of queries and keys that are rotated together become neighbours
               "halves"  they stay half a head apart, as in the checkpoint
    """

    rope_rows: Annotated[Literal["pairs", "halves"], "order of rotated rows (default: pairs)"] = "pairs"


NAME = "ToyForCausalLM"


@dataclass(frozen=True)
class ToyConfig:
    """Sizes of one model; names as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> ToyConfig:
        read = ConfigReader(raw, path)
        read.architecture((NAME,))
        read.fixed("hidden_act", "silu", "a toy has no other activation")
        return cls(
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size("intermediate_size"),
            num_hidden_layers=read.size("num_hidden_layers", most=MAX_LAYERS),
            num_attention_heads=read.size("num_attention_heads"),
            num_key_value_heads=read.size("num_key_value_heads"),
            head_dim=read.size("head_dim"),
            max_position_embeddings=read.size("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        )

    @property
    def q_rows(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class PairedRows(Renamed):
    """A weight whose heads of `head_rows` rows have rows i and i + head_rows / 2 side by side."""

    head_rows: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = [super(PairedRows, self).read_rows(row, row + 1) for row in self._stored(start, stop)]
        return joined(rows, (self.shape[-1],), rows_dtype(self.type))

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        rows = [super(PairedRows, self).raw_rows(row, row + 1) for row in self._stored(start, stop)]
        return joined(rows, (), np.dtype(np.uint8))

    def _stored(self, start: int, stop: int) -> Iterator[int]:
        """Yield the number in the checkpoint of each row from `start` to `stop`."""
        for row in range(start, stop):
            head, within = divmod(row, self.head_rows)
            pair, second = divmod(within, 2)
            yield head * self.head_rows + second * (self.head_rows // 2) + pair


def paired(name: str, weights: Sequence[Weight], config: ToyConfig) -> OutputTensor:
    """Return the one weight with its rotated rows side by side."""
    (weight,) = weights
    return PairedRows(name, weight.shape, weight.type, weight, config.head_dim)


def _once(config: ToyConfig, options: ToyOptions) -> Iterable[int | None]:
    return (None,)


def _layers(config: ToyConfig, options: ToyOptions) -> range:
    return range(config.num_hidden_layers)


def _layers_with(rope_rows: str) -> Where:
    return lambda config, options: _layers(config, options) if options.rope_rows == rope_rows else ()


def _one(where: Where, name: str, source: str, sizes: str, arrange: Arrange = renamed) -> Rule:
    return Rule(where, (Output(name, source, sizes, arrange),))


def _in_layer(where: Where, name: str, source: str, sizes: str, arrange: Arrange = renamed) -> Rule:
    return _one(where, f"blk.{{layer}}.{name}", f"model.layers.{{layer}}.{source}", sizes, arrange)


RULES: tuple[Rule, ...] = (
    _one(_once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
    _one(_once, "output_norm.weight", "model.norm.weight", "hidden_size"),
    _one(_once, "output.weight", "lm_head.weight", "vocab_size hidden_size"),
    _in_layer(_layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size"),
    *(
        _in_layer(_layers_with(rows), f"attn_{part}.weight", f"self_attn.{part}_proj.weight", sizes, arrange)
        for rows, arrange in (("pairs", paired), ("halves", renamed))
        for part, sizes in (("q", "q_rows hidden_size"), ("k", "kv_rows hidden_size"))
    ),
    _in_layer(_layers, "attn_v.weight", "self_attn.v_proj.weight", "kv_rows hidden_size"),
    _in_layer(_layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size q_rows"),
    _in_layer(_layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
    _in_layer(_layers, "ffn_gate.weight", "mlp.gate_proj.weight", "intermediate_size hidden_size"),
    _in_layer(_layers, "ffn_up.weight", "mlp.up_proj.weight", "intermediate_size hidden_size"),
    _in_layer(_layers, "ffn_down.weight", "mlp.down_proj.weight", "hidden_size intermediate_size"),
)


def drops(config: ToyConfig, options: ToyOptions) -> tuple[Drop, ...]:
    return (Drop(lambda name: name.endswith(".rotary_emb.inv_freq"), "computed from rope_theta"),)


METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    Key(keys.CONTEXT_LENGTH, Value.u32, lambda c, o: c.max_position_embeddings),
    Key(keys.EMBEDDING_LENGTH, Value.u32, lambda c, o: c.hidden_size),
    Key(keys.FEED_FORWARD_LENGTH, Value.u32, lambda c, o: c.intermediate_size),
    Key(keys.HEAD_COUNT, Value.u32, lambda c, o: c.num_attention_heads),
    Key(keys.HEAD_COUNT_KV, Value.u32, lambda c, o: c.num_key_value_heads),
    Key(keys.LAYERNORM_RMS_EPS, Value.f32, lambda c, o: c.rms_norm_eps),
    Key(keys.ROPE_DIMENSION_COUNT, Value.u32, lambda c, o: c.head_dim),
)


ARCHITECTURE = Architecture(
    hf_names=(NAME,),
    gguf_name="toy",
    options=ToyOptions,
    read_config=ToyConfig.from_dict,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
)
FAMILIES = (ARCHITECTURE,)
