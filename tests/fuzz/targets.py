"""All harnesses by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.fuzz import (
    checkpoint,
    config_json,
    gguf,
    gguf_set,
    imatrix,
    model_card,
    safetensors,
    tokenizer_config,
    tokenizer_json,
    tokenizer_model,
)


@dataclass(frozen=True)
class Target:
    """One reader.

    make       makes a nearly valid input from a random number generator
    one_input  reads an input; may only return or raise a ToolkitError
    read       does the same with an existing file or folder
    warm_up    imports and compiles everything that the first read would
    """

    make: Callable[[random.Random], bytes]
    one_input: Callable[[bytes], None]
    read: Callable[[Path], None]
    warm_up: Callable[[], None]


def _target(module: ModuleType) -> Target:
    return Target(module.make, module.one_input, module.read, module.warm_up)


TARGETS: Mapping[str, Target] = {
    "gguf": _target(gguf),
    "gguf_set": _target(gguf_set),
    "safetensors": _target(safetensors),
    "checkpoint": _target(checkpoint),
    "config_json": _target(config_json),
    "tokenizer_json": _target(tokenizer_json),
    "tokenizer_config": _target(tokenizer_config),
    "tokenizer_model": _target(tokenizer_model),
    "model_card": _target(model_card),
    "imatrix": _target(imatrix),
}
