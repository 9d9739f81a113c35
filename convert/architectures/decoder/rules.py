"""Rules that many decoders share, as functions of what differs: names, places and arrangements.

A rule applies once, or in some layers. A configuration says how many layers there are (`num_hidden_layers`,
`num_nextn_predict_layers`), which have experts (`num_experts`, `first_k_dense_replace`), and whether the
embeddings are the output matrix (`tie_word_embeddings`). The option `mtp`, where a family has it, says
whether MTP layers are kept.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from convert.architectures.options import MTPOptions
from convert.architectures.rules import Arrange, Drop, HeadRows, Output, Rule, Where, renamed, stacked
from convert.weights.base import Weight
from gguf_tools.errors import BadRequest


def once(config: Any, options: Any) -> Iterable[int | None]:
    return (None,)


def untied(config: Any, options: Any) -> Iterable[int | None]:
    return () if config.tie_word_embeddings else (None,)


def tied(config: Any, options: Any) -> Iterable[int | None]:
    return (None,) if config.tie_word_embeddings else ()


def layers(config: Any, options: Any) -> range:
    """Return the layers that the file has: the model's own, then the MTP layers that are kept."""
    return range(config.num_hidden_layers + n_mtp_layers(config, options))


def n_mtp_layers(config: Any, options: Any) -> int:
    """Return how many MTP layers are kept: all, unless an option of the family leaves them out."""
    return 0 if getattr(options, "mtp", None) is False else config.num_nextn_predict_layers or 0


def mtp_layers(config: Any, options: Any) -> range:
    return layers(config, options)[config.num_hidden_layers :]


def dense_layers(config: Any, options: Any) -> range:
    every = layers(config, options)
    return every[: config.first_k_dense_replace] if config.num_experts else every


def moe_layers(config: Any, options: Any) -> range:
    every = layers(config, options)
    return every[config.first_k_dense_replace :] if config.num_experts else every[:0]


def layers_if(flag: str, where: Where = layers) -> Where:
    """Return where a rule applies that holds only for models whose configuration has `flag`."""
    return lambda config, options: where(config, options) if getattr(config, flag) else ()


def check_mtp(config: Any, options: Any) -> None:
    """Raise BadRequest for an MTP layer that the model doesn't have."""
    if options.mtp and not config.num_nextn_predict_layers:
        raise BadRequest(
            "--mtp: config.json has no num_nextn_predict_layers, so there is no MTP layer to keep"
        )


def keep_mtp_of(
    weight: str, config: Any, options: MTPOptions, names: Container[str] | None
) -> MTPOptions:
    """Keep the MTP layers where the checkpoint has them, unless the user has decided.

    weight  one of theirs
    names   of the checkpoint's weights; None where they aren't known, which leaves it open
    """
    if options.mtp is not None or not config.num_nextn_predict_layers or names is None:
        return options
    return replace(options, mtp=weight in names)


def drop_mtp(config: Any, kept: str) -> Drop:
    """Return the rule that leaves the MTP layers out; `kept` says what would keep them."""
    return Drop(
        lambda name: _layer_of(name) >= config.num_hidden_layers, f"multi-token prediction layer; kept {kept}"
    )


def _layer_of(name: str) -> int:
    """Return the layer that a weight belongs to, -1 for none."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


INV_FREQ = Drop(lambda name: name.endswith(".rotary_emb.inv_freq"), "computed from rope_theta")


def one(where: Where, name: str, source: str, sizes: str, arrange: Arrange = renamed) -> Rule:
    return Rule(where, (Output(name, source, sizes, arrange),))


def in_layer(where: Where, name: str, source: str, sizes: str, arrange: Arrange = renamed) -> Rule:
    return one(where, f"blk.{{layer}}.{name}", f"model.layers.{{layer}}.{source}", sizes, arrange)


def ends(norm: Arrange = renamed, *, needs_output: bool = False) -> tuple[Rule, ...]:
    """Return the rules of what stands before and after the layers; a tied model may have lm_head or not.

    norm          arranges the norm before the output matrix
    needs_output  whether llama.cpp loads no file without an output matrix: a tied model then has its
                  embeddings twice
    """
    output = Output("output.weight", "lm_head.weight", "vocab_size hidden_size")
    again = replace(output, source="model.embed_tokens.weight")
    return (
        one(once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
        one(once, "output_norm.weight", "model.norm.weight", "hidden_size", norm),
        Rule(untied, (output,)),
        Rule(tied, (output,), optional=True),
        *((Rule(tied, (again,), unless="lm_head.weight"),) if needs_output else ()),
    )


def attention(rotated: Arrange = renamed, norm: Arrange = renamed) -> tuple[Rule, ...]:
    """Return the rules of attention with its norm.

    rotated  arranges rows of queries and keys
    norm     arranges norms
    """
    biased, normed = layers_if("attention_bias"), layers_if("qk_norm")
    return (
        in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size", norm),
        in_layer(layers, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size", rotated),
        in_layer(layers, "attn_k.weight", "self_attn.k_proj.weight", "kv_rows hidden_size", rotated),
        in_layer(layers, "attn_v.weight", "self_attn.v_proj.weight", "kv_rows hidden_size"),
        in_layer(layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size q_rows"),
        in_layer(biased, "attn_q.bias", "self_attn.q_proj.bias", "q_rows", rotated),
        in_layer(biased, "attn_k.bias", "self_attn.k_proj.bias", "kv_rows", rotated),
        in_layer(biased, "attn_v.bias", "self_attn.v_proj.bias", "kv_rows"),
        in_layer(layers_if("output_bias"), "attn_output.bias", "self_attn.o_proj.bias", "hidden_size"),
        in_layer(normed, "attn_q_norm.weight", "self_attn.q_norm.weight", "q_norm_cols", norm),
        in_layer(normed, "attn_k_norm.weight", "self_attn.k_norm.weight", "k_norm_cols", norm),
    )


def dense_blocks(bias: str = "") -> tuple[Rule, ...]:
    """Return the rules of the feed-forward blocks of layers without experts.

    bias  attribute of the configuration that says whether they have biases; "" where none has
    """
    rules = []
    for part, rows, cols in (
        ("gate", "intermediate_size", "hidden_size"),
        ("up", "intermediate_size", "hidden_size"),
        ("down", "hidden_size", "intermediate_size"),
    ):
        source = f"mlp.{part}_proj"
        rules.append(in_layer(dense_layers, f"ffn_{part}.weight", f"{source}.weight", f"{rows} {cols}"))
        if bias:
            biased = layers_if(bias, dense_layers)
            rules.append(in_layer(biased, f"ffn_{part}.bias", f"{source}.bias", rows))
    return tuple(rules)


def expert_stacks(where: Where, prefix: str, down: str, gate: str, up: str, order: str) -> Rule:
    """Return the rule that stacks the experts of a layer; its stacks are complete at the same moment.

    prefix          of an expert's names within the layer: "mlp.experts.{expert}"
    down, gate, up  what the family calls the matrices of an expert
    order           of the stacks in the file: "down gate up"
    """
    sizes = {
        "down": "hidden_size moe_intermediate_size",
        "gate": "moe_intermediate_size hidden_size",
        "up": "moe_intermediate_size hidden_size",
    }
    names = {"down": down, "gate": gate, "up": up}
    return Rule(where, tuple(
        Output(
            f"blk.{{layer}}.ffn_{part}_exps.weight",
            f"model.layers.{{layer}}.{prefix}.{names[part]}.weight", sizes[part], stacked,
        )
        for part in order.split()
    ))  # fmt: skip


_STACK = "model.layers.{layer}.mlp.experts"
"""Beginning of the names of stacked experts, as transformers 5 may save them."""


def expert_weights(where: Where) -> tuple[Rule, ...]:
    """Return the rules of experts as Qwen has them, which are stored one by one or in two stacks."""
    one_by_one = expert_stacks(
        where, "mlp.experts.{expert}", "down_proj", "gate_proj", "up_proj", order="down gate up"
    )
    stacked_sizes = "num_experts gate_up_rows hidden_size"
    return (
        replace(one_by_one, unless=f"{_STACK}.gate_up_proj"),
        Rule(where, (
            Output("blk.{layer}.ffn_gate_exps.weight", f"{_STACK}.gate_up_proj", stacked_sizes, gate_rows),
            Output("blk.{layer}.ffn_up_exps.weight", f"{_STACK}.gate_up_proj", stacked_sizes, up_rows),
        ), when=f"{_STACK}.gate_up_proj"),
        Rule(where, (
            Output("blk.{layer}.ffn_down_exps.weight", f"{_STACK}.down_proj",
                   "num_experts hidden_size moe_intermediate_size"),
        ), when=f"{_STACK}.gate_up_proj"),
    )  # fmt: skip


def gate_rows(name: str, weights: Sequence[Weight], config: Any) -> HeadRows:
    """Return the first half of the rows of a matrix, or of every expert's in a stack."""
    (weight,) = weights
    *stack, n_rows, n_cols = weight.shape
    return HeadRows(name, (*stack, n_rows // 2, n_cols), weight, n_rows, 0, n_rows // 2)


def up_rows(name: str, weights: Sequence[Weight], config: Any) -> HeadRows:
    """Return the second half of the rows of a matrix, or of every expert's in a stack."""
    gates = gate_rows(name, weights, config)
    return replace(gates, first=gates.count)


def shared_experts(where: Where, called: str = "shared_experts") -> tuple[Rule, ...]:
    """Return the rules of the experts that every token goes through, which are `called` so."""
    return (
        in_layer(where, "ffn_gate_shexp.weight", f"mlp.{called}.gate_proj.weight",
                 "shared_intermediate_size hidden_size"),
        in_layer(where, "ffn_up_shexp.weight", f"mlp.{called}.up_proj.weight",
                 "shared_intermediate_size hidden_size"),
        in_layer(where, "ffn_down_shexp.weight", f"mlp.{called}.down_proj.weight",
                 "hidden_size shared_intermediate_size"),
    )  # fmt: skip


def mtp() -> tuple[Rule, ...]:
    """Return the rules of what an MTP layer has besides those of any other layer.

    Its embeddings and its output matrix are those of the model, and may be stored again or not (GLM-4.6).
    """
    of_model = (
        in_layer(mtp_layers, "nextn.embed_tokens.weight", "embed_tokens.weight", "vocab_size hidden_size"),
        in_layer(mtp_layers, "nextn.shared_head_head.weight", "shared_head.head.weight",
                 "vocab_size hidden_size"),
    )  # fmt: skip
    return (
        *(replace(rule, optional=True) for rule in of_model),
        in_layer(mtp_layers, "nextn.eh_proj.weight", "eh_proj.weight", "hidden_size concat_size"),
        in_layer(mtp_layers, "nextn.enorm.weight", "enorm.weight", "hidden_size"),
        in_layer(mtp_layers, "nextn.hnorm.weight", "hnorm.weight", "hidden_size"),
        in_layer(mtp_layers, "nextn.shared_head_norm.weight", "shared_head.norm.weight", "hidden_size"),
    )
