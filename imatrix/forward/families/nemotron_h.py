"""The network of Nemotron-H and Nemotron 3: each layer is one thing, with one norm before it."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.recurrent.nemotron_h import ATTENTION, EXPERTS, MAMBA, NemotronConfig
from imatrix.forward.families.parts import mamba_sizes, network_of, routing_of
from imatrix.forward.layer import Attention, Layer, NoAttention
from imatrix.forward.layers.activations import squared_relu
from imatrix.forward.layers.attention.mamba2 import load_mamba2
from imatrix.forward.layers.attention.shared_keys import HeadSizes, load_shared_key_attention
from imatrix.forward.layers.experts import Experts, Groups, load_experts
from imatrix.forward.layers.ffn import BlockNames, FeedForward, load_ffn
from imatrix.forward.layers.latent_experts import load_latent_columns
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import UNNORMED, RMSNorm
from imatrix.forward.layers.rope import Rope, Rotation
from imatrix.forward.network import Network


def nemotron_network(config: NemotronConfig) -> Network:
    heads = HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=0,
        eps=config.rms_norm_eps,
    )

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name, kind = f"blk.{number}", config.kinds[number]
        if kind in (MAMBA, ATTENTION):
            is_mamba = kind == MAMBA
            attention: Attention = (
                load_mamba2(load, number, mamba_sizes(config))
                if is_mamba
                else load_shared_key_attention(load, number, heads, None, None)
            )
            end = "ssm_out.weight" if is_mamba else "attn_output.weight"
            return Layer(name, attention, UNNORMED, None, None, attention_end=end)
        norm = RMSNorm(load.float32(f"{name}.attn_norm.weight", config.hidden_size), config.rms_norm_eps)
        return Layer(name, NoAttention(), norm, *_feed_forward(config, load, number))

    rope = Rope(config.head_dim, config.rope.theta)
    return network_of(config, rope, build, builds_mtp=False, latent_cols=config.moe_latent_size or 0)


def _feed_forward(
    config: NemotronConfig, load: Loader, number: int
) -> tuple[FeedForward | None, Experts | None]:
    """Read what every token goes through, and routed experts."""
    has_experts, hidden = config.kinds[number] == EXPERTS, config.hidden_size
    width = config.shared_intermediate_size if has_experts else config.intermediate_size
    names = BlockNames.of(number, "_shexp" if has_experts else "").without_gate
    block = load_ffn(load, names, hidden, width, ungated=squared_relu)
    if not has_experts:
        return block, None
    routing = routing_of(config, Groups(config.n_group or 1, config.topk_group or 1, n_best=2))
    experts = load_experts(load, number, routing, config.num_experts, hidden, config.moe_intermediate_size)
    experts = replace(experts, names=experts.names.without_gate, ungated=squared_relu)
    if config.moe_latent_size:
        latent = load_latent_columns(
            load, number, "latent", hidden, config.moe_latent_size, config.rms_norm_eps
        )
        experts = experts.working_in(latent)
    return block, experts
