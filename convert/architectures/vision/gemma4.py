"""The vision tower of Gemma 4, and the audio tower that stands beside it in the small models.

Positions along both axes have a table each. The small models clip what matrices take and give, and every
matrix has four bounds beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.decoder.rules import layers_if, once, one
from convert.architectures.rules import OutputTensor, Rule
from convert.architectures.vision.config import TowerConfig, part_of, tower_fields
from convert.architectures.vision.gemma4_audio import AUDIO_RULES, Gemma4AudioConfig, read_audio_config
from convert.architectures.vision.tower import (
    AUDIO,
    LAYER_NORM_EPS,
    VISION,
    audio_projector,
    clipped,
    layers,
    patch_kernels,
    projector,
    tower,
    usual_type,
)
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32, GGMLType

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16, "position_embedding_size": 10240,
}  # fmt: skip
IMAGE_SIZE = 224
"""Written because a loader asks for it. Images keep the ratio of their sides, and no size is usual."""


@dataclass(frozen=True)
class Gemma4TowerConfig(TowerConfig):
    """Configuration of the tower of a Gemma 4.

    q_rows, kv_rows  rows of queries, and of keys and values
    head_dim         columns of a head
    positions        rows of the table of positions along an axis
    standardizes     whether tokens are shifted and scaled at the end
    audio            the audio tower; None for a model without
    """

    q_rows: int
    kv_rows: int
    head_dim: int
    positions: int
    standardizes: bool
    audio: Gemma4AudioConfig | None

    @property
    def axes(self) -> int:
        return 2

    @property
    def patch_cols(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.patch_size**2


def read_config(raw: Mapping[str, Any], path: str | Path) -> Gemma4TowerConfig:
    """Read the configuration of both towers."""
    read = part_of(raw, "vision_config", path, _DEFAULTS)
    read.fixed("attention_bias", False, "llama.cpp's tower of Gemma 4 has none")
    fields = tower_fields({"hidden_size": 2304, **raw}, read)
    head_dim = read.size("head_dim")
    return Gemma4TowerConfig(
        **fields,
        image_size=IMAGE_SIZE,
        q_rows=fields["num_attention_heads"] * head_dim,
        kv_rows=read.size("num_key_value_heads") * head_dim,
        head_dim=head_dim,
        positions=read.size("position_embedding_size"),
        standardizes=read.flag("standardize", False),
        audio=read_audio_config(raw, path, fields["projection_dim"]),
    )


def _matrices() -> Iterator[Rule]:
    for name, source, sizes in (
        ("attn_q", "self_attn.q_proj", "q_rows hidden_size"),
        ("attn_k", "self_attn.k_proj", "kv_rows hidden_size"),
        ("attn_v", "self_attn.v_proj", "kv_rows hidden_size"),
        ("attn_out", "self_attn.o_proj", "hidden_size q_rows"),
        ("ffn_gate", "mlp.gate_proj", "intermediate_size hidden_size"),
        ("ffn_up", "mlp.up_proj", "intermediate_size hidden_size"),
        ("ffn_down", "mlp.down_proj", "hidden_size intermediate_size"),
    ):
        yield from clipped(layers, f"{_BLOCK}.{name}", f"{_FROM_BLOCK}.{source}", sizes)


def _norms() -> Iterator[Rule]:
    for name, source, size in (
        ("ln1", "input_layernorm", "hidden_size"),
        ("attn_post_norm", "post_attention_layernorm", "hidden_size"),
        ("ln2", "pre_feedforward_layernorm", "hidden_size"),
        ("ffn_post_norm", "post_feedforward_layernorm", "hidden_size"),
        ("attn_q_norm", "self_attn.q_norm", "head_dim"),
        ("attn_k_norm", "self_attn.k_norm", "head_dim"),
    ):
        yield one(layers, f"{_BLOCK}.{name}.weight", f"{_FROM_BLOCK}.{source}.weight", size)


_BLOCK, _FROM_BLOCK = "v.blk.{layer}", "vision_tower.encoder.layers.{layer}"
_standardizes = layers_if("standardizes", once)


def _forced_type(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return F32 for convolutions of the audio tower, besides what all towers have."""
    is_convolution = tensor.name.startswith(_AUDIO_CONVOLUTIONS) or tensor.name.endswith(".conv_dw.weight")
    return F32 if is_convolution else usual_type(tensor, wanted)


_AUDIO_CONVOLUTIONS = ("a.conv1d.", "a.input_projection.")

ARCHITECTURE = tower(
    "Gemma4ForConditionalGeneration",
    prefixes=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
    read_config=read_config,
    rules=(
        one(once, "v.patch_embd.weight", "vision_tower.patch_embedder.input_proj.weight",
            "hidden_size patch_cols", patch_kernels),
        one(once, "v.position_embd.weight", "vision_tower.patch_embedder.position_embedding_table",
            "axes positions hidden_size"),
        *_matrices(),
        *_norms(),
        one(_standardizes, "v.std_bias", "vision_tower.std_bias", "hidden_size"),
        one(_standardizes, "v.std_scale", "vision_tower.std_scale", "hidden_size"),
        one(once, "mm.input_projection.weight", "embed_vision.embedding_projection.weight",
            "projection_dim hidden_size"),
        *AUDIO_RULES,
    ),
    metadata=(
        *VISION,
        *AUDIO,
        projector("gemma4v", keys.CLIP_VISION_PROJECTOR_TYPE),
        LAYER_NORM_EPS,
        *audio_projector("gemma4a"),
    ),
    # A matrix that may clip says so in its name.
    canonical_name=lambda name: name.removeprefix("model.").replace(".linear.weight", ".weight"),
    forced_type=_forced_type,
)  # fmt: skip
