"""The vision tower of Qwen3-VL, of Qwen 3.5 and of Qwen4Exp.

A patch is two frames deep, so its kernel becomes two, one for each frame. Some layers of Qwen3-VL send what
they compute to the text model's first layers as well, each through a merger of its own ("deepstack").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rules import once, one
from convert.architectures.rules import Arrange, Output, OutputTensor, Rule
from convert.architectures.vision.config import TowerConfig, part_of, tower_fields
from convert.architectures.vision.tower import (
    LAYER_NORM_EPS,
    USE_GELU,
    VISION,
    layers,
    projector,
    tower,
    with_bias,
)
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from quantize.fill.sources import HeadRows

_FRAMES = 2

_DEFAULTS: Mapping[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": _FRAMES, "num_position_embeddings": 2304,
}  # fmt: skip


@dataclass(frozen=True)
class Qwen3VLConfig(TowerConfig):
    """Configuration of a tower of Qwen3-VL.

    positions        rows of the table of positions
    merge            patches of a side that become one token
    deepstack_layers  those whose output has a merger of its own, in the order of the mergers
    """

    positions: int
    merge: int
    deepstack_layers: tuple[int, ...]

    @property
    def frames(self) -> int:
        return _FRAMES

    @property
    def merged(self) -> int:
        """Columns of the patches that become one token, side by side."""
        return self.hidden_size * self.merge**2


def read_config(raw: Mapping[str, Any], path: str | Path) -> Qwen3VLConfig:
    """Read the configuration of a tower."""
    stated = part_of(raw, "vision_config", path, _DEFAULTS)
    spelled = {"num_hidden_layers": stated.raw["depth"], "num_attention_heads": stated.raw["num_heads"]}
    read = ConfigReader({**stated.raw, **spelled}, path, stated.prefix)
    read.fixed("temporal_patch_size", _FRAMES, "llama.cpp takes two frames at a time")
    positions, patch = read.size("num_position_embeddings", most=2**24), read.size("patch_size", most=2**12)
    fields = tower_fields(raw, read)
    return Qwen3VLConfig(
        # The text model's: the tower's own norms have an epsilon that config.json does not state.
        **{**fields, "layer_norm_eps": ConfigReader(raw, path).number("rms_norm_eps", 1e-6)},
        image_size=read.size("image_size", isqrt(positions * patch**2)),
        positions=positions,
        merge=read.size("spatial_merge_size", most=64),
        deepstack_layers=_deepstack_layers(read, fields["num_hidden_layers"]),
    )


def _deepstack_layers(read: ConfigReader, n_layers: int) -> tuple[int, ...]:
    stated = read.raw.get("deepstack_visual_indexes") or []
    is_list = isinstance(stated, list) and all(type(n) is int and 0 <= n < n_layers for n in stated)
    if not is_list or len(set(stated)) < len(stated):
        raise read.bad("deepstack_visual_indexes", f"different numbers of the {n_layers} layers")
    return tuple(stated)


class _Merger(NamedTuple):
    """A merger of deepstack: its number, and the layer whose output it merges."""

    number: int
    layer: int


def _mergers(config: Qwen3VLConfig, options: Any) -> Iterable[_Merger]:
    return (_Merger(number, layer) for number, layer in enumerate(config.deepstack_layers))


def _frame(number: int) -> Arrange:
    """Return a picker of one frame's kernel, (rows, channels, patch, patch), from one over all frames."""

    def picked(name: str, weights: Sequence[Weight], config: Qwen3VLConfig) -> OutputTensor:
        (weight,) = weights
        rows, channels, frames, *patch = weight.shape
        return HeadRows(
            name, (rows, channels, *patch), weight, frames * patch[0], number * patch[0], patch[0]
        )

    return picked


_KERNEL = "visual.patch_embed.proj.weight", "hidden_size channels frames patch_size patch_size"
_BLOCK, _FROM_BLOCK = "v.blk.{layer}", "visual.blocks.{layer}"
_DEEP, _FROM_DEEP = "v.deepstack.{layer.layer}", "visual.deepstack_merger_list.{layer.number}"

ARCHITECTURE = tower(
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    prefixes=("visual.",),
    read_config=read_config,
    rules=(
        Rule(once, (
            Output("v.patch_embd.weight", *_KERNEL, _frame(0)),
            Output("v.patch_embd.weight.1", *_KERNEL, _frame(1)),
        )),
        one(once, "v.patch_embd.bias", "visual.patch_embed.proj.bias", "hidden_size"),
        one(once, "v.position_embd.weight", "visual.pos_embed.weight", "positions hidden_size"),
        *with_bias(layers, f"{_BLOCK}.attn_qkv", f"{_FROM_BLOCK}.attn.qkv", "qkv_rows", "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.attn_out", f"{_FROM_BLOCK}.attn.proj", "hidden_size", "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.ffn_up", f"{_FROM_BLOCK}.mlp.linear_fc1", "intermediate_size",
                   "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.ffn_down", f"{_FROM_BLOCK}.mlp.linear_fc2", "hidden_size",
                   "intermediate_size"),
        *with_bias(layers, f"{_BLOCK}.ln1", f"{_FROM_BLOCK}.norm1", "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.ln2", f"{_FROM_BLOCK}.norm2", "hidden_size"),
        *with_bias(once, "v.post_ln", "visual.merger.norm", "hidden_size"),
        *with_bias(once, "mm.0", "visual.merger.linear_fc1", "merged", "merged"),
        *with_bias(once, "mm.2", "visual.merger.linear_fc2", "projection_dim", "merged"),
        *with_bias(_mergers, f"{_DEEP}.norm", f"{_FROM_DEEP}.norm", "merged"),
        *with_bias(_mergers, f"{_DEEP}.fc1", f"{_FROM_DEEP}.linear_fc1", "merged", "merged"),
        *with_bias(_mergers, f"{_DEEP}.fc2", f"{_FROM_DEEP}.linear_fc2", "projection_dim", "merged"),
    ),
    metadata=(
        *VISION,
        projector("qwen3vl_merger"),
        USE_GELU,
        Key(keys.CLIP_VISION_SPATIAL_MERGE_SIZE, Value.u32, lambda c, o: c.merge),
        LAYER_NORM_EPS,
        Key(keys.CLIP_VISION_IS_DEEPSTACK_LAYERS, Value.bools, lambda c, o: [
            layer in c.deepstack_layers for layer in layers(c, o)
        ]),
    ),
    canonical_name=lambda name: name.removeprefix("model.") if name.startswith("model.visual.") else name,
)  # fmt: skip
