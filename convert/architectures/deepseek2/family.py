"""The DeepSeek family: its tensors and all other parts, what to know before running a model, its relatives.

The tensors of V2 and V3 are renamed but for two things:

    kv_b_proj  (heads * (nope + v), kv_lora): per head its key rows, then its value rows. Multi-head latent
               attention multiplies queries with the key half transposed (attn_k_b: per head
               kv_lora x nope) and the attended latent with the value half (attn_v_b: per head
               v x kv_lora).
    experts    one matrix per expert in the checkpoint, one stack per layer in the file

The layouts of attention, tensors as (mats, rows, cols):

    split  attn_k_b (heads, kv_lora, nope), attn_v_b (heads, v, kv_lora)
    both   attn_kv_b (heads*(nope+v), kv_lora), attn_k_b (heads*kv_lora, nope), attn_v_b (heads*v, kv_lora).
           ik_llama.cpp reads it, llama.cpp does not.
    none   attn_kv_b. Both programs read it, as plain attention.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture
from convert.architectures.decoder.family import yarn_notes
from convert.architectures.decoder.rules import (
    INV_FREQ,
    check_mtp,
    dense_blocks,
    drop_mtp,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    mtp,
    norm_of_blocks,
    once,
    one,
    shared_experts,
    untied,
)
from convert.architectures.deepseek2.config import DEFAULTS, V2, V3, DeepseekConfig, Defaults
from convert.architectures.deepseek2.metadata import GGUF_NAME, METADATA, read_deepseek_file
from convert.architectures.options import LatentOptions
from convert.architectures.rules import Arrange, Drop, Output, OutputTensor, Rule, Where, renamed
from convert.tokenizer.files import KIMI, Quirks
from convert.weights.base import Weight
from quantize.fill.sources import HeadRows, TransposedHeads

# ---- what becomes of kv_b_proj


def _keys(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> TransposedHeads:
    """Return attn_k_b: every head's key rows, transposed; (n_heads, kv_lora_rank, qk_nope_head_dim)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim)
    return TransposedHeads(name, shape, weight, head_rows, 0, config.qk_nope_head_dim)


def _values(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> HeadRows:
    """Return attn_v_b: every head's value rows; (n_heads, v_head_dim, kv_lora_rank)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.v_head_dim, config.kv_lora_rank)
    return HeadRows(name, shape, weight, head_rows, config.qk_nope_head_dim, config.v_head_dim)


def _flat(arrange: Callable[..., HeadRows | TransposedHeads]) -> Arrange:
    """Arrange the same rows as one matrix: head h has rows h*n_rows to (h+1)*n_rows."""

    def flat(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
        tensor = arrange(name, weights, config)
        n_mats, n_rows, n_cols = tensor.shape
        return replace(tensor, shape=(n_mats * n_rows, n_cols))

    return flat


# ---- the rules


def _with_layout(mla: str) -> Where:
    return lambda config, options: layers(config, options) if options.mla == mla else ()


def _queries(where: Where, *, compressed: bool) -> Where:
    return lambda c, o: where(c, o) if (c.q_lora_rank is not None) == compressed else ()


def _biased(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    """Return the layers where a bias takes part in the choice of experts."""
    return moe_layers(config, options) if config.topk_method == "noaux_tc" else ()


_ATTENTION = "model.layers.{layer}.self_attn."
_MLX_KEYS, _MLX_VALUES = f"{_ATTENTION}embed_q.weight", f"{_ATTENTION}unembed_out.weight"
"""Tensors that MLX makes of kv_b_proj: the two of the layout split, ready made."""


def _kv_b(where: Where, *parts: tuple[str, Any], unless: tuple[str, ...] = ()) -> Rule:
    return Rule(where, tuple(
        Output(f"blk.{{layer}}.{name}", f"{_ATTENTION}kv_b_proj.weight", "kv_b_rows kv_lora_rank", arrange)
        for name, arrange in parts
    ), unless=unless)  # fmt: skip


def split_heads(where: Where) -> tuple[Rule, ...]:
    """Return the rules of keys and values in the layout split, in the layers of `where`."""
    return (
        _kv_b(where, ("attn_k_b.weight", _keys), ("attn_v_b.weight", _values), unless=(_MLX_KEYS,)),
        Rule(where, (
            Output("blk.{layer}.attn_k_b.weight", _MLX_KEYS,
                   "num_attention_heads kv_lora_rank qk_nope_head_dim"),
            Output("blk.{layer}.attn_v_b.weight", _MLX_VALUES, "num_attention_heads v_head_dim kv_lora_rank"),
        ), when=(_MLX_KEYS,)),
    )  # fmt: skip


def latent_attention(where: Where) -> tuple[Rule, ...]:
    """Return the rules of latent attention that all layouts share, in the layers of `where`."""
    compressed, uncompressed = _queries(where, compressed=True), _queries(where, compressed=False)
    return (
        in_layer(uncompressed, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size"),
        in_layer(compressed, "attn_q_a.weight", "self_attn.q_a_proj.weight", "q_lora_rank hidden_size"),
        in_layer(compressed, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "q_lora_rank"),
        in_layer(compressed, "attn_q_b.weight", "self_attn.q_b_proj.weight", "q_rows q_lora_rank"),
        in_layer(where, "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight",
                 "kv_a_rows hidden_size"),
        in_layer(where, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
        in_layer(where, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size attention_cols"),
    )  # fmt: skip


RULES: tuple[Rule, ...] = (
    one(once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
    one(once, "output_norm.weight", "model.norm.weight", "hidden_size"),
    one(untied, "output.weight", "lm_head.weight", "vocab_size hidden_size"),

    in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size"),
    *latent_attention(layers),
    *split_heads(_with_layout("split")),
    _kv_b(_with_layout("both"), ("attn_kv_b.weight", renamed), ("attn_k_b.weight", _flat(_keys)),
          ("attn_v_b.weight", _flat(_values))),
    _kv_b(_with_layout("none"), ("attn_kv_b.weight", renamed)),

    norm_of_blocks(),
    *dense_blocks(),

    in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "n_routed_experts hidden_size"),
    in_layer(_biased, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias",
              "n_routed_experts"),
    *expert_stacks(moe_layers),
    *shared_experts(moe_layers),
    *mtp(),
)  # fmt: skip


def drops(config: DeepseekConfig, options: LatentOptions) -> tuple[Drop, ...]:
    """Return the weights that this model's checkpoint may hold and the file does not need."""
    left_out = [INV_FREQ]
    if config.tie_word_embeddings:
        left_out.append(
            Drop(lambda name: name == "lm_head.weight", "tied: the token embedding is the output layer")
        )
    if not options.mtp:
        left_out.append(drop_mtp(config, "with --mtp"))
    return tuple(left_out)


def notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    """Return a note for each way in which llama.cpp won't load this model or computes something else."""
    lite = _lite_note(config)
    return (*((lite,) if lite else ()), *common_notes(config, options))


def common_notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    """Return the notes that later families share, whose depth says nothing of their queries."""
    ramp = () if config.yarn is None else yarn_notes(config.yarn)
    return tuple(note for note in (
        _group_note(config), _norm_note(config), _yarn_note(config), *ramp, _eps_note(config),
    ) if note)  # fmt: skip


def _lite_note(config: DeepseekConfig) -> str | None:
    # llama.cpp knows "lite" models by their depth (load_arch_hparams of deepseek2), whatever the file says.
    n_layers = config.num_hidden_layers
    lite = n_layers in (26, 27) or (n_layers == 48 and config.vocab_size == 128256)
    if config.q_lora_rank is None and not lite:
        return (
            "llama.cpp loads a model without q_lora_rank only when it has 26 or 27 layers; this one has"
            f" {n_layers}"
        )
    if config.q_lora_rank is not None and lite:
        return (
            f"llama.cpp takes a model of {n_layers} layers for one without q_lora_rank and will not load this"
            " one, which has it"
        )
    return None


def _group_note(config: DeepseekConfig) -> str | None:
    if config.topk_method != "group_limited_greedy" or config.expert_groups in (None, (1, 1)):
        return None
    return (
        f"{config.n_group} groups of experts: llama.cpp scores a group by its two best experts, this model by"
        " the best one, so llama.cpp may choose other experts"
    )


def _norm_note(config: DeepseekConfig) -> str | None:
    if config.norm_requested == config.norm_topk_prob:
        return None
    return f"norm_topk_prob is true but {config.architecture} does not normalise expert weights; not written"


def _yarn_note(config: DeepseekConfig) -> str | None:
    # The deepseek2 graph scales the softmax by mscale_all_dim and rotated parts by 1, which fits mscale ==
    # mscale_all_dim and no explicit attention_factor.
    yarn = config.yarn
    if yarn is None or (yarn.mscale_all_dim and abs(yarn.rotary_factor - 1.0) < 1e-6):
        return None
    return (
        f"YaRN with mscale {yarn.mscale}, mscale_all_dim {yarn.mscale_all_dim}, attention_factor"
        f" {yarn.attention_factor}: llama.cpp takes mscale for equal to mscale_all_dim and will compute other"
        " attention scores"
    )


def _eps_note(config: DeepseekConfig) -> str | None:
    if config.rms_norm_eps == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: the original norms its compressed queries and keys with"
        " 1e-06, llama.cpp with this one"
    )


def resolve_options(
    config: DeepseekConfig, options: LatentOptions, names: Container[str] | None, *, keeps_mtp: bool = False
) -> LatentOptions:
    """Return `options` with mtp decided: by the user, else by family, if the checkpoint has the layer.

    names      of the checkpoint's weights; None where they aren't known, which counts as having them
    keeps_mtp  whether llama.cpp's converter keeps the layer
    """
    if options.mtp is not None or not config.num_nextn_predict_layers:
        return options
    norm = f"model.layers.{config.num_hidden_layers}.input_layernorm.weight"
    there = names is None or norm in names
    return replace(options, mtp=there and keeps_mtp)


ARCHITECTURE = Architecture(
    hf_names=(V2, V3),
    gguf_name=GGUF_NAME,
    options=LatentOptions,
    read_config=DeepseekConfig.from_dict,
    n_experts=lambda config: config.num_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=notes,
    check=check_mtp,
    resolve_options=resolve_options,
    # GigaChat3 alone of these cuts text as GPT-2 does; Kimi K2 and Moonlight have tiktoken.model.
    quirks=Quirks(pre_tokenizers={"gpt-2": "gigachat"}, tiktoken=KIMI),
    reader=read_deepseek_file,
    says_norm=True,
)
FAMILIES = (ARCHITECTURE,)


def relative(
    *hf_names: str,
    defaults: Defaults | None = None,
    read: Callable[..., DeepseekConfig] = DeepseekConfig.from_dict,
    keeps_mtp: bool = False,
    is_vision: Callable[[str], bool] | None = None,
    **differences: Any,
) -> Architecture:
    """Return a family that is DeepSeek's but for what is named here.

    defaults     what holds where its config.json says nothing; None: as for V3
    read         reads config.json, as DeepseekConfig.from_dict does
    keeps_mtp    whether llama.cpp's converter keeps its MTP layers
    is_vision    name of a weight -> whether it is of a part that a file of the text part does not have
    differences  other fields of Architecture
    """
    defaults_of = dict.fromkeys(hf_names, defaults or DEFAULTS[V3])

    def read_config(raw: Mapping[str, Any], path: Path) -> DeepseekConfig:
        return read(raw, path, defaults_of)

    def drops_with_vision(config: DeepseekConfig, options: LatentOptions) -> tuple[Drop, ...]:
        assert is_vision is not None
        return (*drops(config, options), Drop(is_vision, "vision part; the file holds the text part"))

    return replace(
        ARCHITECTURE,
        hf_names=hf_names,
        read_config=read_config,
        resolve_options=partial(resolve_options, keeps_mtp=keeps_mtp),
        drops=drops if is_vision is None else drops_with_vision,
        **differences,
    )
