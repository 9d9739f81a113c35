"""The tensors of a toy model: all renamed, and the rotated rows of queries and keys in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from convert.architectures.arrange import OutputTensor, Renamed
from convert.architectures.rules import Arrange, Drop, Output, Rule, Where, renamed
from convert.weights.base import Weight
from quantize.fill.heads import joined
from quantize.fill.sources import rows_dtype
from tests.end_to_end.toy_family.config import ToyConfig
from tests.end_to_end.toy_family.options import Options


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


def _once(config: ToyConfig, options: Options) -> Iterable[int | None]:
    return (None,)


def _layers(config: ToyConfig, options: Options) -> range:
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


def drops(config: ToyConfig, options: Options) -> tuple[Drop, ...]:
    return (Drop(lambda name: name.endswith(".rotary_emb.inv_freq"), "computed from rope_theta"),)
