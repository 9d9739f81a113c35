"""Reads the small JSON files beside a checkpoint's weights.

What config.json says is not always one flat object of Hugging Face's:

text_config   multimodal models keep what describes their text part in an object inside config.json
params.json   Mistral's own format: other names of keys, and no `architectures`
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadConfig, CheckpointError
from gguf_tools.files.documents import MAX_MEMORY, parse_json
from gguf_tools.files.named_files import read_input

MAX_BYTES = 64 << 20


def read_json_object(
    path: Path, error: type[CheckpointError] = BadConfig, *, most_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """Return the JSON object in `path`.

    most_memory  bytes that the object may take
    raises       `error` when the file can't be read, is not JSON, or holds something else than an object
    """
    data = read_input(path, MAX_BYTES, error)
    try:
        value = parse_json(data.removeprefix(codecs.BOM_UTF8), most_memory=most_memory)
    except ValueError as cause:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{path}: not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value


def read_json_object_if_there(
    path: Path, error: type[CheckpointError] = BadConfig, *, most_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one when there is no such file."""
    return read_json_object(path, error, most_memory=most_memory) if path.exists() else {}


PARAMS_NAME = "params.json"
MISTRAL_LARGE_3 = "MistralLarge3ForCausalLM"
"""Name of Mistral Large 3 in `architectures`, as vLLM gives it; its own files have no such key."""

_STAYS_INSIDE = ("architectures", "quantization_config", "compression_config")
"""Keys of text_config that don't replace those of the top level. Quantization is looked for in both."""


def with_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the keys of its `text_config` at the top level, where they win.

    Ids of special tokens count from the top level where it has them, and `architectures` always does.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    inner = {
        key: value
        for key, value in text.items()
        if key not in _STAYS_INSIDE and not (key.endswith("_token_id") and config.get(key) is not None)
    }
    return {**config, **inner}


def mistral_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a params.json with the name of the architecture that its keys show, and none if it is no MoE."""
    is_large_3 = "moe" in params and "kv_lora_rank" in params
    return {**params, **({"architectures": [MISTRAL_LARGE_3]} if is_large_3 else {})}
