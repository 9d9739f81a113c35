"""Kimi K3, text part: a Kimi Linear whose layers choose among earlier hidden states.

What it has besides Kimi Linear (facts of llama.cpp's converter, KimiK3Model, and its graph, kimi-k3.cpp):

    attn_res_score ...  rows that score the hidden states of every attn_res_block_size-th layer: the part
                        after them sees their mean by these scores. The checkpoint has a norm's weight and
                        a row, of which only the product counts
    ffn_routed_*        matrices that take hidden states to the columns of routed experts, and back
    attn_gate, ssm_g    gates of latent attention and of KDA, which are both called g_proj
    situ                beta tanh(gate / beta) sigmoid(gate), times as bounded an up, in place of SiLU

Experts in MXFP4 keep their codes, and stand before all other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import with_defaults
from convert.architectures.decoder.metadata import EXPERT_NORM
from convert.architectures.decoder.rules import ends, in_layer, layers_if, moe_layers, one
from convert.architectures.kimi.linear import (
    COMMON_RULES,
    DEFAULTS,
    NAME,
    OF_EXPERTS,
    KimiConfig,
    in_two,
    kimi,
    kimi_delta,
    kimi_fields,
    kimi_keys,
    latent_layers,
    linear_layers,
    read_bound,
    read_kimi_file,
    with_deepseek_names,
)
from convert.architectures.rules import Drop, Output, Renamed, Rule, stacked
from convert.weights.base import Weight
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32, MXFP4
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value


@dataclass(frozen=True, kw_only=True)
class K3Config(KimiConfig):
    """Configuration of a model; names as in config.json.

    routed_expert_hidden_size  columns that routed experts see; None: those of hidden states
    attn_res_block_size        one layer in so many has its hidden states kept; 0: no layer
    """

    routed_expert_hidden_size: int | None
    activation_situ_beta: float
    activation_situ_linear_beta: float
    attn_res_block_size: int

    @property
    def expert_cols(self) -> int:
        """Columns that a routed expert multiplies."""
        return self.routed_expert_hidden_size or self.hidden_size


def _read(raw: Mapping[str, Any], path: str | Path) -> K3Config:
    read = with_defaults(with_deepseek_names(raw, path), path, name=NAME)
    fields = kimi_fields(read, replace(DEFAULTS, activation="situ"))
    stated = read.raw.get("linear_attn_config")
    net = ConfigReader(stated or {}, read.path, "linear_attn_config.")
    return K3Config(
        **fields,
        gate_lower_bound=read_bound(net, "gate_lower_bound"),
        routed_expert_hidden_size=read.size_or_null("routed_expert_hidden_size", None),
        activation_situ_beta=read.number("activation_situ_beta"),
        activation_situ_linear_beta=read.number_or_null("activation_situ_linear_beta") or 0.0,
        attn_res_block_size=read.size("attn_res_block_size", 0, least=0),
    )


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> K3Config:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_kimi_file`."""
    hparams = read_hparams(metadata, family.gguf_name, path)
    beta = hparams.number("situ_beta", 0.0)
    if not beta > 0:
        raise FormatError(f"{path}: {hparams.key('situ_beta')} is {beta}, expected a number above 0")
    return K3Config(
        **vars(read_kimi_file(family, metadata, shapes, path, rotates=False)),
        routed_expert_hidden_size=hparams.size("expert_latent_length", 0) or None,
        activation_situ_beta=beta,
        activation_situ_linear_beta=hparams.number("situ_linear_beta", 0.0),
        attn_res_block_size=hparams.size("attn_res_block_size"),
    )


# ---- rules


@dataclass(frozen=True, eq=False)
class Product(Renamed):
    """The product of two weights of as many numbers, one by one, float32."""

    other: Weight

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        other = self.other.read_rows(start, stop).astype(np.float32, copy=False)
        return super().read_rows(start, stop) * other


def _product(name: str, weights: Sequence[Weight], config: K3Config) -> Product:
    """Return the product of a norm's weight and a row."""
    norm, row = weights
    return Product(name, norm.shape, F32, norm, row)


def _score(where: Any, name: str, source: str) -> Rule:
    both = f"{source}_norm.weight {source}_proj.weight"
    return one(where, f"{name}.weight", both, _score_sizes, _product)


def _score_sizes(weight: Weight, config: Any) -> str:
    """Return the shape of a norm's weight or of a row, which may be stored as a matrix."""
    return f"{'one ' * (len(weight.shape) - 1)}hidden_size"


_EXPERT = "model.layers.{layer}.mlp.experts.{expert}"


def _expert(part: str, source: str, sizes: str) -> Output:
    return Output(f"blk.{{layer}}.ffn_{part}_exps.weight", f"{_EXPERT}.{source}.weight", sizes, stacked)


def _is_packed(weight: Weight) -> bool:
    return weight.type == MXFP4


def _gate(where: Any, name: str, rows: str, *, optional: bool) -> Rule:
    source = "model.layers.{layer}.self_attn.g_proj.weight"
    return Rule(where, (Output(f"blk.{{layer}}.{name}.weight", source, f"{rows} hidden_size"),), optional)


_with_scores = layers_if("attn_res_block_size")
_latent_experts = layers_if("routed_expert_hidden_size", moe_layers)

_RULES: tuple[Rule, ...] = (
    *ends(needs_output=True),
    *COMMON_RULES,
    *kimi_delta("num_attention_heads"),
    *in_two("f"),
    _gate(linear_layers, "ssm_g", "linear_rows", optional=False),
    _gate(latent_layers, "attn_gate", "attention_cols", optional=True),
    _score(_with_scores, "blk.{layer}.attn_res_score", "model.layers.{layer}.self_attention_res"),
    _score(_with_scores, "blk.{layer}.ffn_res_score", "model.layers.{layer}.mlp_res"),
    _score(lambda c, o: (None,) if c.attn_res_block_size else (), "output_res_score",
           "model.output_attn_res"),
    Rule(moe_layers, (
        _expert("gate", "w1", "moe_intermediate_size expert_cols"),
        _expert("down", "w2", "expert_cols moe_intermediate_size"),
        _expert("up", "w3", "moe_intermediate_size expert_cols"),
    ), early=_is_packed),
    in_layer(_latent_experts, "ffn_routed_down.weight", "mlp.routed_expert_down_proj.weight",
             "expert_cols hidden_size"),
    in_layer(_latent_experts, "ffn_routed_up.weight", "mlp.routed_expert_up_proj.weight",
             "hidden_size expert_cols"),
    replace(
        in_layer(_latent_experts, "ffn_routed_norm.weight", "mlp.routed_expert_norm.weight", "expert_cols"),
        optional=True,
    ),
)  # fmt: skip

_u32, _f32 = Value.u32, Value.f32

_KIMI_K3 = kimi(
    "KimiK3ForConditionalGeneration",
    gguf_name="kimi-k3",
    read_config=_read,
    rules=_RULES,
    metadata=(
        *kimi_keys(lambda c: c.kv_lora_rank),
        *OF_EXPERTS,
        EXPERT_NORM,
        Key(keys.EXPERT_LATENT_LENGTH, _u32, lambda c, o: c.routed_expert_hidden_size),
        Key(keys.SITU_BETA, _f32, lambda c, o: c.activation_situ_beta),
        Key(keys.SITU_LINEAR_BETA, _f32, lambda c, o: c.activation_situ_linear_beta),
        Key(keys.ATTN_RES_BLOCK_SIZE, _u32, lambda c, o: c.attn_res_block_size),
    ),
    drops=lambda config, options: (
        Drop(lambda name: name.startswith(("vision_tower.", "mm_projector.")),
             "vision part; the file holds the text part"),
    ),
    kept=frozenset({MXFP4}),
    says_norm=True,
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_KIMI_K3,)
