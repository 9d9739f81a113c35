"""Rules that many decoders share, as functions of what differs: names, places and arrangements.

A rule applies once, or in some layers. A configuration says how many layers there are (`num_hidden_layers`,
`num_nextn_predict_layers`), which have experts (`num_experts`, `first_k_dense_replace`), and whether the
embeddings are the output matrix (`tie_word_embeddings`). The option `mtp`, where a family has it, says
whether MTP layers are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.architectures.options import MTPOptions
from convert.architectures.rules import Arrange, Drop, Output, Rule, Sizes, Where, renamed, stacked
from convert.weights.base import Weight
from gguf_tools.errors import BadRequest
from quantize.fill.sources import HeadRows


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


def dense_layers(config: Any, options: Any) -> list[int]:
    experts = moe_layers(config, options)
    return [layer for layer in layers(config, options) if layer not in experts]


def moe_layers(config: Any, options: Any) -> range:
    every = layers(config, options)
    last = config.num_hidden_layers if config.dense_mtp else len(every)
    return every[config.first_k_dense_replace : last] if config.num_experts else every[:0]


def layers_if(flag: str, where: Where = layers) -> Where:
    """Return where a rule applies that holds only for models whose configuration has `flag`."""
    return lambda config, options: where(config, options) if getattr(config, flag) else ()


def check_mtp(config: Any, options: Any) -> None:
    """Raise BadRequest for an MTP layer that the model doesn't have."""
    if options.mtp and not config.num_nextn_predict_layers:
        raise BadRequest(
            "--mtp: config.json has no num_nextn_predict_layers, so there is no MTP layer to keep"
        )


def keep_mtp_of(weight: str, config: Any, options: MTPOptions, names: Container[str] | None) -> MTPOptions:
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


INV_FREQ = Drop(lambda name: name.endswith(".rotary_emb.inv_freq"), "computed from rope_theta")


def mtp_drops(config: Any, options: MTPOptions) -> tuple[Drop, ...]:
    """Return the drops of a family that keeps its MTP layers unless it is told not to."""
    return (INV_FREQ,) if options.mtp is not False else (INV_FREQ, drop_mtp(config, "without --no-mtp"))


def keep_last_mtp(config: Any, options: MTPOptions, names: Container[str] | None) -> MTPOptions:
    """Keep the MTP layers where the checkpoint has that behind the last layer; see `keep_mtp_of`."""
    return keep_mtp_of(f"model.layers.{config.num_hidden_layers}.eh_proj.weight", config, options, names)


def _layer_of(name: str) -> int:
    """Return the layer that a weight belongs to, -1 for none."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def one(where: Where, name: str, source: str, sizes: Sizes, arrange: Arrange = renamed) -> Rule:
    return Rule(where, (Output(name, source, sizes, arrange),))


def in_layer(where: Where, name: str, source: str, sizes: Sizes, arrange: Arrange = renamed) -> Rule:
    return one(where, f"blk.{{layer}}.{name}", f"model.layers.{{layer}}.{source}", sizes, arrange)


NO_OUTPUT = Drop(lambda name: name == "lm_head.weight", "llama.cpp takes the token embeddings")
"""The drop that goes with `ends` without an output matrix."""


def ends(norm: Arrange = renamed, *, needs_output: bool = False, has_output: bool = True) -> tuple[Rule, ...]:
    """Return the rules of what stands before and after the layers; a tied model may have lm_head or not.

    norm          arranges the norm before the output matrix
    needs_output  whether llama.cpp loads no file without an output matrix: a tied model then has its
                  embeddings twice
    has_output    whether llama.cpp loads a file with one; else see NO_OUTPUT
    """
    always = (
        one(once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
        one(once, "output_norm.weight", "model.norm.weight", "hidden_size", norm),
    )
    if not has_output:
        return always
    output = Output("output.weight", "lm_head.weight", "vocab_size hidden_size")
    again = replace(output, source="model.embed_tokens.weight")
    return (
        *always,
        Rule(untied, (output,)),
        Rule(tied, (output,), optional=True),
        *((Rule(tied, (again,), unless=("lm_head.weight",)),) if needs_output else ()),
    )


def attention(
    rotated: Arrange = renamed, norm: Arrange = renamed, *, where: Where = layers
) -> tuple[Rule, ...]:
    """Return the rules of attention with its norm.

    rotated  arranges rows of queries and keys
    norm     arranges norms
    where    the layers with attention; all have its norm, before what they have instead
    """
    biased, normed = layers_if("attention_bias", where), layers_if("qk_norm", where)
    return (
        in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size", norm),
        in_layer(where, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size", rotated),
        in_layer(where, "attn_k.weight", "self_attn.k_proj.weight", "kv_rows hidden_size", rotated),
        in_layer(where, "attn_v.weight", "self_attn.v_proj.weight", "v_rows hidden_size"),
        in_layer(where, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size o_cols"),
        in_layer(biased, "attn_q.bias", "self_attn.q_proj.bias", "q_rows", rotated),
        in_layer(biased, "attn_k.bias", "self_attn.k_proj.bias", "kv_rows", rotated),
        in_layer(biased, "attn_v.bias", "self_attn.v_proj.bias", "v_rows"),
        in_layer(layers_if("output_bias", where), "attn_output.bias", "self_attn.o_proj.bias", "hidden_size"),
        in_layer(normed, "attn_q_norm.weight", "self_attn.q_norm.weight", "q_norm_cols", norm),
        in_layer(normed, "attn_k_norm.weight", "self_attn.k_norm.weight", "k_norm_cols", norm),
    )


def by_window(*rules: Rule) -> Iterator[Rule]:
    """Yield the rules for layers without a window, and for those with one, where these have other heads."""

    def of(sliding: bool, where: Where) -> Where:
        return lambda c, o: (layer for layer in where(c, o) if (layer in c.sliding_layers) == sliding)

    for rule in rules:
        (output,) = rule.outputs
        assert isinstance(output.sizes, str)
        local = re.sub(r"\b(?=\w*(?:_rows|_cols)\b)", "windowed.", output.sizes)
        if local == output.sizes:
            yield rule
            continue
        for sliding, sizes in ((False, output.sizes), (True, local)):
            yield replace(rule, where=of(sliding, rule.where), outputs=(replace(output, sizes=sizes),))


def fused_attention() -> tuple[Rule, ...]:
    """Return the rules of attention without biases whose queries, keys and values are made by one matrix."""
    apart = tuple(f"blk.{{layer}}.attn_{part}." for part in ("q", "k", "v"))
    return (
        *(rule for rule in attention() if not rule.outputs[0].name.startswith(apart)),
        in_layer(layers, "attn_qkv.weight", "self_attn.qkv_proj.weight", "qkv_rows hidden_size"),
    )


def dense_blocks(bias: str = "", *, where: Where = dense_layers) -> tuple[Rule, ...]:
    """Return the rules of the feed-forward blocks of layers without experts.

    bias   attribute of the configuration that says whether they have biases; "" where none has
    where  these layers
    """
    rules = []
    for part, rows, cols in (
        ("gate", "intermediate_size", "hidden_size"),
        ("up", "intermediate_size", "hidden_size"),
        ("down", "hidden_size", "intermediate_size"),
    ):
        source = f"mlp.{part}_proj"
        rules.append(in_layer(where, f"ffn_{part}.weight", f"{source}.weight", f"{rows} {cols}"))
        if bias:
            biased = layers_if(bias, where)
            rules.append(in_layer(biased, f"ffn_{part}.bias", f"{source}.bias", rows))
    return tuple(rules)


def fused_blocks() -> tuple[Rule, ...]:
    """Return the rules of dense blocks whose gate and up are one matrix, which the file calls up."""
    return (
        in_layer(layers, "ffn_up.weight", "mlp.gate_up_proj.weight", "both_rows hidden_size"),
        in_layer(layers, "ffn_down.weight", "mlp.down_proj.weight", "hidden_size intermediate_size"),
    )


def norm_of_blocks(name: str = "ffn_norm", arrange: Arrange = renamed) -> Rule:
    """Return the rule of the norm before feed-forward blocks, which the file has under a `name`."""
    return in_layer(layers, f"{name}.weight", "post_attention_layernorm.weight", "hidden_size", arrange)


def dense_decoder(
    rotated: Arrange = renamed, *, norm: str = "ffn_norm", bias: str = "", needs_output: bool = False
) -> tuple[Rule, ...]:
    """Return all rules of a decoder of attention and dense blocks, each with a norm before it.

    rotated       see `attention`
    norm          see `norm_of_blocks`
    bias          see `dense_blocks`
    needs_output  see `ends`
    """
    return (
        *ends(needs_output=needs_output),
        *attention(rotated),
        norm_of_blocks(norm),
        *dense_blocks(bias),
    )


def normed_behind(*, needs_output: bool = False) -> tuple[Rule, ...]:
    """Return all rules of a decoder whose attention and blocks have a norm behind them, and none before.

    needs_output  see `ends`
    """
    return (
        *ends(needs_output=needs_output),
        *(rule for rule in attention() if "attn_norm" not in rule.outputs[0].name),
        in_layer(layers, "post_attention_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        in_layer(layers, "post_ffw_norm.weight", "post_feedforward_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    )


def mixture_decoder(experts: tuple[Rule, ...], *, needs_output: bool = False) -> tuple[Rule, ...]:
    """Return all rules of a decoder of attention and routed experts, each with a norm before it.

    experts       those of the experts' matrices, such as `expert_stacks`
    needs_output  see `ends`
    """
    return (
        *ends(needs_output=needs_output),
        *attention(),
        norm_of_blocks(),
        in_layer(layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        *experts,
    )


@dataclass(frozen=True)
class MTPLayer:
    """A layer for multi-token prediction, by its number in the file and that among its like."""

    number: int
    index: int


def own_and_mtp(rule: Rule, prefix: str) -> Iterator[Rule]:
    """Yield the rule for the model's own layers, and for MTP layers that a checkpoint counts apart.

    prefix  of the names of their weights, in place of "model.layers.{layer}.": "mtp.layers.{layer.index}."
    """

    def own(config: Any, options: Any) -> Iterator[object]:
        every = rule.where(config, options)
        return (layer for layer in every if not isinstance(layer, int) or layer < config.num_hidden_layers)

    def apart(config: Any, options: Any) -> Iterator[object]:
        n_layers = config.num_hidden_layers
        every = rule.where(config, options)
        return (MTPLayer(n, n - n_layers) for n in every if isinstance(n, int) and n >= n_layers)

    def moved(name: str) -> str:
        return name.replace("model.layers.{layer}.", prefix)

    yield replace(rule, where=own)
    outputs = tuple(
        replace(each, name=each.name.replace("{layer}", "{layer.number}"), source=moved(each.source))
        for each in rule.outputs
    )
    when, unless = tuple(map(moved, rule.when)), tuple(map(moved, rule.unless))
    yield replace(rule, where=apart, outputs=outputs, when=when, unless=unless)


_EXPERTS = "blk.{{layer}}.ffn_{}_exps.weight"
_EXPERT_SIZES = {
    "down": "hidden_size moe_intermediate_size",
    "gate": "moe_intermediate_size hidden_size",
    "up": "moe_intermediate_size hidden_size",
}


def expert_stacks(
    where: Where,
    experts: str = "mlp.experts",
    *,
    down: str = "down_proj",
    gate: str = "gate_proj",
    up: str = "up_proj",
    order: str = "down gate up",
) -> tuple[Rule, ...]:
    """Return the rules of the experts of a layer, which are stored in one of three ways.

    One by one, they become stacks that are complete at the same moment. transformers 5 may save two stacks,
    gate_up_proj and down_proj, and MLX saves three.

    experts         what the family calls them within the layer
    down, gate, up  what it calls the matrices of an expert that stands alone
    order           of the stacks in the file where experts stand alone
    """
    stack = f"model.layers.{{layer}}.{experts}."
    both, apart = f"{stack}gate_up_proj", f"{stack}gate_proj"
    names = {"down": down, "gate": gate, "up": up}
    rows = "num_experts gate_up_rows hidden_size"
    return (
        Rule(where, tuple(
            Output(_EXPERTS.format(part), f"{stack}{{expert}}.{names[part]}.weight", _EXPERT_SIZES[part],
                   stacked)
            for part in order.split()
        ), unless=(both, apart)),
        Rule(where, (
            Output(_EXPERTS.format("gate"), both, rows, gate_rows),
            Output(_EXPERTS.format("up"), both, rows, up_rows),
        ), when=(both,)),
        stack_of("gate", where, stack, apart),
        stack_of("up", where, stack, apart),
        stack_of("down", where, stack, both, apart),
    )  # fmt: skip


def stack_of(part: str, where: Where, stack: str, *when: str) -> Rule:
    """Return the rule of a matrix of all experts of a layer that is stored as one.

    stack  beginning of the names of stacks: "model.layers.{layer}.mlp.experts."
    when   the rule applies where the checkpoint has one of these
    """
    sizes = f"num_experts {_EXPERT_SIZES[part]}"
    return Rule(where, (Output(_EXPERTS.format(part), f"{stack}{part}_proj", sizes),), when=when)


def sparse_moe_experts(where: Where) -> tuple[Rule, ...]:
    """Return the rules of experts as Mixtral has them; a family with these has `sparse_moe_name`."""
    return expert_stacks(
        where, "block_sparse_moe.experts", down="w2", gate="w1", up="w3", order="gate down up"
    )


def respelled(*parts: tuple[str, str]) -> Callable[[str], str]:
    """Return a function that replaces parts of a weight's name, (theirs, usual), one after the other."""

    def usual_name(name: str) -> str:
        for theirs, usual in parts:
            name = name.replace(theirs, usual)
        return name

    return usual_name


_OF_BLOCK = re.compile(r"\.mlp\.(?=experts\.|gate\.|e_score_correction_bias$)")


def sparse_moe_name(name: str) -> str:
    """Return Mixtral's name of a weight of experts, for that of its class in transformers 5."""
    return _OF_BLOCK.sub(".block_sparse_moe.", name)


def gate_rows(name: str, weights: Sequence[Weight], config: Any) -> HeadRows:
    """Return the first half of the rows of a matrix, or of every expert's in a stack."""
    (weight,) = weights
    *stack, n_rows, n_cols = weight.shape
    return HeadRows(name, (*stack, n_rows // 2, n_cols), weight, n_rows, 0, n_rows // 2)


def up_rows(name: str, weights: Sequence[Weight], config: Any) -> HeadRows:
    """Return the second half of the rows of a matrix, or of every expert's in a stack."""
    gates = gate_rows(name, weights, config)
    return replace(gates, first=gates.count)


def biased_router(bias: str = "gate.e_score_correction_bias") -> tuple[Rule, ...]:
    """Return the rules of a router, and of the `bias` in mlp by which experts are chosen and not weighed."""
    return (
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        in_layer(moe_layers, "exp_probs_b.bias", f"mlp.{bias}", "num_experts"),
    )


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
