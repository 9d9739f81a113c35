"""Networks of DeepSeek V2, V3 and their relatives: latent attention, then a dense block or experts."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.relatives import GLM_DSA
from gguf_tools.errors import UnsupportedCheckpoint
from imatrix.forward.families.parts import FeedForwards, network_of, rope_of
from imatrix.forward.layer import Layer
from imatrix.forward.layers.attention.indexer import IndexerSizes, indexer_names, load_indexer
from imatrix.forward.layers.attention.mla import LatentModel, load_latent_attention
from imatrix.forward.layers.experts import Groups
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import PLAIN, Residual, RMSNorm, WithSidecar
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.network import Network

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed queries and latents in DeepSeek's code, whatever rms_norm_eps is."""


def deepseek2_network(config: DeepseekConfig) -> Network:
    hidden, indexer = config.hidden_size, config.indexer
    n_handed = indexer.n_chosen if indexer is not None and indexer.hands_on else 0
    if indexer is not None and n_handed and not indexer.is_in(0):
        raise UnsupportedCheckpoint("blk.0: has no indexer, expected one: no layer before it has chosen")
    model, index = _latent_model(config, n_handed), _index_sizes(config)
    groups = Groups(*(config.expert_groups or (1, 1)), n_best=2)
    feed_forwards = FeedForwards.of(config, config.first_k_dense_replace, groups)
    eps = config.rms_norm_eps
    around_block: Residual = WithSidecar(hidden) if n_handed else PLAIN

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        # An MTP layer attends to all positions, as in llama.cpp.
        is_mtp = number >= config.num_hidden_layers
        chooses = indexer is not None and not is_mtp and indexer.is_in(number)
        chooser = load_indexer(load, number, index, rotate) if index is not None and chooses else None
        if chooser is None:
            load.leave(*indexer_names(number))
        own = replace(model, n_handed=0) if is_mtp else model
        attention = load_latent_attention(load, number, own, rotate, chooser)
        norm = RMSNorm(load.float32(f"blk.{number}.ffn_norm.weight", hidden), eps)
        block, experts = feed_forwards.load(load, number)
        around_attention = around_block if is_mtp else PLAIN
        return Layer(f"blk.{number}", attention, norm, block, experts, around_attention, around_block)

    n_chosen = None if indexer is None else indexer.n_chosen
    rope = rope_of(config.rope, config.rotated_cols, halves=False)
    return network_of(config, rope, build, n_chosen=n_chosen, n_handed=n_handed)


def _latent_model(config: DeepseekConfig, n_handed: int) -> LatentModel:
    return LatentModel(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        nope=config.qk_nope_head_dim,
        rope=config.rotated_cols,
        value=config.v_head_dim,
        kv_lora=config.kv_lora_rank,
        q_lora=config.q_lora_rank,
        scale=_softmax_scale(config),
        eps=config.rms_norm_eps,
        latent_eps=_LATENT_NORM_EPS,
        n_handed=n_handed,
        sharpness=config.sharpness,
    )


def _index_sizes(config: DeepseekConfig) -> IndexerSizes | None:
    if config.indexer is None or config.q_lora_rank is None:
        return None
    return IndexerSizes(
        n_heads=config.indexer.n_heads,
        n_cols=config.indexer.head_dim,
        rotated=config.rotated_cols,
        # DeepSeek's indexer rotates otherwise than its attention; GLM's rotates alike.
        halves=config.architecture != GLM_DSA,
        n_chosen=config.indexer.n_chosen,
        hidden=config.hidden_size,
        q_lora=config.q_lora_rank,
    )


def _softmax_scale(config: DeepseekConfig) -> float:
    """Compute what scores are multiplied by before the softmax, those of columns that don't rotate, too."""
    scale = config.head_dim**-0.5
    yarn = config.yarn
    if yarn is None:
        return scale
    sharper = yarn.rotary_factor * yarn.sharpness(yarn.mscale_all_dim or 0.0)
    return scale * sharper * sharper
