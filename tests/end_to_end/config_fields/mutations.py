"""Values to try for each field of a model's config.json: other ones, none, and null."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from tests.end_to_end.config_fields.models import N_VOCAB, Base, model_class

Path = tuple[str, ...]


class Absent:
    """Type of ABSENT: the field is not in config.json."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()

MADE_UP = "my_new_thing"
"""A field that no class knows."""


@dataclass(frozen=True)
class Mutation:
    """A change of config.json.

    field    what is changed, with dots: "text_config.rope_parameters.factor"
    value    what it becomes, for reports
    changes  place in config.json -> value, ABSENT for none
    also     other names of what is changed, for judging notes
    """

    field: str
    value: str
    changes: Mapping[Path, Any] = field(hash=False)
    also: tuple[str, ...] = ()

    def apply(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(dict(raw))
        for path, value in self.changes.items():
            place = changed
            for key in path[:-1]:
                place = place.setdefault(key, {})
            if value is ABSENT:
                place.pop(path[-1], None)
            else:
                place[path[-1]] = value
        return changed


_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
_VALUES: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "mamba_hidden_act", "mlp_hidden_act"), _ACTIVATIONS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "hc_eps"), (0.01, 0.5)),
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "position_embedding_type": ("rope", "nope"),
    "use_bidirectional_attention": (True, False, "all", "vision"),
    "sliding_window": (8, 40, 0, None),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1),
    "max_position_embeddings": (64, 512),
    "original_max_position_embeddings": (32, 64),
    "mlp_only_layers": ([0], [0, 1]),
    "time_step_limit": ([0.0, 0.5], [0.3, 100.0]),
    "time_step_min": (0.3,), "time_step_max": (0.5,), "time_step_floor": (0.3,),
    "partial_rotary_factor": (0.5, 0.25, 1.0),
    "n_group": (2, 4), "topk_group": (1, 2), "num_expert_group": (2,),
    "index_n_heads": (32,),  # with few of them, scores are often 0, and equal
    "index_topk": (32, 8, 2048), "index_topk_freq": (2,), "index_topk_pattern": ("FSF",),
    "index_skip_topk_offset": (1,),
    "decoder_sparse_step": (2,), "first_k_dense_replace": (0, 1, 2),
    "num_key_value_heads": (1, 2, 4), "num_attention_heads": (2, 8), "num_hidden_layers": (1, 3),
    "head_dim": (8, 32), "global_head_dim": (16, 64), "hidden_size": (32, 128), "vocab_size": (640,),
    "rope_theta": (1e3, 1e6), "rope_local_base_freq": (1e3, 1e6), "compress_rope_theta": (1e3, 1e6),
    "final_logit_softcapping": (0.5, 2.0), "attn_logit_softcapping": (0.05, 2.0),
    "query_pre_attn_scalar": (4, 256), "num_kv_shared_layers": (1, 2), "num_experts_per_tok": (1, 3),
    "top_k_experts": (1, 3), "sliding_window_pattern": (2, 3), "full_attention_interval": (2,),
    "no_rope_layers": ([0] * 5, [1, 0, 1, 0, 1], [1] * 5), "no_rope_layer_interval": (2,),
    "q_lora_rank": (16, None), "shared_intermediate_size": (0, 32), "rotary_dim": (8, 32),
    "moe_latent_size": (16,), "num_global_key_value_heads": (1, 2),
    "hidden_size_per_layer_input": (0, 8), "swiglu_limit": (0.05, 1.0), "swiglu_alpha": (0.5, 3.0),
    "num_nextn_predict_layers": (0, 1), "num_mtp_layers": (0, 1), "n_shared_experts": (0, 2),
    "mtp_hybrid_override_pattern": ("*E",), "pretraining_tp": (2,), "num_hash_layers": (0, 1),
    "hybrid_override_pattern": ("M*-M*", "****-"), "norm_topk_prob": (True, False),
    "per_layer_config": ({"1": {"intermediate_size": 64}}, {"1": {"rms_norm_eps": 0.5}},
                         {"0": {"sliding_window": 8}}),
    "embedding_multiplier": (2.0, 0.5), "logits_scaling": (2.0, 0.5), "residual_multiplier": (0.5, 1.5),
    "attention_multiplier": (0.5, 1.5), "routed_scaling_factor": (0.5, 3.0),
    "use_mem_rope": (True,), "tie_word_embeddings": (True, False),
}  # fmt: skip
"""Values that say more than those that `others_like` makes of the base's."""

_LISTS: Mapping[str, Sequence[str]] = {
    "layer_types": ("full_attention", "sliding_attention", "linear_attention", "chunked_attention",
                    "compressed_sparse_attention", "heavily_compressed_attention", "indexed_attention",
                    "mamba", "attention", "moe", "my_kind"),
    "layers_block_type": ("full_attention", "linear_attention", "mamba", "attention", "moe", "mlp"),
    "mlp_layer_types": ("sparse", "dense", "hash_moe", "moe"),
    "indexer_types": ("full", "shared"),
}  # fmt: skip
"""Fields with a kind for each layer -> kinds to try."""

_ANY_CLASS = ("head_dim", "attention_bias", "mlp_bias", "sliding_window", "per_layer_config", "hidden_act",
              "attention_multiplier", "final_logit_softcapping", "attn_logit_softcapping", "qkv_bias",
              "query_pre_attn_scalar", "norm_topk_prob", "use_qk_norm", "layer_types",
              "is_decoder", "chunk_size_feed_forward")  # fmt: skip
"""Fields to try in every family, whether its class has them or not."""


def others_like(value: Any) -> tuple[Any, ...]:
    """Return values of the type of `value`."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (2 * value, max(value // 2, 1)) if value else (1, 2)
    if isinstance(value, float):
        return (2 * value, value / 2) if value else (0.5,)
    if isinstance(value, list) and value and all(type(each) in (int, float) for each in value):
        return ([2 * each for each in value], value[::-1], value[:-1])
    return ()


def of_unknown_type(name: str) -> tuple[Any, ...]:
    """Return values for a field whose default is null."""
    if name.startswith("use_") or name.endswith(("_bias", "_norm")):
        return (True, False)
    return (2, 0.5)


@cache
def recorded() -> dict[str, Any]:
    text = files("convert.architectures").joinpath("config_fields.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def mutations(base: Base, raw: Mapping[str, Any]) -> Iterator[Mutation]:
    """Yield what is to be tried with config.json of a base."""
    known = recorded()["families"][base.architecture]
    yield Mutation(MADE_UP, "3", {(MADE_UP,): 3})
    if base.wrapped:
        outer = {name: value for name, value in known.items() if name not in known["text_config"]}
        yield from _fields(outer, raw, ())
        # A text field that stands beside text_config, too.
        for name in ("tie_word_embeddings", "hidden_size", "rope_theta", "sliding_window", "head_dim"):
            for value in _values(name, known["text_config"].get(name), raw["text_config"].get(name)):
                yield Mutation(f"(outer) {name}", repr(value), {(name,): value}, (name,))
        yield Mutation(f"text_config.{MADE_UP}", "3", {("text_config", MADE_UP): 3})
        place: Path = ("text_config",)
        text = raw["text_config"]
    else:
        place, text = (), raw
    fields = known["text_config"] if base.wrapped else known
    for alias, name in attribute_map(base).items():
        if text.get(name) is not None:
            other = {(*place, name): ABSENT, (*place, alias): text[name]}
            yield Mutation(f"{alias} for {name}", repr(text[name]), other)
    extra = {name: None for name in _ANY_CLASS if name not in fields}
    others = attribute_map(base)
    fields = {name: default for name, default in fields.items() if text.get(others.get(name, "")) is None}
    yield from _fields({**fields, **extra}, text, place)
    yield from _rotations(text, place)


def attribute_map(base: Base) -> Mapping[str, str]:
    """Return other names of fields of a base's text part -> the fields."""
    kind = model_class(base.architecture).config_class
    if base.wrapped:
        kind = type(kind.sub_configs_defaults["text_config"].default_config)
    return dict(kind.attribute_map)


def _fields(known: Mapping[str, Any], raw: Mapping[str, Any], place: Path) -> Iterator[Mutation]:
    for name, default in sorted(known.items()):
        if name in ("rope_parameters", "rope_scaling", "vision_config", "audio_config", "text_config"):
            continue
        seen = [repr(raw.get(name, ABSENT))]
        for value in _values(name, default, raw.get(name), raw):
            if repr(value) not in seen:
                seen.append(repr(value))
                yield Mutation(".".join((*place, name)), _shown(value), {(*place, name): value})


def _values(name: str, default: Any, present: Any, raw: Mapping[str, Any] | None = None) -> Sequence[Any]:
    if name.endswith(("_token_id", "_token_index")):
        return [N_VOCAB - 1, None, ABSENT]
    if name in _LISTS and raw is not None:
        return [*_lists(name, present, raw), None, ABSENT]
    stated = _VALUES.get(name)
    if stated is None:
        like = present if present is not None else default
        stated = others_like(like) if like is not None else of_unknown_type(name)
    return [*stated, None, ABSENT]


def _lists(name: str, present: Any, raw: Mapping[str, Any]) -> Iterator[list[str]]:
    n_layers = len(present) if present else raw.get("num_hidden_layers") or 2
    for kind in _LISTS[name]:
        yield [kind] * n_layers
        yield [kind, *(present or ["full_attention"] * n_layers)[1:]]
        yield [*(present or ["full_attention"] * n_layers)[:-1], kind]
    if present:
        yield present[::-1]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


_CONTEXT = {"original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, **_CONTEXT}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_CONTEXT}


def rope_kinds(n_rotated: int) -> dict[str, dict[str, Any]]:
    """Return what to try for RoPE, by a name; `n_rotated` columns of a head are rotated."""
    half = n_rotated // 2
    short, long = [1.0 + 0.1 * n for n in range(half)], [1.0 + 1.5 * n for n in range(half)]
    longrope = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **_CONTEXT}
    return {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 2.5},
        "linear factor=0.5": {"rope_type": "linear", "factor": 0.5},
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "proportional": {"rope_type": "proportional", "factor": 2.0},
        "ntk": {"rope_type": "ntk", "factor": 2.0},
        "yarn": _YARN,
        "yarn without original": {"rope_type": "yarn", "factor": 4.0},
        "yarn attention_factor": {**_YARN, "attention_factor": 1.5},
        "yarn attention_factor=1": {**_YARN, "attention_factor": 1.0},
        "yarn beta_fast": {**_YARN, "beta_fast": 8.0},
        "yarn beta_slow": {**_YARN, "beta_slow": 3.0},
        "yarn betas": {**_YARN, "beta_fast": 16, "beta_slow": 2},
        "yarn mscale": {**_YARN, "mscale": 0.5},
        "yarn mscale_all_dim": {**_YARN, "mscale_all_dim": 0.5},
        "yarn mscales": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.4},
        "yarn mscales=1": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "yarn truncate": {**_YARN, "truncate": False},
        "yarn factor=1": {**_YARN, "factor": 1.0},
        "yarn llama_4_scaling_beta": {**_YARN, "llama_4_scaling_beta": 0.3},
        "llama3": _LLAMA3,
        "llama3 low_freq_factor": {**_LLAMA3, "low_freq_factor": 2.0},
        "llama3 high_freq_factor": {**_LLAMA3, "high_freq_factor": 16.0},
        "llama3 attention_factor": {**_LLAMA3, "attention_factor": 1.5},
        "longrope": longrope,
        "su": {**longrope, "rope_type": "su"},
        "longrope attention_factor": {**longrope, "attention_factor": 1.5},
        "longrope factor": {**longrope, "factor": 8.0},
        "longrope long context": {**longrope, "original_max_position_embeddings": 4096},
        "default attention_factor": {"rope_type": "default", "attention_factor": 1.5},
        "default factor": {"rope_type": "default", "factor": 2.0},
        "linear attention_factor": {"rope_type": "linear", "factor": 2.5, "attention_factor": 1.5},
        "partial_rotary_factor": {"rope_type": "default", "partial_rotary_factor": 0.5},
        "made up": {"rope_type": "default", MADE_UP: 3},
    }


_SCALARS = (
    "rope_theta", "partial_rotary_factor", "llama_4_scaling_beta", "mrope_section", "mrope_interleaved",
)  # fmt: skip
"""Keys of a rotation that stay as they are where its kind changes."""


def _rotations(text: Mapping[str, Any], place: Path) -> Iterator[Mutation]:
    """Yield rotations of all kinds, in rope_parameters and as older versions of transformers have them."""
    found = text.get("rope_parameters") or {}
    if not found and "rope_theta" not in text:
        return
    nested = {key: value for key, value in found.items() if isinstance(value, dict)}
    here = next(iter(nested.values()), found) or {"rope_theta": text["rope_theta"]}
    width = text.get("qk_rope_head_dim") or text.get("head_dim")
    width = width or text["hidden_size"] // text["num_attention_heads"]
    kept = {key: here[key] for key in _SCALARS if key in here}
    n_rotated = int(width * (kept.get("partial_rotary_factor") or 1.0))
    whole = (*place, "rope_parameters")
    for key in () if nested else found.keys() - {"rope_type", "short_factor", "long_factor"}:
        for value in _values(key, None, found[key]):
            path = (*whole, key)
            if value != found[key]:
                yield Mutation(".".join(path), _shown(value), {path: value}, ("rope_parameters",))
    nothing = {(*place, key): ABSENT for key in ("rope_parameters", "rope_scaling", "rope_theta")}
    yield Mutation("rope_parameters", "absent", nothing)
    for label, kind in rope_kinds(n_rotated).items():
        new = {**kept, **kind}
        also = tuple(key for key in kind if key != "rope_type")
        for name, rotation in nested.items():
            path = (*whole, name)
            own = {key: rotation[key] for key in _SCALARS if key in rotation}
            yield Mutation(".".join(path), label, {path: {**own, **kind}}, also)
        yield Mutation(".".join(whole), label, {whole: new}, also)
        for spelled in ("rope_type", "type"):
            yield from _legacy(label, new, place, spelled, also)


def _legacy(
    label: str, new: Mapping[str, Any], place: Path, spelled: str, also: tuple[str, ...]
) -> Iterator[Mutation]:
    """Yield a rotation as config.json of older versions has it: rope_scaling, other fields beside it."""
    inside = {spelled if key == "rope_type" else key: value for key, value in new.items()}
    outside = {key: inside.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in inside}
    base: dict[Path, Any] = {(*place, "rope_parameters"): ABSENT}
    base |= {(*place, key): value for key, value in outside.items()}
    name = ".".join((*place, "rope_scaling"))
    scaling = None if new["rope_type"] == "default" and len(inside) == 1 else inside
    if label in ("linear", "yarn", "llama3") and spelled == "rope_type":
        yield Mutation(f"{name} (beside)", label, {(*place, "rope_scaling"): scaling}, also)
    yield Mutation(f"{name} ({spelled})", label, {**base, (*place, "rope_scaling"): scaling}, also)
    if "original_max_position_embeddings" in inside and spelled == "rope_type":
        moved = "original_max_position_embeddings"
        inside = {key: value for key, value in inside.items() if key != moved}
        beside = {**base, (*place, "rope_scaling"): inside, (*place, moved): new[moved]}
        yield Mutation(f"{name} (length beside)", label, beside, also)
