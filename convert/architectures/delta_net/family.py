"""Qwen3-Next and Qwen 3.5 with its successors: families, and the rules that they have in common.

Names of the MTP layer's weights begin with `mtp.` Norms are stored less one, but for that inside of a delta
net.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import read_mrope_section
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.rules import (
    INV_FREQ,
    check_mtp,
    dense_blocks,
    ends,
    expert_stacks,
    in_layer,
    keep_mtp_of,
    layers,
    moe_layers,
    mtp_layers,
    n_mtp_layers,
    norm_of_blocks,
    one,
    own_and_mtp,
    shared_experts,
)
from convert.architectures.delta_net.arrange import (
    decay,
    run_of_key_heads,
    squeezed,
    tiled_behind_keys,
    tiled_columns,
    tiled_values,
)
from convert.architectures.delta_net.config import (
    METADATA,
    MROPE_SECTION,
    DeltaNetConfig,
    read_delta_net,
    read_delta_net_file,
)
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Arrange, Drop, Output, OutputTensor, Rule, plus_one, renamed
from gguf_tools.format.ggml_types import F32, GGMLType

_MTP_LAYER = "mtp.layers.0."
"""Beginning of the names of weights in the one MTP layer that llama.cpp runs."""

_MTP_PROJECTION = "mtp.fc.weight"
"""Weight that every MTP layer has."""


def linear_layers(config: DeltaNetConfig, options: MTPOptions) -> Iterable[int]:
    """Return the layers that are delta nets."""
    return config.linear_layers


def full_layers(config: DeltaNetConfig, options: MTPOptions) -> Iterable[int]:
    """Return the layers with attention, of which an MTP layer is one."""
    return (layer for layer in layers(config, options) if layer not in config.linear_layers)


def _delta_net(kernels: Arrange, heads: Arrange = renamed, columns: Arrange = renamed) -> tuple[Rule, ...]:
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


def gated_attention() -> tuple[Rule, ...]:
    return (
        in_layer(full_layers, "attn_q.weight", "self_attn.q_proj.weight", "gated_q_rows hidden_size"),
        in_layer(full_layers, "attn_k.weight", "self_attn.k_proj.weight", "kv_rows hidden_size"),
        in_layer(full_layers, "attn_v.weight", "self_attn.v_proj.weight", "kv_rows hidden_size"),
        in_layer(full_layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size q_rows"),
        in_layer(full_layers, "attn_q_norm.weight", "self_attn.q_norm.weight", "head_dim", plus_one),
        in_layer(full_layers, "attn_k_norm.weight", "self_attn.k_norm.weight", "head_dim", plus_one),
    )


EXPERTS = (
    in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
    *expert_stacks(moe_layers),
    *shared_experts(moe_layers, "shared_expert"),
    in_layer(moe_layers, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "one hidden_size"),
)  # fmt: skip


def _norms_and_feed_forward() -> tuple[Rule, ...]:
    return (
        in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size", plus_one),
        norm_of_blocks("post_attention_norm", plus_one),
        *dense_blocks(),
        *EXPERTS,
    )


def _rules(delta_nets: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a family whose delta nets have these."""
    in_every_layer = (*gated_attention(), *_norms_and_feed_forward())
    return (
        *ends(plus_one),
        *delta_nets,
        *(rule for each in in_every_layer for rule in own_and_mtp(each, _MTP_LAYER)),
        one(mtp_layers, "blk.{layer}.nextn.eh_proj.weight", _MTP_PROJECTION, "hidden_size concat_size"),
        _mtp_norm("enorm", "pre_fc_norm_embedding"),
        _mtp_norm("hnorm", "pre_fc_norm_hidden"),
        _mtp_norm("shared_head_norm", "norm"),
    )


def _mtp_norm(name: str, source: str) -> Rule:
    place = f"blk.{{layer}}.nextn.{name}.weight"
    return one(mtp_layers, place, f"mtp.{source}.weight", "hidden_size", plus_one)


_DROP_MTP = Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer; kept without --no-mtp")
DROP_VISION = Drop(
    lambda name: name.startswith(("model.visual.", "visual.", "vision_tower.")),
    "vision part; the file holds the text part",
)


# ---- families


def _family(
    *hf_names: str,
    gguf_name: str,
    read_config: Callable[[Mapping[str, Any], Path], DeltaNetConfig],
    delta_nets: tuple[Rule, ...],
    **differences: Any,
) -> Architecture:
    """Return a family whose delta nets have the rules `delta_nets`; `differences` as `decoder` takes them."""
    return decoder(
        *hf_names,
        gguf_name=gguf_name,
        read_config=read_config,
        rules=_rules(delta_nets),
        metadata=METADATA,
        reader=read_delta_net_file,
        options=MTPOptions,
        check=check_mtp,
        resolve_options=partial(keep_mtp_of, _MTP_PROJECTION),
        drops=_drops,
        notes=lambda config, options: (*decoder_notes(config), *norm_notes(config)),
        forced_type=float32_kernels,
        **differences,
    )


_EPS = 1e-6
"""Epsilon that transformers adds before a delta net's queries and keys are divided by lengths (l2norm)."""


def norm_notes(config: DeltaNetConfig) -> tuple[str, ...]:
    if config.rms_norm_eps == _EPS:
        return ()
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: llama.cpp adds it to lengths of queries and keys of delta"
        f" nets, too, where the original adds {_EPS:g}",
    )


def _drops(config: DeltaNetConfig, options: MTPOptions) -> tuple[Drop, ...]:
    return INV_FREQ, DROP_VISION, *(() if n_mtp_layers(config, options) else (_DROP_MTP,))


def float32_kernels(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return F32 for the kernels of convolutions, as llama.cpp's converter stores them."""
    return F32 if tensor.name.endswith(_KERNELS) else None


_KERNELS = "shortconv.conv.weight", *(f"ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v"))


# ---- Qwen3-Next: projections stand together, by heads of keys; experts in every layer

_QKVZ = "model.layers.{layer}.linear_attn.in_proj_qkvz.weight"


def read_qwen3_next(raw: Mapping[str, Any], path: str | Path) -> DeltaNetConfig:
    """Return the configuration of a Qwen3-Next."""
    read = ConfigReader(raw, path)
    why = "llama.cpp's qwen3next has experts in every layer, whose weights it normalises"
    read.fixed("decoder_sparse_step", 1, why)
    read.fixed("mlp_only_layers", [], why)
    read.fixed("norm_topk_prob", True, why)
    return read_delta_net(raw, path)


_QWEN3_NEXT = _family(
    "Qwen3NextForCausalLM",
    gguf_name="qwen3next",
    read_config=read_qwen3_next,
    delta_nets=(
        Rule(linear_layers, (
            Output("blk.{layer}.attn_qkv.weight", _QKVZ, "all_rows hidden_size", run_of_key_heads(True)),
            Output("blk.{layer}.attn_gate.weight", _QKVZ, "all_rows hidden_size", run_of_key_heads(False)),
        )),
        in_layer(linear_layers, "ssm_ba.weight", "linear_attn.in_proj_ba.weight", "scalar_rows hidden_size"),
        *_delta_net(squeezed),
    ),
)  # fmt: skip


# ---- Qwen 3.5 and its successors: tiled heads of values; with experts, a shared one has a gate of its own


def read_qwen35(raw: Mapping[str, Any], path: str | Path) -> DeltaNetConfig:
    """Return the configuration of a Qwen 3.5, with experts or without."""
    config = read_delta_net(raw, path)
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    section = read_mrope_section(ConfigReader(raw, path), config.head_dim, MROPE_SECTION)
    return replace(config, mrope_section=section, states_section=rope.get("mrope_section") is not None)


TILED = (
    in_layer(linear_layers, "attn_qkv.weight", "linear_attn.in_proj_qkv.weight",
             "convolved_rows hidden_size", tiled_behind_keys),
    in_layer(linear_layers, "attn_gate.weight", "linear_attn.in_proj_z.weight", "value_rows hidden_size",
             tiled_values),
    in_layer(linear_layers, "ssm_beta.weight", "linear_attn.in_proj_b.weight",
             "linear_num_value_heads hidden_size", tiled_values),
    in_layer(linear_layers, "ssm_alpha.weight", "linear_attn.in_proj_a.weight",
             "linear_num_value_heads hidden_size", tiled_values),
    *_delta_net(tiled_behind_keys, tiled_values, tiled_columns),
)  # fmt: skip


_QWEN35 = _family(
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    gguf_name="qwen35",
    read_config=read_qwen35,
    delta_nets=TILED,
    tiled=True,
)


_QWEN35_MOE = replace(
    _QWEN35,
    hf_names=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    gguf_name="qwen35moe",
)


FAMILIES = (_QWEN3_NEXT, _QWEN35, _QWEN35_MOE)
