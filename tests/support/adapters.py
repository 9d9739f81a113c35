"""Adapters of random numbers, as PEFT stores them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tests.support.checkpoints import read_tensors, write_safetensors


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Draw numbers for the test that runs: the same ones whatever ran before it."""
    test, _, _ = os.environ["PYTEST_CURRENT_TEST"].partition(" ")
    return _generator(test).normal(0, 0.3, shape).astype(dtype)


@cache
def _generator(test: str) -> np.random.Generator:
    return np.random.default_rng(crc32(test.encode()))


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_b_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    write_safetensors(
        folder / "adapter_model.safetensors",
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
    )
    return folder


def pair_of(base: Path, module: str, rank: int = 4, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return the two factors of a module, by their names."""
    rows, cols = read_tensors(base)[f"{module}.weight"].shape
    return {
        f"{module}.lora_A.weight": numbers(rank, cols, dtype=dtype),
        f"{module}.lora_B.weight": numbers(rows, rank, dtype=dtype),
    }
