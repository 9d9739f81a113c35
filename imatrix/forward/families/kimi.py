"""The network of Kimi Linear: KDA or latent attention that rotates nothing, then a dense block or experts."""

from __future__ import annotations

from convert.architectures.kimi.linear import KimiConfig
from imatrix.forward.families.parts import FeedForwards, network_of, rope_of
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.attention.kimi_delta import KimiDeltaSizes, load_kimi_delta
from imatrix.forward.layers.attention.mla import LatentModel, load_latent_attention
from imatrix.forward.layers.experts import Groups
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.network import Network

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norm of latents in Kimi's code, whatever rms_norm_eps is."""


def kimi_linear_network(config: KimiConfig) -> Network:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    net, latent = _delta_sizes(config), _latent_model(config, _LATENT_NORM_EPS)
    groups = Groups(config.n_group or 1, config.topk_group or 1, n_best=2)
    feed_forwards = FeedForwards.of(config, config.first_k_dense_replace, groups)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        attention: Attention
        if number in config.linear_layers:
            attention = load_kimi_delta(load, number, net)
        else:
            attention = load_latent_attention(load, number, latent, None)
        norm = RMSNorm(load.float32(f"blk.{number}.ffn_norm.weight", hidden), eps)
        return Layer(f"blk.{number}", attention, norm, *feed_forwards.load(load, number))

    return network_of(config, rope_of(config.rope, config.rotated_cols, halves=False), build)


def _delta_sizes(config: KimiConfig) -> KimiDeltaSizes:
    return KimiDeltaSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_cols=config.linear_head_dim,
        kernel=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
    )


def _latent_model(config: KimiConfig, latent_eps: float) -> LatentModel:
    return LatentModel(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        kv_lora=config.kv_lora_rank,
        q_lora=config.q_lora_rank,
        scale=config.head_dim**-0.5,
        eps=config.rms_norm_eps,
        latent_eps=latent_eps,
    )
