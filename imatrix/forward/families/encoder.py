"""Networks of encoders: BERT and its relatives, in which every token sees all others, or those around it.

A norm behind a block stands at the beginning of the next layer, and behind the last layer at the end of the
network.
"""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.encoders.files import EncoderFile
from imatrix.forward.families.parts import network_of, rope_of, routing_of, unstretched
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.activations import GELU, USUAL, GatedGELU
from imatrix.forward.layers.attention.shared_keys import HeadSizes, load_shared_key_attention
from imatrix.forward.layers.experts import Experts, load_experts
from imatrix.forward.layers.ffn import BlockNames, FeedForward, load_ffn
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import PLAIN, UNNORMED, CentredNorm, Normed, Residual
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.network import OUTPUT_NORM, Network

_CLASSIFIER = ("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias")
"""Tensors that rank a text by its vector, which is judged without them."""


def encoder_network(config: EncoderFile) -> Network:
    """Build the network of an encoder."""
    rope = rope_of(config.rope, config.rotated_cols, halves=True)
    local = unstretched(rope, config.sliding_theta or rope.theta)
    last = f"blk.{config.num_hidden_layers - 1}.layer_output_norm.weight"

    def attention_of(load: Loader, number: int, rotate: Rotation | None) -> Attention:
        is_local = number in config.sliding_layers
        if is_local and rotate is not None:
            rotate = local.rotation(len(rotate.turns), load.device)
        sizes = _head_sizes(config, fused=load.has(f"blk.{number}.attn_qkv.weight"))
        window = config.sliding_window if is_local else None
        attention = load_shared_key_attention(load, number, sizes, rotate, window)
        name = f"blk.{number}.attn_norm.weight"
        return replace(attention, norm=_norm(load, name, config)) if load.has(name) else attention

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name, is_post = f"blk.{number}", config.post_normed
        norm = UNNORMED if is_post else _norm(load, f"{name}.ffn_norm.weight", config)
        behind = Normed(_norm(load, f"{name}.attn_output_norm.weight", config)) if is_post else PLAIN
        attention = attention_of(load, number, None if config.has_positions else rotate)
        has_experts = config.moe_every and number % config.moe_every == 1
        block = None if has_experts else _block(load, number, config)
        experts = _experts(load, number, config) if has_experts else None
        return Layer(name, attention, norm, block, experts, _start(load, number, config), behind)

    def end(load: Loader, norm: object) -> CentredNorm:
        load.leave(*_CLASSIFIER)
        return _norm(load, last if config.post_normed else OUTPUT_NORM, config)

    return network_of(
        config,
        rope,
        build,
        end=end,
        output_norm=last if config.post_normed else OUTPUT_NORM,
        encodes=True,
        n_positions=config.max_position_embeddings if config.has_positions else None,
    )


def _norm(load: Loader, name: str, config: EncoderFile) -> CentredNorm:
    bias = name.replace(".weight", ".bias")
    return CentredNorm(
        load.float32(name, config.hidden_size),
        config.rms_norm_eps,
        load.float32(bias, config.hidden_size) if load.has(bias) else None,
    )


def _start(load: Loader, number: int, config: EncoderFile) -> Residual:
    """Read what hidden states go through before a layer: the first adds positions and the type of a text."""
    if number:
        name = f"blk.{number - 1}.layer_output_norm.weight"
        return Normed(_norm(load, name, config)) if config.post_normed else PLAIN
    positions, types, added = "position_embd.weight", "token_types.weight", None
    if load.has(types):
        # One row is a vector in quantized files, and a rehearsal has vectors on another device.
        added = load.float32(types, *load.tensor(types).shape).view(-1, config.hidden_size)[:1]
    if config.has_positions:
        rows = load.float32(positions, config.max_position_embeddings, config.hidden_size)
        added = rows if added is None else rows + added.to(rows.device)
    return Normed(_norm(load, "token_embd_norm.weight", config), added)


def _head_sizes(config: EncoderFile, *, fused: bool) -> HeadSizes:
    return HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=config.rotated_cols,
        eps=config.rms_norm_eps,
        normed=False,
        fused=fused,
        causal=False,
    )


def _block(load: Loader, number: int, config: EncoderFile) -> FeedForward:
    """Read the block of a layer. A gate may stand in the rows of `up`, or not be there."""
    hidden, width = config.hidden_size, config.intermediate_size
    names = BlockNames.of(number)
    is_gated = load.has(names.gate) or load.tensor(names.up).shape[0] != width
    if not load.has(names.gate):
        names = names.without_gate
    activation = USUAL if config.has_silu else GatedGELU("none")
    ungated = None if is_gated else GELU("none")
    return load_ffn(load, names, hidden, width, activation=activation, ungated=ungated)


def _experts(load: Loader, number: int, config: EncoderFile) -> Experts:
    """Read the experts of a layer, which have no gate."""
    experts = load_experts(
        load, number, routing_of(config), config.num_experts, config.hidden_size, config.intermediate_size
    )
    return replace(experts, names=experts.names.without_gate, ungated=GELU("none"))
