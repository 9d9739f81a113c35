"""DecoderConfig: what config.json says of an ordinary decoder, checked and complete.

Where config.json lacks a value that transformers has a default for, a family gives that default, so that the
file says what the model computes. A missing size without a default is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, known_fields, merged
from convert.architectures.decoder.rope import RopeConfig, read_rope
from gguf_tools.errors import UnsupportedCheckpoint

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Spellings of the number of routed experts."""


@dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a model; names as in config.json, or as most families have them.

    head_dim               columns of a head
    stated_head_dim        the same where transformers' configuration has it, None where it has not
    v_head_dim             columns of a head's values; None: head_dim
    attention_bias         whether queries, keys and values have biases
    qk_norm                whether queries and keys are normed before they are rotated
    norms_all_heads        whether such a norm takes all heads together, not one at a time
    rotated_cols           columns of a head that are rotated, the first ones
    sliding_window         positions that a layer of `sliding_layers` sees; None where all see everything
    sliding_chunks         whether positions are in chunks of so many, and the token's own chunk is seen
    sliding_theta          base of their rotation, which is not stretched; None where it is the model's
    sliding_heads          heads of queries in these layers; None: as many as in others
    sliding_kv_heads       heads of keys and values there; None: as many as in others
    sliding_cols           columns of a head that are rotated there; None: as many as in others
    unrotated_layers       layers that rotate nothing
    mrope_section          pairs of columns that time, height and width rotate; None for plain RoPE
    attention_scale        what scores are multiplied by; None: one over the root of head_dim
    unit_qk                whether queries and keys that have been rotated are normed, without a weight
    sharpness              s and n: the scores of the token at position p are multiplied by
                           1 + s ln(1 + floor(p / n)), in layers that rotate nothing where there are any. None
                           for nothing
    sharpness_offset       what is added to p in this
    embedding_scale        what embeddings are multiplied by; None for nothing
    residual_scale         what attention and block are multiplied by before they are added; None for nothing
    attention_value_scale  what attention alone is multiplied by before it is added; None for nothing
    logit_scale            what logits are divided by; None for nothing
    attention_softcapping  the size that scores can't reach; None for no bound
    final_logit_softcapping  the same of logits
    centred_norms          whether norms take the mean of a row from it: LayerNorm, not RMSNorm
    norms_embeddings       whether embeddings are normed, without a weight
    post_norm_eps          epsilon of norms behind attention and block; None for rms_norm_eps
    sigmoid_gates          whether gates that are a matrix of their own have a sigmoid, not softplus
    is_parallel            whether block and experts see what the attention sees
    block_scale            what experts, shared ones with them, are multiplied by before they are added; None
                           for nothing
    xielu                  alpha_n, alpha_p, beta and eps of each layer whose blocks have no gate but this
                           activation, with alphas before their softplus; () where none has
    expert_limits          what SiLU(gate) of each layer's routed experts may reach, and up from both sides; 0
                           for no limit. None: there is none in any layer
    block_limits           the same of dense blocks and of shared experts
    num_experts            routed experts of a layer with experts; 0 for a dense model
    moe_intermediate_size  width of a routed expert
    num_shared_experts     experts that every token goes through, stored as one; None where nothing is said
    shared_expert_intermediate_size  their width together; 0: as many times that of a routed one
    first_k_dense_replace  dense layers before those with experts
    scoring_func           of the router: "softmax", "sigmoid"; None where nothing is said
    moe_step               one layer in so many has experts, the last of them
    weighs_inputs          whether the inputs of experts are multiplied by their weights, not the outputs
    norm_topk_prob         whether the weights of a token's experts are made to add up to one
    num_nextn_predict_layers  layers for multi-token prediction; None where nothing is said
    dense_mtp              whether these have dense blocks behind layers with experts
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    stated_head_dim: int | None
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    rotated_cols: int
    tie_word_embeddings: bool
    v_head_dim: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_chunks: bool = False
    sliding_theta: float | None = None
    sliding_heads: int | None = None
    sliding_kv_heads: int | None = None
    sliding_cols: int | None = None
    unrotated_layers: tuple[int, ...] = ()
    mrope_section: tuple[int, ...] | None = None
    attention_scale: float | None = None
    unit_qk: bool = False
    sharpness: tuple[float, int] | None = None
    sharpness_offset: int = 0
    embedding_scale: float | None = None
    residual_scale: float | None = None
    attention_value_scale: float | None = None
    logit_scale: float | None = None
    attention_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    centred_norms: bool = False
    norms_embeddings: bool = False
    post_norm_eps: float | None = None
    sigmoid_gates: bool = False
    is_parallel: bool = False
    block_scale: float | None = None
    xielu: tuple[tuple[float, ...], ...] = ()
    expert_limits: tuple[float, ...] | None = None
    block_limits: tuple[float, ...] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int | None = None
    shared_expert_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    scoring_func: str | None = None
    moe_step: int = 1
    weighs_inputs: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int | None = None
    dense_mtp: bool = False

    @property
    def q_rows(self) -> int:
        """Rows of q_proj: every head's query."""
        return self.num_attention_heads * self.head_dim

    @property
    def heads_in_windows(self) -> int:
        """Heads of queries in layers with a window."""
        return self.sliding_heads or self.num_attention_heads

    @property
    def windowed(self) -> Self:
        """The configuration with the heads of layers with a window."""
        kv_heads = self.sliding_kv_heads or self.num_key_value_heads
        return replace(self, num_attention_heads=self.heads_in_windows, num_key_value_heads=kv_heads)

    @property
    def kv_rows(self) -> int:
        """Rows of k_proj: the keys of every head that has its own."""
        return self.num_key_value_heads * self.head_dim

    @property
    def value_cols(self) -> int:
        """Columns of a head's values."""
        return self.v_head_dim or self.head_dim

    @property
    def v_rows(self) -> int:
        """Rows of v_proj: the values of every head that has its own."""
        return self.num_key_value_heads * self.value_cols

    @property
    def o_cols(self) -> int:
        """Columns of o_proj: what every head makes of values."""
        return self.num_attention_heads * self.value_cols

    @property
    def qkv_rows(self) -> int:
        """Rows of queries, keys and values together."""
        return self.q_rows + self.kv_rows + self.v_rows

    @property
    def q_norm_cols(self) -> int:
        """Columns that a norm of queries takes together: those of a head, or of all heads."""
        return self.q_rows if self.norms_all_heads else self.head_dim

    @property
    def k_norm_cols(self) -> int:
        """Columns that a norm of keys takes together."""
        return self.kv_rows if self.norms_all_heads else self.head_dim

    @property
    def gate_up_rows(self) -> int:
        """Rows of an expert's gate and up stored as one."""
        return 2 * self.moe_intermediate_size

    @property
    def both_rows(self) -> int:
        """Rows of a dense block's gate and up stored as one: those of gate, then those of up."""
        return 2 * self.intermediate_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are stored as one."""
        by_count = (self.num_shared_experts or 0) * self.moe_intermediate_size
        return self.shared_expert_intermediate_size or by_count

    @property
    def one(self) -> int:
        """The length of a dimension that some weights have besides theirs."""
        return 1

    @property
    def concat_size(self) -> int:
        """Columns of an MTP layer's eh_proj: an embedding beside a hidden state."""
        return 2 * self.hidden_size


def decoder_fields(
    read: ConfigReader, *, theta: float = 10000.0, eps: str = "rms_norm_eps"
) -> dict[str, Any]:
    """Return the fields of DecoderConfig that every decoder has, from config.json with a family's defaults.

    theta   rope_theta where config.json has none
    eps     what config.json calls the epsilon of norms
    raises  BadConfig naming file and key for a missing or impossible value,
            UnsupportedCheckpoint for what the files of these families have no place for
    """
    read.fixed("hidden_act", "silu", "llama.cpp has no other activation for this architecture")
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    stated = read.size_or_null("head_dim", None)
    if stated is None and hidden % heads:
        raise read.bad("num_attention_heads", f"a divisor of hidden_size ({hidden}), or a head_dim")
    kv_heads = read.size_or_null("num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise read.bad("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = stated or hidden // heads
    context = read.size("max_position_embeddings")
    rope = read_rope(read, context, theta)
    if head_dim % 2:
        raise read.bad("head_dim", "an even number: columns are rotated in pairs")
    return {
        "architecture": read.raw["architectures"][0],
        "vocab_size": read.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.size("intermediate_size", least=0),
        "num_hidden_layers": read.size("num_hidden_layers", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "stated_head_dim": stated,
        "max_position_embeddings": context,
        "rms_norm_eps": read.number(eps, 1e-6),
        "rope": rope,
        "rotated_cols": head_dim if rope.partial is None else int(head_dim * rope.partial),
        "tie_word_embeddings": read.flag("tie_word_embeddings", False),
    }


def fix_head_dim(read: ConfigReader, fields: Mapping[str, Any], architecture: str) -> None:
    """Raise UnsupportedCheckpoint for heads of another size than hidden_size divided by their number."""
    cols = fields["hidden_size"] // fields["num_attention_heads"]
    read.fixed("head_dim", cols, f"llama.cpp's {architecture} divides hidden_size by num_attention_heads")


def stated_as(raw: Mapping[str, Any], path: str | Path, *names: str) -> str:
    """Return the first of a field's names that config.json has a value for; the first where it has none.

    raises  UnsupportedCheckpoint where another of them has another value
    """
    first, *others = [name for name in names if raw.get(name) is not None] or names[:1]
    for other in others:
        ConfigReader(raw, path).fixed(other, raw[first], f"{first} says so")
    return first


def expert_fields(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of DecoderConfig about routed experts."""
    stated = [key for key in _EXPERT_COUNTS if read.raw.get(key) is not None]
    n_experts = read.size(stated[0] if stated else _EXPERT_COUNTS[0], most=MAX_EXPERTS)
    for other in stated[1:]:
        read.fixed(other, n_experts, f"{stated[0]} says so")
    return {
        "num_experts": n_experts,
        "num_experts_per_tok": read.size("num_experts_per_tok", most=n_experts),
    }


def group_fields(read: ConfigReader) -> dict[str, Any]:
    """Return n_group and topk_group, both 1 where all groups may be chosen: llama.cpp takes less than all."""
    groups, used = read.size("n_group"), read.size("topk_group")
    return {"n_group": 1, "topk_group": 1} if used == groups else {"n_group": groups, "topk_group": used}


def read_limits(read: ConfigReader, key: str) -> tuple[float, ...] | None:
    """Return a limit for each layer, 0 for none; None where config.json has no such key."""
    limits = read.raw.get(key)
    if limits is None:
        return None
    if not isinstance(limits, list) or not all(
        limit is None or (type(limit) in (int, float) and 0 <= limit < 1e38) for limit in limits
    ):
        raise read.bad(key, "a list of numbers, zero or more, or null for layers without a limit")
    return tuple(float(limit or 0) for limit in limits)


def leading_dense_layers(read: ConfigReader, n_layers: int, default: int) -> int:
    """Return how many leading layers are dense; mlp_layer_types counts where both spellings are there."""
    kinds = read.raw.get("mlp_layer_types")
    if kinds is None:
        return read.size("first_k_dense_replace", default, least=0)
    read.overruled("first_k_dense_replace")
    n_dense = kinds.count("dense") if isinstance(kinds, list) else 0
    total = f"num_hidden_layers ({n_layers}) in all"
    if kinds != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
        raise read.bad("mlp_layer_types", f"'dense' for the first layers, then 'sparse', {total}")
    return n_dense


def read_mrope_section(read: ConfigReader, head_dim: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pairs of columns that time, height and width rotate; `default` where nothing says so."""
    rope = read.raw.get("rope_scaling") or read.raw.get("rope_parameters") or {}
    section = rope.get("mrope_section") or list(default)
    if (
        not isinstance(section, list)
        or not 0 < len(section) <= 4
        or any(n not in range(2**15) for n in section)
    ):
        raise ConfigReader(rope, read.path, "rope_parameters.").bad(
            "mrope_section", "up to four whole numbers"
        )
    if sum(section) > head_dim:
        raise read.bad("head_dim", f"{sum(section)} at least, the sum of mrope_section")
    return tuple(section)


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Fields that config.json states in any case: a model of another size than was meant helps nobody."""


def with_defaults(
    raw: Mapping[str, Any], path: str | Path, *, states_sizes: bool = True, name: str = ""
) -> ConfigReader:
    """Return a reader of config.json in which transformers' defaults stand for the keys that it lacks.

    states_sizes  whether all of its sizes have to be there all the same, or vocab_size alone
    name          the architecture whose defaults they are; "": the one that config.json names
    """
    known = known_fields(name or raw["architectures"][0])
    needed = _SIZES if states_sizes else _SIZES[:1]
    # Looked at without being recorded as read: a dense family doesn't use them.
    stated = {key for key, value in raw.items() if value is not None}
    left_out = _EXPERT_COUNTS if stated & {*_EXPERT_COUNTS} else ()
    defaults = {key: value for key, value in known.items() if key not in (*needed, *left_out)}
    no_blocks = {} if not known or "intermediate_size" in known else {"intermediate_size": 0}
    return ConfigReader(merged({**no_blocks, **defaults}, raw), path)


FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of layer_types."""


def layers_of_kind(
    read: ConfigReader, n_layers: int, default: Callable[[int], bool], wanted: str = SLIDING
) -> tuple[int, ...]:
    """Return the layers that are not FULL but `wanted`, by layer_types; without that, as `default` says."""
    kinds = read.raw.get("layer_types")
    if kinds is None:
        return tuple(layer for layer in range(min(n_layers, MAX_LAYERS)) if default(layer))
    if not isinstance(kinds, list) or len(kinds) != n_layers or not set(map(str, kinds)) <= {wanted, FULL}:
        raise read.bad("layer_types", f"{wanted!r} or {FULL!r} for each of the {n_layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == wanted)


def counts_of_kinds(
    by_layer: Any, sliding: tuple[int, ...], n_layers: int, path: str | Path, what: str = "heads"
) -> tuple[int, int]:
    """Return a count of layers without a window, and that of layers with one, by a count for each layer.

    by_layer  the counts; `what` says of what
    raises    UnsupportedCheckpoint where layers of a kind differ
    """
    if not isinstance(by_layer, list | tuple) or len(by_layer) != n_layers:
        raise UnsupportedCheckpoint(f"{path}: {what} of {n_layers} layers, expected a number for each")
    kinds = {kind: {by_layer[n] for n in range(n_layers) if (n in sliding) == kind} for kind in (True, False)}
    for kind, found in kinds.items():
        if len(found) > 1:
            which = "with" if kind else "without"
            raise UnsupportedCheckpoint(
                f"{path}: layers {which} a window have {min(found)} to {max(found)} {what}, expected one"
                " number"
            )
    full, local = (next(iter(kinds[kind] or kinds[not kind])) for kind in (False, True))
    return full, local


def refuse_one_kind(read: ConfigReader, key: str, counts: Mapping[str, int]) -> None:
    """Raise UnsupportedCheckpoint for a hybrid without layers of one kind: llama.cpp ends at an assertion.

    key     of config.json, which has the kinds of layers
    counts  kind -> number of its layers
    """
    for kind, count in counts.items():
        if not count:
            raise UnsupportedCheckpoint(
                f"{read.path}: {key} has no layer of {kind}, expected layers of {' and of '.join(counts)}:"
                " llama.cpp's memory for such models needs both"
            )


def refuse_no_window(read: ConfigReader, sliding: tuple[int, ...]) -> None:
    """Raise BadConfig for a model without a layer of `sliding`: llama.cpp ends at an assertion."""
    if not sliding:
        raise read.bad("layer_types", "a layer with a window: llama.cpp's memory for these models needs one")


def refuse_factor(rope: RopeConfig, path: str | Path, name: str) -> None:
    """Raise UnsupportedCheckpoint for a factor of YaRN that layers with a window would get, too.

    name  what llama.cpp calls the architecture
    """
    yarn = rope.yarn
    if yarn is not None and yarn.remaining_factor is not None:
        raise UnsupportedCheckpoint(
            f"{path}: YaRN with attention_factor, or mscale, {yarn.rotary_factor:g}, expected"
            f" {yarn.sharpness(1.0):g}: llama.cpp's {name} would multiply layers with a window by it, too"
        )


def stated_rotations(raw: Mapping[str, Any], path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotations in rope_parameters: of layers without a window, and with one; {} for none.

    raises  BadConfig unless it has an object for at least one of the two kinds, or is empty
    """
    stated = raw.get("rope_parameters") or {}
    kinds = {FULL, SLIDING} & {*stated} if isinstance(stated, dict) else ()
    if (stated and not kinds) or not all(isinstance(stated[kind] or {}, dict) for kind in kinds):
        wanted = f"an object for {FULL} and one for {SLIDING}"
        raise ConfigReader(raw, path).bad("rope_parameters", wanted)
    return stated.get(FULL) or {}, stated.get(SLIDING) or {}


def rotations_by_kind(
    raw: Mapping[str, Any], path: str | Path, theta: float, local_theta: float
) -> tuple[float, Mapping[str, Any]]:
    """Return theta of layers with a window, and config.json with the others' rotation in rope_parameters.

    transformers 5 has both there, by kind of layer; rope_scaling adds to that of layers without a window.

    theta, local_theta  of layers without a window and with one, where nothing is said
    """
    read = ConfigReader(raw, path)
    in_full, in_windows = stated_rotations(raw, path)
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or ("type" in {*scaling} and "rope_type" not in {*scaling}):
        raise read.bad("rope_scaling", "an object with a rope_type: transformers reads no `type` in it")
    local = ConfigReader(in_windows, path, f"rope_parameters.{SLIDING}.")
    local.fixed("rope_type", "default", "llama.cpp doesn't stretch the rotation of these layers")
    full = merged({"rope_theta": read.number("rope_theta", theta)}, merged(in_full, scaling))
    others = dict.fromkeys(("rope_scaling", "rope_theta", "original_max_position_embeddings"))
    return local.number("rope_theta", local_theta), merged(raw, {**others, "rope_parameters": full})


def window_fields(read: ConfigReader) -> dict[str, Any]:
    """Return sliding_window and sliding_layers: by layer_types, else those from max_window_layers on."""
    window, first = read.size_or_null("sliding_window", 4096), read.size("max_window_layers", 28, least=0)
    layers = layers_of_kind(read, read.size("num_hidden_layers"), lambda layer: layer >= first)
    if not read.flag("use_sliding_window", False):
        return {}
    return {"sliding_window": window, "sliding_layers": layers}
