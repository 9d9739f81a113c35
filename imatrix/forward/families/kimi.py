"""The networks of Kimi Linear and K3, Ling 3 and GLM-5 Next: KDA or latent attention, a block or experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from convert.architectures.kimi.glm5_next import Glm5NextConfig
from convert.architectures.kimi.k3 import K3Config
from convert.architectures.kimi.linear import KimiConfig
from gguf_tools.errors import UnsupportedCheckpoint
from imatrix.forward.families.parts import FeedForwards, limited, network_of, rope_of
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.activations import SiLU, Situ
from imatrix.forward.layers.attention.kimi_delta import KimiDeltaSizes, load_kimi_delta
from imatrix.forward.layers.attention.mla import LatentAttention, LatentModel, load_latent_attention
from imatrix.forward.layers.attention.pool_indexer import PoolSizes, load_pool_indexer, pool_indexer_names
from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.experts import Groups
from imatrix.forward.layers.hyper_connections import MeanEnd, StrandSizes, load_hyper_connection
from imatrix.forward.layers.latent_experts import load_latent_columns
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import Residual, RMSNorm, WithSidecar
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.layers.scored_states import ScoredStates
from imatrix.forward.network import End, Network

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norm of latents in the original code, whatever rms_norm_eps is."""


def kimi_linear_network(config: KimiConfig) -> Network:
    return _network(config, _latent_model(config), rotates=False)


def ling3_network(config: KimiConfig) -> Network:
    def finish(layer: Layer, number: int, load: Loader) -> Layer:
        return limited(layer, number, config.expert_limits, config.block_limits)

    return _network(config, replace(_latent_model(config), gated=True), rotates=True, finish=finish)


def kimi_k3_network(config: K3Config) -> Network:
    hidden, eps, every = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
    cols = config.routed_expert_hidden_size
    up_beta = config.activation_situ_linear_beta
    situ = Situ(config.activation_situ_beta, up_beta if up_beta > 0 else None)

    def n_kept(number: int) -> int:
        """Return how many earlier states are kept before a layer."""
        return -(-number // every)

    def scored(load: Loader, name: str, number: int, *, keeps: bool = False) -> ScoredStates:
        return ScoredStates(load.float32(f"{name}.weight", hidden), eps, n_kept(number), keeps)

    def finished(layer: Layer, number: int, load: Loader) -> Layer:
        name, attention, block, experts = layer.name, layer.attention, layer.block, layer.experts
        gate = f"{name}.attn_gate.weight"
        if isinstance(attention, LatentAttention) and load.has(gate):
            rows = config.num_attention_heads * config.v_head_dim
            attention = replace(attention, gate=Projection(gate, load.matrix(gate, rows, hidden), None))
        if block is not None:
            block = replace(block, activation=situ)
        if experts is not None:
            experts = replace(experts, activation=situ)
        if experts is not None and cols:
            latent = load_latent_columns(load, number, "routed", hidden, cols, eps)
            experts = experts.working_in(latent)
        layer = replace(layer, attention=attention, block=block, experts=experts)
        if not every:
            return layer
        return replace(
            layer,
            around_attention=scored(load, f"{name}.attn_res_score", number, keeps=number % every == 0),
            around_block=scored(load, f"{name}.ffn_res_score", number + 1),
        )

    def end(load: Loader, norm: RMSNorm) -> End:
        mean = scored(load, "output_res_score", config.num_hidden_layers)
        return lambda states: norm(mean(states))

    kept: dict[str, Any] = {}
    if every:
        kept = {"n_handed": hidden * n_kept(config.num_hidden_layers), "end": end}
    latent = replace(_latent_model(config), latent_eps=eps)
    # The only facts are llama.cpp's, whose norms all have the one epsilon.
    kept |= {"length_eps": eps, "latent_cols": cols or 0}
    return _network(config, latent, rotates=False, finish=finished, **kept)


def glm5_next_network(config: Glm5NextConfig) -> Network:
    index, strands = _pool_sizes(config), _strands(config)
    choosing = _choosing(config)
    n_handed = 0 if all(choosing.values()) else index.n_positions

    def in_strands(layer: Layer, number: int, load: Loader) -> Layer:
        attention, chooses = layer.attention, choosing.get(number)
        if isinstance(attention, LatentAttention) and chooses:
            attention = replace(attention, indexer=load_pool_indexer(load, number, index))
        elif isinstance(attention, LatentAttention):
            load.leave(*pool_indexer_names(number))
        around_attention, around_block = (
            load_hyper_connection(load, f"blk.{number}.hc_{part}", strands) for part in ("attn", "ffn")
        )
        return replace(
            layer,
            attention=attention,
            around_attention=beside(around_attention, shows=chooses is not None),
            around_block=beside(around_block),
        )

    def beside(connection: Residual, *, shows: bool = False) -> Residual:
        return WithSidecar(config.hc_cols, connection, shows) if n_handed else connection

    latent = replace(_latent_model(config), latent_eps=config.rms_norm_eps, n_handed=n_handed)
    return _network(
        config, latent, rotates=False, finish=in_strands, limit=config.swiglu_limit,
        n_chosen=config.index_topk, n_strands=config.hc_mult, n_handed=n_handed,
        end=lambda load, norm: MeanEnd(config.hc_mult, norm), builds_mtp=False,
    )  # fmt: skip


def _choosing(config: Glm5NextConfig) -> dict[int, bool]:
    """Return whether each layer of latent attention has an indexer; raises UnsupportedCheckpoint."""
    types = config.indexer_types or (True,) * config.num_hidden_layers
    found = {layer: chooses for layer, chooses in enumerate(types) if layer not in config.linear_layers}
    if not next(iter(found.values()), True):
        first = f"blk.{next(iter(found))}"
        raise UnsupportedCheckpoint(f"{first}: has no indexer, expected one: no layer before it has chosen")
    return found


def _network(
    config: KimiConfig,
    latent: LatentModel,
    *,
    rotates: bool,
    finish: Callable[[Layer, int, Loader], Layer] = lambda layer, number, load: layer,
    limit: float | None = None,
    length_eps: float = _LATENT_NORM_EPS,
    **others: Any,
) -> Network:
    """Return the network of a model.

    rotates  whether latent attention does
    finish   takes a layer, its number and a loader, and returns it with what the family has besides
    limit    see SiLU
    length_eps  see KimiDeltaSizes
    others   other fields of Network
    """
    hidden, eps = config.hidden_size, config.rms_norm_eps
    net = replace(_delta_sizes(config), length_eps=length_eps)
    groups = Groups(config.n_group or 1, config.topk_group or 1, n_best=2)
    feed_forwards = FeedForwards.of(config, config.first_k_dense_replace, groups, activation=SiLU(limit))

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        attention: Attention
        if number in config.linear_layers:
            attention = load_kimi_delta(load, number, net)
        else:
            attention = load_latent_attention(load, number, latent, rotate if rotates else None)
        norm = RMSNorm(load.float32(f"blk.{number}.ffn_norm.weight", hidden), eps)
        layer = Layer(f"blk.{number}", attention, norm, *feed_forwards.load(load, number))
        return finish(layer, number, load)

    return network_of(config, rope_of(config.rope, config.rotated_cols, halves=False), build, **others)


def _delta_sizes(config: KimiConfig) -> KimiDeltaSizes:
    return KimiDeltaSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_cols=config.linear_head_dim,
        kernel=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
        bound=config.gate_lower_bound,
    )


def _pool_sizes(config: Glm5NextConfig) -> PoolSizes:
    assert config.q_lora_rank is not None, "an indexer sees compressed queries"
    return PoolSizes(
        n_heads=config.index_n_heads,
        n_cols=config.index_head_dim,
        length=config.index_kpool,
        n_chosen=config.index_topk // config.index_kpool,
        hidden=config.hidden_size,
        q_lora=config.q_lora_rank,
    )


def _strands(config: Glm5NextConfig) -> StrandSizes:
    return StrandSizes(
        hidden=config.hidden_size,
        n_strands=config.hc_mult,
        n_rounds=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )


def _latent_model(config: KimiConfig) -> LatentModel:
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
        latent_eps=_LATENT_NORM_EPS,
    )
