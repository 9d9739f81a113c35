"""The network of Gemma 4: heads of two sizes, and a dense block, alone or beside routed experts.

In models whose layers add embeddings, or attend to another layer's keys, this stands beside hidden states:

    embeddings, as a second strand | token's id | keys and values of layers with a window | of full layers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from convert.architectures.gemma.gemma4 import Gemma4Config
from convert.architectures.gemma.small import SmallGemmaConfig
from gguf_tools.errors import UnsupportedCheckpoint
from imatrix.forward.families.decoder import with_divisors
from imatrix.forward.families.parts import network_of, rope_of, routing_of, unstretched
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.activations import GatedGELU
from imatrix.forward.layers.attention.shared_keys import (
    HandedKeyAttention,
    HandedKeys,
    HeadSizes,
    load_shared_key_attention,
)
from imatrix.forward.layers.experts import load_experts
from imatrix.forward.layers.ffn import BlockNames, FeedForward, load_ffn
from imatrix.forward.layers.gemma4 import (
    N_STRANDS,
    DenseBesideExperts,
    DenseBlock,
    StrandEntry,
    StrandSum,
    load_layer_embedding,
)
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import PLAIN, RMSNorm, WithSidecar
from imatrix.forward.layers.rope import Rope, Rotation
from imatrix.forward.network import End, LogitRule, Network


def gemma4_network(config: Gemma4Config) -> Network:
    is_small = bool(config.hidden_size_per_layer_input or config.num_kv_shared_layers)
    if is_small and config.num_experts:
        raise UnsupportedCheckpoint("Gemma 4 with experts, and with embeddings or keys of other layers")
    rope = rope_of(config.rope, config.global_head_dim, halves=True)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        parts = _Parts(load, number, config)
        attention = parts.attention(rope, rotate)
        return parts.with_experts(attention) if config.num_experts else parts.dense(attention)

    beside: dict[str, Any] = {"own_scales": ("ffn_down_exps",)}
    if config.num_experts:
        beside |= {"n_strands": N_STRANDS, "end": partial(_load_end, config)}
    elif is_small:
        beside |= {
            "n_strands": 2,
            "n_handed": 1 + sum(_handed(config, sliding).width for sliding in (True, False)),
            "hands_tokens": True,
            "end": partial(_first_strand, config),
        }
    rule = LogitRule(softcap=config.final_logit_softcapping)
    return network_of(config, rope, build, embedding_scale=config.hidden_size**0.5, logits=rule, **beside)


def _handed(config: Gemma4Config, sliding: bool) -> HandedKeys:
    """Return where the keys of a kind of layers stand beside the hidden states."""
    first = HandedKeys(2 * config.hidden_size + 1, config.num_key_value_heads, config.head_dim)
    if sliding:
        return first
    return HandedKeys(first.first + first.width, config.global_kv_heads, config.global_head_dim)


def _load_end(config: Gemma4Config, load: Loader, norm: RMSNorm) -> End:
    together = _Parts(load, config.num_hidden_layers - 1, config).together()
    return lambda states: norm(together(states))


def _first_strand(config: Gemma4Config, load: Loader, norm: RMSNorm) -> End:
    return lambda states: norm(states[:, : config.hidden_size])


def load_handing_attention(
    load: Loader,
    number: int,
    config: SmallGemmaConfig,
    sizes: HeadSizes,
    rotate: Rotation,
    handed: HandedKeys,
) -> Attention:
    """Read the attention of a layer, which may hand its keys on, or attend to those of another layer.

    handed  where the keys of the layer's kind stand in what the attention sees
    """
    name, sliding = f"blk.{number}", number in config.sliding_layers
    has_keys = number < config.n_own_keys
    if not has_keys:
        load.leave(*(f"{name}.{part}.weight" for part in ("attn_k", "attn_v", "attn_k_norm")))
    window = config.sliding_window if sliding else None
    attention = load_shared_key_attention(load, number, sizes, rotate, window, own_keys=has_keys)
    weight = load.float32(f"{name}.post_attention_norm.weight", config.hidden_size)
    attention = replace(attention, post_norm=RMSNorm(weight, config.rms_norm_eps))
    of_kind = [each for each in range(config.n_own_keys) if (each in config.sliding_layers) == sliding]
    if has_keys and (not config.num_kv_shared_layers or number != of_kind[-1]):
        return attention
    return HandedKeyAttention(attention, handed)


@dataclass(frozen=True)
class _Parts:
    """Loads the parts of a layer."""

    load: Loader
    number: int
    config: Gemma4Config

    @property
    def name(self) -> str:
        return f"blk.{self.number}"

    def norm(self, name: str) -> RMSNorm:
        weight = self.load.float32(f"{self.name}.{name}.weight", self.config.hidden_size)
        return RMSNorm(weight, self.config.rms_norm_eps)

    def scale(self) -> torch.Tensor:
        """Return the factor of the hidden states after the layer, float32 (1,)."""
        name = f"{self.name}.layer_output_scale.weight"
        return self.load.float32(name, 1) if self.load.has(name) else torch.ones(1, device=self.load.device)

    def attention(self, rope: Rope, rotate: Rotation) -> Attention:
        config, load, number = self.config, self.load, self.number
        sliding = number in config.sliding_layers
        n_cols = config.head_dim if sliding else config.global_head_dim
        sizes = HeadSizes(
            hidden=config.hidden_size,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads if sliding else config.global_kv_heads,
            head_dim=n_cols,
            rotated=n_cols,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            unit_values=True,
        )
        if sliding:
            local = unstretched(rope, config.sliding_theta or config.rope.theta)
            rotate = replace(local, n_cols=n_cols).rotation(len(rotate.turns), load.device)
        else:
            rotate = with_divisors(load, rope, rotate)
        return load_handing_attention(load, number, config, sizes, rotate, _handed(config, sliding))

    def dense(self, attention: Attention) -> Layer:
        config = self.config
        width = config.intermediate_size
        if self.number >= config.n_own_keys:
            width = config.double_intermediate_size
        norm, added = self.norm("ffn_norm"), None
        if config.hidden_size_per_layer_input:
            table = config.vocab_size, config.all_layers_input
            sizes = config.hidden_size, config.hidden_size_per_layer_input
            added = load_layer_embedding(self.load, self.number, table, *sizes, config.rms_norm_eps)
        rest = DenseBlock(norm, self.block(width, "post_ffw_norm"), added, self.scale())
        sees_all = isinstance(attention, HandedKeyAttention)
        around = PLAIN if sees_all else WithSidecar(config.hidden_size)
        return Layer(self.name, attention, norm, None, None, around, rest)

    def with_experts(self, attention: Attention) -> Layer:
        config, load = self.config, self.load
        hidden = config.hidden_size
        experts = load_experts(
            load, self.number, routing_of(config), config.num_experts, hidden, config.moe_intermediate_size
        )
        factors = f"{self.name}.ffn_down_exps.scale"
        if load.has(factors):
            router = replace(experts.router, factors=load.float32(factors, config.num_experts))
            experts = replace(experts, router=router)
        scale = load.float32(f"{self.name}.ffn_gate_inp.scale", hidden) * hidden**-0.5
        block = self.block(config.intermediate_size, "post_ffw_norm_1")
        before = replace(self, number=self.number - 1)
        return Layer(
            self.name,
            attention,
            self.norm("pre_ffw_norm_2"),
            None,
            replace(experts, activation=GatedGELU("tanh")),
            around_attention=StrandEntry(before.together() if self.number else None),
            around_block=DenseBesideExperts(self.norm("ffn_norm"), block),
            router_norm=RMSNorm(scale, config.rms_norm_eps),
        )

    def together(self) -> StrandSum:
        return StrandSum(self.norm("post_ffw_norm_2"), self.norm("post_ffw_norm"), self.scale())

    def block(self, width: int, post_norm: str) -> FeedForward:
        block = load_ffn(self.load, BlockNames.of(self.number), self.config.hidden_size, width)
        return replace(block, activation=GatedGELU("tanh"), post_norm=self.norm(post_norm))
