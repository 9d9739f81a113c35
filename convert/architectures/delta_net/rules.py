"""Rules of models with gated delta nets, and of the MTP layer, whose names begin with `mtp.`

Norms are stored less one, but for that inside of a delta net.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from convert.architectures.decoder.arrange import plus_one
from convert.architectures.decoder.rules import (
    dense_blocks,
    ends,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    mtp_layers,
    one,
    shared_experts,
)
from convert.architectures.delta_net.arrange import decay
from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Arrange, Drop, Rule, Where, renamed

_LAYER, _MTP_LAYER = "model.layers.{layer}.", "mtp.layers.0."
"""Beginnings of the names of weights in a layer, and in the one MTP layer that llama.cpp runs."""

MTP_PROJECTION = "mtp.fc.weight"
"""Weight that every MTP layer has."""


def linear_layers(config: DeltaNetConfig, options: MTPOptions) -> Iterable[int]:
    """Return the layers that are delta nets."""
    return config.linear_layers


def _full_layers(config: DeltaNetConfig, options: MTPOptions) -> Iterable[int]:
    """Return the layers with attention, of which an MTP layer is one."""
    return (layer for layer in layers(config, options) if layer not in config.linear_layers)


def delta_net(kernels: Arrange, heads: Arrange = renamed, columns: Arrange = renamed) -> tuple[Rule, ...]:
    """Return the rules of a delta net, without those of the matrices that its input goes through.

    kernels  arranges the convolution's rows
    heads    arranges what has a number for each head of values
    columns  arranges the columns of the output matrix
    """
    return (
        in_layer(linear_layers, "ssm_conv1d.weight", "linear_attn.conv1d.weight",
                 "convolved_rows one linear_conv_kernel_dim", kernels),
        in_layer(linear_layers, "ssm_dt.bias", "linear_attn.dt_bias", "linear_num_value_heads", heads),
        in_layer(linear_layers, "ssm_a", "linear_attn.A_log", "linear_num_value_heads", decay(heads)),
        in_layer(linear_layers, "ssm_norm.weight", "linear_attn.norm.weight", "linear_value_head_dim"),
        in_layer(linear_layers, "ssm_out.weight", "linear_attn.out_proj.weight", "hidden_size value_rows",
                 columns),
    )  # fmt: skip


def _gated_attention() -> tuple[Rule, ...]:
    return (
        in_layer(_full_layers, "attn_q.weight", "self_attn.q_proj.weight", "gated_q_rows hidden_size"),
        in_layer(_full_layers, "attn_k.weight", "self_attn.k_proj.weight", "kv_rows hidden_size"),
        in_layer(_full_layers, "attn_v.weight", "self_attn.v_proj.weight", "kv_rows hidden_size"),
        in_layer(_full_layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size q_rows"),
        in_layer(_full_layers, "attn_q_norm.weight", "self_attn.q_norm.weight", "head_dim", plus_one),
        in_layer(_full_layers, "attn_k_norm.weight", "self_attn.k_norm.weight", "head_dim", plus_one),
    )


def _norms_and_feed_forward() -> tuple[Rule, ...]:
    return (
        in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size", plus_one),
        in_layer(layers, "post_attention_norm.weight", "post_attention_layernorm.weight", "hidden_size",
                 plus_one),
        *dense_blocks(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers, "shared_expert"),
        in_layer(moe_layers, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "one hidden_size"),
    )  # fmt: skip


def rules(delta_nets: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a family whose delta nets have these."""
    in_every_layer = (*_gated_attention(), *_norms_and_feed_forward())
    return (
        *ends(plus_one),
        *delta_nets,
        *(rule for each in in_every_layer for rule in _own_and_mtp(each)),
        one(mtp_layers, "blk.{layer}.nextn.eh_proj.weight", MTP_PROJECTION, "hidden_size concat_size"),
        _mtp_norm("enorm", "pre_fc_norm_embedding"),
        _mtp_norm("hnorm", "pre_fc_norm_hidden"),
        _mtp_norm("shared_head_norm", "norm"),
    )


def _mtp_norm(name: str, source: str) -> Rule:
    place = f"blk.{{layer}}.nextn.{name}.weight"
    return one(mtp_layers, place, f"mtp.{source}.weight", "hidden_size", plus_one)


def _own_and_mtp(rule: Rule) -> Iterator[Rule]:
    """Yield the rule for the model's own layers, and for the MTP layer under its other names."""

    def of(is_mtp: bool) -> Where:
        return lambda config, options: (
            layer
            for layer in rule.where(config, options)
            if layer is not None and (layer >= config.num_hidden_layers) == is_mtp
        )

    def moved(name: str) -> str:
        return name.replace(_LAYER, _MTP_LAYER)

    yield replace(rule, where=of(False))
    outputs = tuple(replace(output, source=moved(output.source)) for output in rule.outputs)
    when, unless = tuple(map(moved, rule.when)), tuple(map(moved, rule.unless))
    yield replace(rule, where=of(True), outputs=outputs, when=when, unless=unless)


DROP_MTP = Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer; kept without --no-mtp")
DROP_VISION = Drop(
    lambda name: name.startswith(("model.visual.", "visual.", "vision_tower.")),
    "vision part; the file holds the text part",
)
