"""Kimi Linear: three layers of KDA to one of latent attention that rotates nothing, then experts.

KDA is a gated delta net (arXiv 2510.26692) in which each column of a head's keys fades at a rate of its own.
Facts of transformers' modeling_kimi_linear.py and llama.cpp's converter (KimiLinearModel).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    FULL,
    layers_of_kind,
    refuse_one_kind,
    stated_as,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    DENSE_LAYERS,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    EXPERTS,
    GATING,
    ROTATED_COLS,
    SHARED_EXPERTS,
    SIZES,
    USED_EXPERTS,
    VOCAB_SIZE,
)
from convert.architectures.decoder.rules import (
    biased_router,
    dense_blocks,
    ends,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    norm_of_blocks,
    shared_experts,
)
from convert.architectures.deepseek2.config import DeepseekConfig, Defaults, deepseek_fields
from convert.architectures.deepseek2.family import latent_attention, split_heads
from convert.architectures.deepseek2.metadata import read_deepseek_file
from convert.architectures.delta_net.arrange import decay
from convert.architectures.delta_net.config import LINEAR
from convert.architectures.delta_net.family import float32_kernels
from convert.architectures.rules import Arrange, Renamed, Rule, renamed
from convert.tokenizer.files import KIMI, Quirks
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

NAME = "KimiLinearForCausalLM"


@dataclass(frozen=True, kw_only=True)
class KimiConfig(DeepseekConfig):
    """Configuration of a model; names as in transformers' class.

    linear_layers           layers of KDA; the others have latent attention
    linear_head_dim         columns of a head of KDA, of which there are as many as of attention
    linear_conv_kernel_dim  tokens that a convolution sees
    gate_lower_bound        below which no logarithm of a decay falls; None: its rate is a softplus
    """

    linear_layers: tuple[int, ...]
    linear_head_dim: int
    linear_conv_kernel_dim: int
    gate_lower_bound: float | None = None

    @property
    def linear_rows(self) -> int:
        """Rows of a layer's queries, of its keys and of its values in KDA."""
        return self.num_attention_heads * self.linear_head_dim


# ---- config.json

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "max_position_embeddings": ("model_max_length",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "scoring_func": ("moe_router_activation_func", "score_function"),
}
"""Field of DeepSeek -> what families with KDA call it, too, and which counts."""


def with_deepseek_names(raw: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """Return config.json with its fields under DeepSeek's names as well; see `stated_as`."""
    called = {name: stated_as(raw, path, *others, name) for name, others in _OTHER_NAMES.items()}
    return merged(raw, {name: raw[stated] for name, stated in called.items() if raw.get(stated) is not None})


def kimi_fields(read: ConfigReader, defaults: Defaults) -> dict[str, Any]:
    """Return the fields of KimiConfig; `read` has DeepSeek's names."""
    why = "llama.cpp has no other for this architecture"
    read.fixed("mla_use_nope", True, why)
    read.fixed("num_nextn_predict_layers", 0, why)
    read.overruled("use_grouped_topk")  # num_expert_group says it
    architecture = read.raw["architectures"][0]
    fields = deepseek_fields(read, {architecture: defaults})
    if fields["rope"].kind != "default":
        raise read.bad("rope_scaling", "null: attention of this architecture rotates nothing")
    stated = read.raw.get("linear_attn_config") or {}
    if not isinstance(stated, dict):
        raise read.bad("linear_attn_config", "an object")
    net = ConfigReader(stated, read.path, "linear_attn_config.")
    n_layers, full = fields["num_hidden_layers"], net.raw.get("full_attn_layers")
    if full is None:
        full = range(5, n_layers + 1, 4)
    elif not isinstance(full, list) or not all(type(layer) is int for layer in full):
        raise net.bad("full_attn_layers", "a list of layers, counted from 1")
    linear = layers_of_kind(read, n_layers, lambda layer: layer + 1 not in full, LINEAR)
    refuse_one_kind(read, "layer_types", {LINEAR: len(linear), FULL: n_layers - len(linear)})
    net.overruled("kda_layers")  # the others
    check_linear_heads(read, net, fields["num_attention_heads"])
    return fields | {
        "stated_head_dim": read.size_or_null("head_dim", None),
        "linear_layers": linear,
        "linear_head_dim": net.size("head_dim", read.size("linear_head_dim", 128)),
        "linear_conv_kernel_dim": net.size(
            "short_conv_kernel_size", read.size("linear_conv_kernel_dim", 4), least=2
        ),
    }


def check_linear_heads(read: ConfigReader, net: ConfigReader, n_heads: int) -> None:
    """Raise UnsupportedCheckpoint for other heads of KDA than `n_heads`; `net` reads linear_attn_config."""
    is_inside = net.raw.get("num_heads") is not None
    where, key = (net, "num_heads") if is_inside else (read, "linear_num_heads")
    where.fixed(key, n_heads, "llama.cpp has as many heads in all layers")


def read_bound(read: ConfigReader, key: str) -> float | None:
    """Return the bound of the logarithms of decays, a number below 0; None where config.json has none."""
    bound = read.raw.get(key)
    if bound is not None and (type(bound) not in (int, float) or not -1e38 < bound < 0):
        raise read.bad(key, "a number below 0")
    return bound


DEFAULTS = Defaults(groups=(1, 1), dense=1)


def _read(raw: Mapping[str, Any], path: str | Path) -> KimiConfig:
    read = with_defaults(with_deepseek_names(raw, path), path)
    read.fixed("q_lora_rank", None, "llama.cpp's kimi-linear does not compress queries")
    read.fixed("norm_topk_prob", True, "llama.cpp's kimi-linear always normalises weights of experts")
    return KimiConfig(**kimi_fields(read, DEFAULTS))


def read_kimi_file(
    family: Architecture,
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    path: str | Path,
    *,
    rotates: bool = True,
) -> KimiConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_deepseek_file`."""
    latent = read_deepseek_file(family, metadata, shapes, path, by_layer=("head_count_kv",), rotates=rotates)
    hparams = read_hparams(metadata, family.gguf_name, path)
    n_layers = latent.num_hidden_layers + (latent.num_nextn_predict_layers or 0)
    kv_heads = hparams.by_layer("head_count_kv", n_layers)
    return KimiConfig(
        **vars(latent),
        linear_layers=tuple(layer for layer, count in enumerate(kv_heads) if not count),
        linear_head_dim=hparams.size("kda_head_dim"),
        linear_conv_kernel_dim=hparams.size("ssm_conv_kernel"),
        gate_lower_bound=hparams.kda_gate_lower_bound,
    )


# ---- rules


def linear_layers(config: KimiConfig, options: Any) -> tuple[int, ...]:
    return config.linear_layers


def latent_layers(config: KimiConfig, options: Any) -> list[int]:
    return [layer for layer in layers(config, options) if layer not in config.linear_layers]


def _kernel_sizes(weight: Weight, config: Any) -> str:
    """Return the shape of the kernels of a convolution, which may be stored as a matrix."""
    return f"linear_rows {'one ' * (len(weight.shape) - 2)}linear_conv_kernel_dim"


def _kernels(name: str, weights: Any, config: KimiConfig) -> Renamed:
    """Return the kernels of a convolution as llama.cpp's converter stores them, (1, rows, 1, size)."""
    (weight,) = weights
    return Renamed(name, (1, weight.shape[0], 1, weight.shape[-1]), weight.type, weight)


NEGATIVE_DECAY = decay(renamed)


def kimi_delta(decay_sizes: str, decay: Arrange = NEGATIVE_DECAY) -> tuple[Rule, ...]:
    """Return the rules of KDA but for those of its rate and gate.

    decay_sizes  shape of A_log
    decay        arranges it
    """
    parts = [
        in_layer(linear_layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size linear_rows"),
        in_layer(linear_layers, "ssm_beta.weight", "self_attn.b_proj.weight",
                 "num_attention_heads hidden_size"),
        in_layer(linear_layers, "ssm_a", "self_attn.A_log", decay_sizes, decay),
        in_layer(linear_layers, "ssm_dt.bias", "self_attn.dt_bias", "linear_rows"),
        in_layer(linear_layers, "ssm_norm.weight", "self_attn.o_norm.weight", "linear_head_dim"),
    ]  # fmt: skip
    for part in "qkv":
        matrix, kernels = f"self_attn.{part}_proj.weight", f"self_attn.{part}_conv1d.weight"
        parts.append(in_layer(linear_layers, f"attn_{part}.weight", matrix, "linear_rows hidden_size"))
        name = f"ssm_conv1d_{part}.weight"
        parts.append(in_layer(linear_layers, name, kernels, _kernel_sizes, _kernels))
    return tuple(parts)


def in_two(part: str) -> tuple[Rule, ...]:
    """Return the rules of the rate ("f") or the gate ("g") of KDA as two matrices, one behind the other."""
    return (
        in_layer(linear_layers, f"ssm_{part}_a.weight", f"self_attn.{part}_a_proj.weight",
                 "linear_head_dim hidden_size"),
        in_layer(linear_layers, f"ssm_{part}_b.weight", f"self_attn.{part}_b_proj.weight",
                 "linear_rows linear_head_dim"),
    )  # fmt: skip


COMMON_RULES: tuple[Rule, ...] = (
    in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size"),
    *latent_attention(latent_layers),
    *split_heads(latent_layers),
    norm_of_blocks(),
    *dense_blocks(),
    *biased_router(),
    *shared_experts(moe_layers),
)
"""Rules that families with KDA share."""

_RULES: tuple[Rule, ...] = (
    *ends(needs_output=True),
    *COMMON_RULES,
    *kimi_delta("one one num_attention_heads one"),
    *in_two("f"),
    *in_two("g"),
    *expert_stacks(moe_layers, down="w2", gate="w1", up="w3", order="gate down up"),
)


def usual_name(name: str) -> str:
    """Return the name that most families have for a weight of a Kimi Linear."""
    return name.replace(".block_sparse_moe.", ".mlp.")


# ---- keys

_u32, _f32 = Value.u32, Value.f32


def _lengths(value_length: Callable[[Any], int | None], *, first: bool) -> tuple[Key, Key]:
    """Return the keys of columns of keys and values; they stand `first` where config.json has a head_dim."""
    return (
        Key(keys.KEY_LENGTH, _u32, lambda c, o: c.kv_a_rows if c.lengths_first == first else None),
        Key(keys.VALUE_LENGTH, _u32, lambda c, o: value_length(c) if c.lengths_first == first else None),
    )


def kimi_keys(value_length: Callable[[Any], int | None], *others: Key) -> tuple[Key, ...]:
    """Return the keys of a family, up to those of its experts.

    value_length  configuration -> what the key of that name says; None: it is left out
    others        stand behind the columns of a head of KDA, before the bound of its decay
    """
    return (
        Key(keys.BLOCK_COUNT, _u32, lambda c, o: len(layers(c, o))),
        *SIZES,
        Key(keys.HEAD_COUNT_KV, Value.i32s,
            lambda c, o: [int(layer not in c.linear_layers) for layer in layers(c, o)]),
        Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
        Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
        EXPERTS,
        USED_EXPERTS,
        # llama.cpp's converter doesn't know the groups of these models, and takes all experts for one.
        Key(keys.EXPERT_GROUP_COUNT, _u32, lambda c, o: None if c.expert_groups == (1, 1) else c.n_group),
        Key(keys.EXPERT_GROUP_USED_COUNT, _u32, lambda c, o: c.topk_group),
        GATING,
        *_lengths(value_length, first=True),
        VOCAB_SIZE,
        Key(keys.SSM_CONV_KERNEL, _u32, lambda c, o: c.linear_conv_kernel_dim),
        Key(keys.KDA_HEAD_DIM, _u32, lambda c, o: c.linear_head_dim),
        *others,
        Key(keys.KDA_GATE_LOWER_BOUND, _f32, lambda c, o: c.gate_lower_bound),
        Key(keys.Q_LORA_RANK, _u32, lambda c, o: c.q_lora_rank),
        Key(keys.KV_LORA_RANK, _u32, lambda c, o: c.kv_lora_rank),
        ROTATED_COLS,
        *_lengths(value_length, first=False),
        Key(keys.KEY_LENGTH_MLA, _u32, lambda c, o: c.head_dim),
        Key(keys.VALUE_LENGTH_MLA, _u32, lambda c, o: c.v_head_dim),
    )  # fmt: skip


OF_EXPERTS: tuple[Key, ...] = (EXPERT_WIDTH, SHARED_EXPERTS, DENSE_LAYERS, EXPERT_SCALE)
"""The last keys of Kimi Linear and Kimi K3."""

GROUPS: tuple[Key, ...] = (
    Key(keys.EXPERT_GROUP_COUNT, _u32, lambda c, o: c.expert_groups[0]),
    Key(keys.EXPERT_GROUP_USED_COUNT, _u32, lambda c, o: c.expert_groups[1]),
)
"""Groups of experts, of families of which llama.cpp's converter knows them."""


_EPS = 1e-6
"""Epsilon of transformers' norm of latents, and of the lengths of queries and keys in KDA."""


def eps_notes(config: KimiConfig, options: Any) -> tuple[str, ...]:
    if config.rms_norm_eps == _EPS:
        return ()
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: llama.cpp norms latents, and takes lengths of queries and"
        f" keys of KDA, with this one, the original with {_EPS:g}",
    )


def kimi(*hf_names: str, **fields: Any) -> Architecture:
    """Return a family with what those with KDA share; `fields` as `decoder` takes them."""
    shared: dict[str, Any] = {
        "canonical_name": usual_name,
        "forced_type": float32_kernels,
        "reader": read_kimi_file,
        "quirks": Quirks(tiktoken=KIMI),
    }
    return decoder(*hf_names, **shared | fields)


_KIMI_LINEAR = kimi(
    NAME,
    gguf_name="kimi-linear",
    read_config=_read,
    rules=_RULES,
    metadata=(*kimi_keys(lambda c: c.stated_head_dim), *OF_EXPERTS),
    notes=eps_notes,
)

FAMILIES = (_KIMI_LINEAR,)
