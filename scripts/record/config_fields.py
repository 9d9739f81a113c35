"""Write convert/architectures/config_fields.json: the fields that transformers' configuration classes know.

    python scripts/record/config_fields.py

A field is one of a class's own, an attribute that stands for one, a name that the class takes out of what
config.json has besides, or one that the model's code asks the configuration for. Names that the class derives
from PreTrainedConfig, and parameters of generation, are listed once.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from convert.architectures import supported

OUT = Path(__file__).parents[2] / "convert" / "architectures" / "config_fields.json"

_TAKEN = re.compile(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"(?:, ([\w."-]+)\))?')
_ASKED = re.compile(r'getattr\((?:self\.)?(?:text_)?config, "(\w+)"')
_ROPE = ("rope_scaling", "rope_theta", "partial_rotary_factor")
"""What RotaryEmbeddingConfigMixin takes into `rope_parameters` of a class that has them."""

_ROPE_OF_FAMILIES = ("llama_4_scaling_beta", "mrope_interleaved", "type")
"""Keys of rope_parameters that RopeParameters leaves out: single families' own, and rope_type's old name."""


def default_of(field: Field[Any]) -> Any:
    """Return a field's default as JSON has it, None for an object or none."""
    value = field.default
    if value is MISSING:
        value = field.default_factory() if field.default_factory is not MISSING else None
    return json_value(value)


def json_value(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def literal(text: str) -> Any:
    """Return what a default says in the source, None where it is no constant."""
    try:
        return ast.literal_eval(text or "None")
    except ValueError:
        return None


def taken(source: str) -> dict[str, Any]:
    return {name: literal(default) for name, default in _TAKEN.findall(source)}


def asked(kind: type[PreTrainedConfig]) -> Iterator[str]:
    """Yield the names that the code of a configuration's models asks it for."""
    module = inspect.getmodule(kind)
    config_path = Path(str(module and module.__file__))
    code = config_path.with_name(config_path.name.replace("configuration_", "modeling_"))
    yield from _ASKED.findall(code.read_text("utf-8"))


def inherited() -> dict[str, Any]:
    """Return the fields of every class: PreTrainedConfig's, what it takes, and generation's parameters."""
    own = {field.name: default_of(field) for field in fields(PreTrainedConfig)}
    generation = GenerationConfig._get_default_generation_params()
    found = {**generation, **taken(inspect.getsource(PreTrainedConfig.__post_init__)), **own}
    return {name: json_value(value) for name, value in found.items() if name not in _ROPE}


def known(kind: type[PreTrainedConfig], common: set[str]) -> dict[str, Any]:
    """Return a class's fields with their defaults; text_config is the object of its class's fields."""
    own = {field.name: default_of(field) for field in fields(kind)}
    text = kind.sub_configs_defaults.get("text_config")
    found: dict[str, Any] = dict.fromkeys(_ROPE) if "rope_parameters" in own else {}
    found |= dict.fromkeys(asked(kind) if text is None else ())
    found |= taken(inspect.getsource(kind)) | dict.fromkeys(kind.attribute_map) | own
    found = {name: value for name, value in found.items() if name not in common}
    if text is not None:
        found["text_config"] = known(type(text.default_config), common)
    return dict(sorted(found.items()))


def record() -> dict[str, Any]:
    common = inherited()
    families = {}
    for name in supported():
        model = getattr(transformers, name, None)
        if model is None:
            print(f"{name}: no class in transformers {transformers.__version__}", file=sys.stderr)
        else:
            families[name] = known(model.config_class, set(common))
    return {
        "transformers": transformers.__version__,
        "inherited": dict(sorted(common.items())),
        "rope_parameters": sorted({*RopeParameters.__annotations__, *_ROPE_OF_FAMILIES}),
        "families": dict(sorted(families.items())),
    }


def text_of(recorded: dict[str, Any]) -> str:
    """Return JSON with a line for each family."""
    compact = partial(json.dumps, separators=(",", ":"))
    lines = [f"{compact(name)}:{compact(found)}" for name, found in recorded["families"].items()]
    head = compact({**recorded, "families": {}})
    return head.replace('"families":{}', '"families":{\n' + ",\n".join(lines) + "\n}") + "\n"


if __name__ == "__main__":
    OUT.write_text(text_of(record()), "utf-8")
    print(f"{OUT}: {OUT.stat().st_size} bytes")
