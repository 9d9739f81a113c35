"""Parts of the networks of several families: routing, blocks and experts, and the two ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.rope import RopeConfig
from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.recurrent.mamba2 import MambaConfig
from imatrix.forward.layer import Layer
from imatrix.forward.layers.activations import USUAL, Gated, SiLU, Ungated
from imatrix.forward.layers.attention.delta_net import DeltaNetSizes
from imatrix.forward.layers.attention.mamba2 import Mamba2Sizes
from imatrix.forward.layers.experts import Experts, Groups, Routing, Scoring, load_experts
from imatrix.forward.layers.ffn import BlockNames, FeedForward, load_ffn
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rope
from imatrix.forward.network import EMBEDDINGS, OUTPUT, BuildLayer, Network


def network_of(config: DecoderConfig, rope: Rope, build: BuildLayer, **others: Any) -> Network:
    """Build the network of a model; `others` are those fields of Network that few families need."""
    return Network(
        n_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        output=EMBEDDINGS if config.tie_word_embeddings else OUTPUT,
        norm_eps=config.rms_norm_eps,
        rope=rope,
        build=build,
        trained_context=config.max_position_embeddings,
        n_stored_mtp=config.num_nextn_predict_layers or 0,
        **others,
    )


def routing_of(config: DecoderConfig, groups: Groups | None = None) -> Routing:
    """Read how a model routes tokens; softmax where its configuration names no scoring."""
    return Routing(
        n_used=config.num_experts_per_tok,
        scoring=cast(Scoring, config.scoring_func or "softmax"),
        groups=None if groups is None or groups.count == groups.used else groups,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        weighs_inputs=config.weighs_inputs,
    )


def rope_of(scaling: RopeConfig, n_cols: int, *, halves: bool) -> Rope:
    """Read the rotation of `n_cols` columns, without divisors, which are tensors."""
    magnitude = 1.0 if scaling.attention_factor is None else scaling.attention_factor
    return Rope(n_cols, scaling.theta, scaling.yarn, magnitude, halves, scaling.slowed)


def unstretched(rope: Rope, theta: float) -> Rope:
    """Return a rotation that is not stretched, by another theta.

    YaRN's own factor goes with the stretching; one that a file names stays.
    """
    sharper = 1.0 if rope.yarn is None else replace(rope.yarn, attention_factor=None).rotary_factor
    return replace(rope, theta=theta, yarn=None, slowed=1.0, magnitude=rope.magnitude / sharper)


def delta_net_sizes(config: DeltaNetConfig, *, tiled: bool) -> DeltaNetSizes:
    """Read the sizes of a model's delta nets; `tiled` as in DeltaNetSizes."""
    return DeltaNetSizes(
        hidden=config.hidden_size,
        n_key_heads=config.linear_num_key_heads,
        n_value_heads=config.linear_num_value_heads,
        n_key_cols=config.linear_key_head_dim,
        n_value_cols=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        tiled=tiled,
        eps=config.rms_norm_eps,
    )


def mamba_sizes(config: MambaConfig) -> Mamba2Sizes:
    """Read the sizes of a model's layers of Mamba 2."""
    return Mamba2Sizes(
        hidden=config.hidden_size,
        n_heads=config.mamba_n_heads,
        n_cols=config.mamba_d_head,
        n_groups=config.mamba_n_groups,
        n_state=config.mamba_d_state,
        kernel=config.mamba_d_conv,
        eps=config.rms_norm_eps,
    )


def limited(
    layer: Layer,
    number: int,
    expert_limits: tuple[float, ...] | None,
    block_limits: tuple[float, ...] | None,
) -> Layer:
    """Return a layer whose routed experts and blocks have limits behind SiLU; None for none in any layer."""
    block, experts = layer.block, layer.experts
    if block is not None and block_limits is not None:
        block = replace(block, activation=_limit(block_limits, number))
    if experts is not None and expert_limits is not None:
        experts = replace(experts, activation=_limit(expert_limits, number))
    return replace(layer, block=block, experts=experts)


def _limit(limits: tuple[float, ...], number: int) -> Gated:
    """Return SiLU with the limit of a layer; llama.cpp takes next to nothing for none."""
    limit = limits[number] if number < len(limits) else 0.0
    return SiLU(limit, after=True) if limit > 1e-6 else USUAL


@dataclass(frozen=True)
class FeedForwards:
    """The feed-forward part of all layers: a dense block in the first ones, experts in the others.

    n_dense       leading layers with a dense block; None: all
    moe_step      one in so many of the others has experts, the last of them
    dense_width   of that block
    shared_width  of the shared experts together; 0 for none
    n_experts     routed experts of a layer, each of expert_width
    activation    of blocks and experts
    post_norm_eps  epsilon of the norm of a dense block's output; None for no norm
    fused          whether gate and up of dense blocks are one matrix, which is called up
    ungated        the activation of dense blocks by the number of their layer; None where they have a gate
    """

    hidden: int
    n_dense: int | None
    dense_width: int
    shared_width: int
    n_experts: int
    expert_width: int
    routing: Routing
    moe_step: int = 1
    activation: Gated = USUAL
    post_norm_eps: float | None = None
    fused: bool = False
    ungated: Callable[[int], Ungated] | None = None

    @classmethod
    def of(cls, config: DecoderConfig, n_dense: int | None, groups: Groups | None, **others: Any) -> Self:
        """Read the sizes of a model's blocks and experts; `others` are fields that few families need."""
        return cls(
            hidden=config.hidden_size,
            n_dense=n_dense,
            dense_width=config.intermediate_size,
            shared_width=config.shared_intermediate_size,
            n_experts=config.num_experts,
            expert_width=config.moe_intermediate_size,
            routing=routing_of(config, groups),
            moe_step=config.moe_step,
            **others,
        )

    def load(self, load: Loader, number: int) -> tuple[FeedForward | None, Experts | None]:
        """Read what every token of a layer goes through, and its routed experts; None for what it lacks."""
        is_dense = self.n_dense is None or number < self.n_dense or (number + 1) % self.moe_step > 0
        width = self.dense_width if is_dense else self.shared_width
        names = BlockNames.of(number, "" if is_dense else "_shexp")
        if is_dense and (self.fused or self.ungated is not None):
            names = names.without_gate
        block = None
        if width:
            ungated = self.ungated(number) if self.ungated is not None and is_dense else None
            block = load_ffn(load, names, self.hidden, width, activation=self.activation, ungated=ungated)
        if block is not None and self.post_norm_eps is not None:
            weight = load.float32(f"blk.{number}.post_ffw_norm.weight", self.hidden)
            block = replace(block, post_norm=RMSNorm(weight, self.post_norm_eps))
        if is_dense:
            return block, None
        experts = load_experts(
            load, number, self.routing, self.n_experts, self.hidden, self.expert_width,
            self.activation,
        )  # fmt: skip
        return block, experts
