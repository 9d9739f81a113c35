"""ConfigReader: checked values out of config.json, for the configuration of any family."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from gguf_tools.errors import BadConfig, UnsupportedCheckpoint
from gguf_tools.text import quoted

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
                f"{self.path}: {key} is {shown(self.raw[key])}, expected {value!r}: {why}"
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
