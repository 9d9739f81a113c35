"""Fields of config.json: ConfigReader checks their values for any family, and what no family reads is told.

A family reads the fields that it has a place for. Which ones it asked for is recorded, also where it goes
through copies and objects inside; so a family needs no second list of them. `unread_notes` tells of the
others, unless

    the value is the one that transformers' class has anyway (config_fields.json, recorded from transformers)
    the field means nothing for inference (MEANINGLESS), or is read by others than families (READ_ELSEWHERE)

A field that the class knows is told with its value, since the model may compute with it. Those that it
doesn't know are listed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from gguf_tools.errors import BadConfig, UnsupportedCheckpoint
from gguf_tools.text import cut_short, quoted

# llama.cpp's limits (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS); they also bound what a hostile config can ask for.
MAX_LAYERS = 512
MAX_EXPERTS = 1024


def shown(value: Any) -> str:
    """Return `value` for an error message, on one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def architecture_name(config: Mapping[str, Any], path: str | Path, example: str) -> str:
    """Read the name of a model's class in transformers out of config.json; BadConfig where it has none."""
    listed = config.get("architectures")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        found = "no architectures" if listed is None else f"architectures is {quoted(listed)}"
        raise BadConfig(f"{path}: {found}, expected a list such as ['{example}']")
    return listed[0]


def class_names(name: str) -> tuple[str, ...]:
    """Return the class, and those that have it for a base class.

    transformers saves the model that it calls Qwen3ForCausalLM as a Qwen3Model when it has no output matrix.
    """
    stem = name.removesuffix("Model")
    heads = f"{stem}ForConditionalGeneration", f"{stem}ForCausalLM", f"{stem.removesuffix('Text')}ForCausalLM"
    return (name,) if stem == name else (name, *heads)


def with_head(name: str, known: Container[str]) -> str | None:
    """Return the class among `known` that is `name`, or has that base class; None if there is none."""
    return next((candidate for candidate in class_names(name) if candidate in known), None)


def with_known_class(config: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return config.json with a class of `known` in place of its base class in `architectures`.

    Families know their configurations by classes with an output matrix.
    """
    listed = config["architectures"]
    return {**config, "architectures": [with_head(listed[0], known) or listed[0], *listed[1:]]}


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a finite number that float32 can hold; JSON's true is not a number."""
    return type(value) in (int, float) and -1e38 <= value <= 1e38


class _Missing:
    """Type of _MISSING, which means "no default" where None is a value."""


_MISSING = _Missing()


@dataclass(frozen=True)
class ConfigReader:
    """Reads checked values out of one JSON object; every error is a BadConfig that names file and key.

    raw     the object
    path    the file, for messages
    prefix  what stands before a key in messages: "rope_scaling." for an object inside config.json
    """

    raw: Mapping[str, Any]
    path: str | Path
    prefix: str = ""

    def bad(self, key: str, expected: str) -> BadConfig:
        """Return the error for a key with an impossible value, or without one."""
        name = self.prefix + key
        stated = f"{name} is {shown(self.raw[key])}" if key in self.raw else f"no {name}"
        return BadConfig(f"{self.path}: {stated}, expected {expected}")

    def size(
        self, key: str, default: int | _Missing = _MISSING, *, least: int = 1, most: int = 2**31 - 1
    ) -> int:
        """Return a whole number from `least` to `most`."""
        value = self.raw.get(key)
        if value is None and not isinstance(default, _Missing):
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.bad(key, f"a whole number from {least} to {most}")
        return value

    def size_or_null(self, key: str, default: int | _Missing | None = _MISSING) -> int | None:
        """Return a size, or None where config.json says null; `default` is for a missing key."""
        if key not in self.raw:
            if isinstance(default, _Missing):
                raise self.bad(key, "a whole number, or null for a model without it")
            return default
        return None if self.raw[key] is None else self.size(key)

    def number(self, key: str, default: float | _Missing = _MISSING) -> float:
        """Return a positive number."""
        value = self.raw.get(key)
        if value is None and not isinstance(default, _Missing):
            return default
        if not _is_number(value) or value <= 0:
            raise self.bad(key, "a positive number")
        return float(value)

    def number_or_null(self, key: str) -> float | None:
        """Return a number of zero or more, None where it is missing or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not _is_number(value) or value < 0:
            raise self.bad(key, "a number, zero or more")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; null is false, as where transformers asks whether it is true."""
        value = self.raw.get(key, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Return one of `choices`; the first where it is missing."""
        value = self.raw.get(key)
        if value is None:
            return choices[0]
        if value not in choices:
            raise self.bad(key, " or ".join(repr(choice) for choice in choices))
        return str(value)

    def fixed(self, key: str, value: Any, why: str) -> None:
        """Raise UnsupportedCheckpoint where the key says anything but `value`; null of a flag is false."""
        stated = self.raw.get(key)
        if stated is None and value is True and key in self.raw:
            stated = False
        if stated is not None and stated != value:
            raise UnsupportedCheckpoint(
                f"{self.path}: {self.prefix}{key} is {shown(self.raw[key])}, expected {value!r}: {why}"
            )

    def overruled(self, *keys: str) -> None:
        """Take the keys for read: what they say means nothing beside another key."""
        for key in keys:
            self.raw.get(key)

    def architecture(self, known: Collection[str]) -> str:
        """Return the first of `architectures`, which must be one of `known`."""
        value = self.raw.get("architectures")
        if not isinstance(value, list) or not value or value[0] not in known:
            raise self.bad("architectures", f"a list beginning with {' or '.join(known)}")
        return str(value[0])


READ_ELSEWHERE = frozenset({
    "architectures", "model_type", "text_config", "vocab_size",
    "quantization_config", "compression_config", "quantization",
    "_name_or_path", "name_or_path", "license", "language", "tags",
})  # fmt: skip
"""Fields that say which family it is, how weights are stored, what the tokens are and who made the model."""

MEANINGLESS = frozenset({
    # training
    "altup_coef_clip", "altup_lr_multiplier", "attention_dropout", "attn_pdrop", "aux_loss_alpha",
    "embd_pdrop", "embedding_dropout",
    "embedding_initializer_range", "hidden_dropout", "initializer_factor", "initializer_range",
    "input_jitter_noise",
    "mamba_dt_init_floor", "mamba_dt_max", "mtp_loss_scaling_factor", "output_router_logits",
    "rescale_prenorm_residual", "resid_pdrop", "residual_dropout", "router_aux_loss_coef",
    "router_jitter_noise", "router_z_loss_coef", "seq_aux", "time_step_floor", "time_step_max",
    "ignore_index",
    # what other fields say too
    "experts_per_token", "initial_context_length", "qk_head_dim",
    # how a program computes the same numbers
    "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "auto_map",
    "cache_implementation", "chunk_size", "dtype", "ep_size", "gradient_checkpointing", "mamba_chunk_size",
    "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "moe_shared_expert_overlap", "num_logits_to_keep",
    "pretraining_tp", "residual_in_fp32", "rope_scaling_layers", "torch_dtype", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache", "use_mamba_kernels",
    # other parts of the model, and how they are joined
    "audio_config", "audio_ms_per_token", "audio_soft_tokens_per_image", "embd_layer",
    "img_processor", "merged_hidden_size",
    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size",
    "vision_config", "vision_feature_layer", "vision_soft_tokens_per_image",
})  # fmt: skip
"""Fields that mean nothing for the inference of text, in any family."""

_TOKENS = ("_token_id", "_token_index", "_token_ids")
"""Endings of fields with ids of tokens, which the tokenizer or an image's program reads."""

_DATA = "config_fields.json"


@cache
def _recorded() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(files("convert.architectures").joinpath(_DATA).read_text("utf-8"))
    return data


@cache
def known_fields(architecture: str) -> Mapping[str, Any]:
    """Return field -> default of the class of `architecture`, those of its text part on the same level.

    The mapping is empty where transformers has no such class.
    """
    own = dict(_recorded()["families"].get(architecture, {}))
    text = own.pop("text_config", None) or {}
    return MappingProxyType({**own, **text})


class Fields(dict[str, Any]):
    """A JSON object that records which of its keys are asked for.

    asked   dotted names of what was asked for, shared by the objects inside and by copies that `merged` makes
    prefix  what the names begin with: "rope_parameters." in an object inside
    """

    def __init__(self, values: Mapping[str, Any], asked: set[str] | None = None, prefix: str = "") -> None:
        super().__init__(values)
        self.asked = set() if asked is None else asked
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        self.asked.add(self.prefix + key)
        return self._inside(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(self.prefix + key)
        return self._inside(key, super().get(key, default))

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def _inside(self, key: str, value: Any) -> Any:
        if isinstance(value, dict) and not isinstance(value, Fields):
            return Fields(value, self.asked, f"{self.prefix}{key}.")
        return value


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of both, those of `second` where both have one; what is asked of it is recorded."""
    recording = next((each for each in (first, second) if isinstance(each, Fields)), None)
    both = {**first, **second}
    return both if recording is None else Fields(both, recording.asked, recording.prefix)


def unread_notes(config: Fields) -> Iterator[str]:
    """Yield a note for each field of the class that nothing read, and one for those that it doesn't know.

    config  config.json, after the family has read it
    """
    architecture = config["architectures"][0]
    known = known_fields(architecture)
    unknown = []
    for name, value in _unread(config, config.asked):
        field, _, inside = name.partition(".")
        if value is None or _means_nothing(field, known) or known.get(name, _NOTHING) == value:
            continue
        if inside.rpartition(".")[2] in _recorded()["rope_parameters"] if inside else name in known:
            default = f", not {shown(known[name])}" if name in known else ""
            yield (
                f"config.json: {name} is {shown(value)}{default}: the file has no place for it, and llama.cpp"
                " may compute something else"
            )
        else:
            unknown.append(name)
    if unknown:
        names = ", ".join(cut_short(name) for name in unknown[:_MOST_NAMED])
        more = f" and {len(unknown) - _MOST_NAMED:,} more" if len(unknown) > _MOST_NAMED else ""
        yield f"config.json: not used, since {architecture} has no such fields: {names}{more}"


_MOST_NAMED = 40


_NOTHING = object()
"""Equal to no value of a field."""


def _means_nothing(field: str, known: Mapping[str, Any]) -> bool:
    """Return whether a field has no meaning for the inference of text, or is read by others than families."""
    if field in READ_ELSEWHERE or field in MEANINGLESS or field.endswith(_TOKENS):
        return True
    # What every class inherits is about how results are given, but for layers of different sizes.
    return field in _recorded()["inherited"] and field not in known and field != "per_layer_config"


def _unread(values: Mapping[str, Any], asked: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of what wasn't asked for; of an object inside that was, its own fields."""
    for key, value in values.items():
        name = prefix + key
        if name not in asked:
            yield name, value
        elif isinstance(value, dict) and any(other.startswith(f"{name}.") for other in asked):
            yield from _unread(value, asked, f"{name}.")
