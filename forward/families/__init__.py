"""Model families: how the layers of each are put together from attention, blocks, experts and norms.

A family is a row of FAMILIES: the name that GGUF files give it, what reads its configuration from a file's
metadata, and what makes a `Network` of that configuration. A folder has the configuration itself, which may
say more than metadata can. All that follows sees the network alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.deepseek32 import V32, IndexedConfig, metadata_reader
from convert.architectures.deepseek2.glm_moe_dsa import GLM_DSA
from convert.architectures.deepseek2.mistral_large3 import MistralConfig, read_metadata
from forward.families.decoder import DECODERS
from forward.families.deepseek4 import DEEPSEEK4
from forward.layer import Layer
from forward.layers.attention.indexer import Indexer, IndexerSizes, load_indexer
from forward.layers.attention.mla import LatentSizes, load_latent_attention
from forward.layers.experts import Groups, Routing, load_experts
from forward.layers.ffn import BlockNames, load_ffn
from forward.layers.load import Loader
from forward.layers.norm import RMSNorm
from forward.layers.residual import PLAIN, Apart, Residual
from forward.layers.rope import Rope, Rotation
from forward.network import EMBEDDINGS as EMBEDDINGS
from forward.network import OUTPUT as OUTPUT
from forward.network import OUTPUT_NORM as OUTPUT_NORM
from forward.network import Family as Family
from forward.network import Network as Network
from gguf_tools.errors import UnsupportedCheckpoint


def find_family(path: Path, name: object) -> Family:
    """Return the family that GGUF files call `name`; UnsupportedCheckpoint if it can't be computed."""
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = " or ".join(map(repr, FAMILIES))
        raise UnsupportedCheckpoint(f"{path}: general.architecture is {name!r}, expected {known}")
    return family


# ---- DeepSeek V2 and V3

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed queries and latents in DeepSeek's code, whatever rms_norm_eps is."""


def _deepseek2(config: DeepseekConfig) -> Network:
    """Return the network of a DeepSeek model: latent attention, then a dense block or experts."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    sizes = LatentSizes(
        hidden=hidden,
        n_heads=config.num_attention_heads,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        kv_lora=config.kv_lora_rank,
        q_lora=config.q_lora_rank,
    )
    scale, routing = _softmax_scale(config), _routing(config)
    index = _index_sizes(config) if isinstance(config, IndexedConfig) else None
    n_handed = config.index_topk if isinstance(config, IndexedConfig) and config.hands_on else 0
    around_block: Residual = Apart(hidden) if n_handed else PLAIN
    if isinstance(config, IndexedConfig) and n_handed and not config.has_indexer(0):
        raise UnsupportedCheckpoint("blk.0: has no indexer, expected one: no layer before it has chosen")

    def load_index(load: Loader, number: int, rotate: Rotation) -> Indexer | None:
        if index is None or not (isinstance(config, IndexedConfig) and config.has_indexer(number)):
            return None
        q_lora = config.q_lora_rank or 0
        return load_indexer(load, number, index, rotate, hidden=hidden, q_lora=q_lora)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name, is_dense = f"blk.{number}", number < config.first_k_dense_replace
        indexer = load_index(load, number, rotate)
        attention = load_latent_attention(
            load, number, sizes, rotate, scale=scale, eps=eps, latent_eps=_LATENT_NORM_EPS, indexer=indexer,
            n_handed=n_handed, sharpness=_sharpness(config, rotate),
        )  # fmt: skip
        norm = RMSNorm(load.float32(f"{name}.ffn_norm.weight", hidden), eps)
        width = config.intermediate_size if is_dense else config.shared_intermediate_size
        names = BlockNames.of(number, "" if is_dense else "_shexp")
        block = load_ffn(load, names, hidden, width) if width else None
        if is_dense:
            return Layer(name, attention, norm, block, None, around_block=around_block)
        n_experts, expert_width = config.n_routed_experts, config.moe_intermediate_size
        experts = load_experts(load, number, routing, n_experts, hidden, expert_width)
        return Layer(name, attention, norm, block, experts, around_block=around_block)

    return Network(
        n_layers=config.num_hidden_layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        output=EMBEDDINGS if config.tie_word_embeddings else OUTPUT,
        norm_eps=eps,
        rope=_rope(config),
        build=build,
        n_chosen=None if index is None else index.n_chosen,
        n_handed=n_handed,
    )


def _index_sizes(config: IndexedConfig) -> IndexerSizes:
    return IndexerSizes(
        n_heads=config.index_n_heads,
        n_cols=config.index_head_dim,
        rotated=config.qk_rope_head_dim,
        # DeepSeek's indexer rotates otherwise than its attention; GLM's rotates alike.
        halves=config.architecture != GLM_DSA,
        n_chosen=config.index_topk,
    )


def _routing(config: DeepseekConfig) -> Routing:
    n_groups, n_used = config.expert_groups or (1, 1)
    # V2 scores a group by its best expert, V3 by its two best.
    n_best = 2 if config.topk_method == "noaux_tc" else 1
    return Routing(
        n_used=config.num_experts_per_tok,
        scoring="softmax" if config.scoring_func == "softmax" else "sigmoid",
        groups=None if n_groups == n_used else Groups(n_groups, n_used, n_best),
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def _rope(config: DeepseekConfig) -> Rope:
    yarn, n_cols = config.yarn, config.qk_rope_head_dim
    if yarn is None:
        return Rope(n_cols, config.rope_theta)
    return Rope(n_cols, config.rope_theta, yarn, yarn.rotary_factor)


def _sharpness(config: DeepseekConfig, rotate: Rotation) -> torch.Tensor | None:
    """Return what the scores of each position are multiplied by; None for a model that doesn't do so."""
    if not isinstance(config, MistralConfig) or config.temperature_scale is None:
        return None
    length = config.temperature_length or config.max_position_embeddings
    whole = torch.arange(len(rotate.turns), device=rotate.turns.device) // length
    return 1 + config.temperature_scale * torch.log1p(whole.float())


def _softmax_scale(config: DeepseekConfig) -> float:
    """Return what scores are multiplied by before the softmax."""
    scale = config.qk_head_dim**-0.5
    yarn = config.yarn
    if yarn is None or not yarn.mscale_all_dim:
        return scale
    sharper = yarn.sharpness(yarn.mscale_all_dim)
    return scale * sharper * sharper


_NO_LAYOUT = {"mla": "none", "mtp": False}
"""Options of the converter for a folder that is computed: no layout of latent attention, no MTP layers."""

FAMILIES: Mapping[str, Family] = {
    "deepseek2": Family(read_metadata, _deepseek2, _NO_LAYOUT),
    "deepseek32": Family(metadata_reader("deepseek32", V32), _deepseek2, _NO_LAYOUT),
    "glm-dsa": Family(metadata_reader("glm-dsa", GLM_DSA), _deepseek2, _NO_LAYOUT),
    "deepseek4": DEEPSEEK4,
    **DECODERS,
}
"""Families that can be computed, by the name that general.architecture gives them."""
