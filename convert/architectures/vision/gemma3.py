"""The vision tower of Gemma 3: a SigLIP, whose patches a pool makes fewer before one matrix projects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.decoder.rules import once, one
from convert.architectures.rules import Drop, OutputTensor, plus_one
from convert.architectures.vision.config import TowerConfig, part_of, read_preprocessor, tower_fields
from convert.architectures.vision.tower import (
    LAYER_NORM_EPS,
    USE_GELU,
    VISION,
    layers,
    projector,
    tower,
    with_bias,
)
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F16, F32, GGMLType
from gguf_tools.format.values import Value

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16,
}  # fmt: skip
_USUAL_POOL = 4
"""Patches of a side that become one token where a file says nothing."""


@dataclass(frozen=True)
class Gemma3TowerConfig(TowerConfig):
    """Configuration of the tower of a Gemma 3.

    pool  patches of a side that become one token, rounded down
    """

    pool: int


def read_config(raw: Mapping[str, Any], path: str | Path) -> Gemma3TowerConfig:
    """Read the configuration of a tower."""
    read = part_of(raw, "vision_config", path, _DEFAULTS)
    fields = tower_fields({"hidden_size": 2304, **raw}, read)
    image_size = read.size("image_size", most=2**16)
    preprocessor = read_preprocessor(path)
    tokens_of_a_side = isqrt(preprocessor.size("image_seq_length", 256))
    if fields["patch_size"] > image_size:
        raise read.bad("patch_size", f"at most {image_size}, the image_size")
    return Gemma3TowerConfig(
        **fields, image_size=image_size, pool=image_size // fields["patch_size"] // tokens_of_a_side
    )


def canonical_name(name: str) -> str:
    """Return the name as transformers 5 has it, without the prefix of the whole model."""
    stripped = name.removeprefix("model.")
    if not stripped.startswith(_PREFIXES):
        return name
    return stripped.replace("vision_tower.vision_model.", "vision_tower.", 1)


_PREFIXES = ("vision_tower.", "multi_modal_projector.")


def _forced_type(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return F16 for the projection and F32 for what comes before the layers."""
    if tensor.name == "mm.input_projection.weight":
        return F16
    return F32 if tensor.name.startswith(("v.patch_embd.", "v.position_embd.")) else None


_BLOCK, _FROM_BLOCK = "v.blk.{layer}", "vision_tower.encoder.layers.{layer}"
_SQUARE = "hidden_size", "hidden_size"

ARCHITECTURE = tower(
    "Gemma3ForConditionalGeneration",
    prefixes=_PREFIXES,
    read_config=read_config,
    rules=(
        one(once, "v.patch_embd.weight", "vision_tower.embeddings.patch_embedding.weight",
            "hidden_size channels patch_size patch_size"),
        one(once, "v.patch_embd.bias", "vision_tower.embeddings.patch_embedding.bias", "hidden_size"),
        one(once, "v.position_embd.weight", "vision_tower.embeddings.position_embedding.weight",
            "n_patches hidden_size"),
        *with_bias(layers, f"{_BLOCK}.ln1", f"{_FROM_BLOCK}.layer_norm1", "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.attn_q", f"{_FROM_BLOCK}.self_attn.q_proj", *_SQUARE),
        *with_bias(layers, f"{_BLOCK}.attn_k", f"{_FROM_BLOCK}.self_attn.k_proj", *_SQUARE),
        *with_bias(layers, f"{_BLOCK}.attn_v", f"{_FROM_BLOCK}.self_attn.v_proj", *_SQUARE),
        *with_bias(layers, f"{_BLOCK}.attn_out", f"{_FROM_BLOCK}.self_attn.out_proj", *_SQUARE),
        *with_bias(layers, f"{_BLOCK}.ln2", f"{_FROM_BLOCK}.layer_norm2", "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.ffn_up", f"{_FROM_BLOCK}.mlp.fc1", "intermediate_size", "hidden_size"),
        *with_bias(layers, f"{_BLOCK}.ffn_down", f"{_FROM_BLOCK}.mlp.fc2", "hidden_size",
                   "intermediate_size"),
        *with_bias(once, "v.post_ln", "vision_tower.post_layernorm", "hidden_size"),
        one(once, "mm.soft_emb_norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight", "hidden_size",
            plus_one),
        one(once, "mm.input_projection.weight", "multi_modal_projector.mm_input_projection_weight",
            "hidden_size projection_dim"),
    ),
    metadata=(
        *VISION,
        projector("gemma3"),
        LAYER_NORM_EPS,
        USE_GELU,
        Key(keys.CLIP_VISION_PROJECTOR_SCALE_FACTOR, Value.u32, lambda c, o: (
            c.pool if c.pool not in (0, _USUAL_POOL) else None
        )),
    ),
    canonical_name=canonical_name,
    forced_type=_forced_type,
    left_out=(
        Drop(lambda name: name.startswith("vision_tower.head."), "head of SigLIP, which Gemma does without"),
    ),
)  # fmt: skip
