"""The models that audits are tried on: two trained ones, and two whose weights are spread like those."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.checkpoints import Tensors, read_config, write_checkpoint
from tests.support.published_checkpoint import MODELS
from tests.support.published_shapes import decoder

EXAMPLES = Path(__file__).parents[3] / "examples"

_WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "num_hidden_layers": 3, "num_nextn_predict_layers": 0,
}  # fmt: skip

_MADE: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm4moe": (
        "glm4moe-air", {**_WIDE, "moe_intermediate_size": 256, "use_qk_norm": True}, {},
    ),
    "qwen3": ("qwen3-r1-0528", _WIDE, {"use_qk_norm": True}),
}  # fmt: skip
"""Name -> the recorded model whose tokenizer and configuration it has, changes, what its shapes need."""

FAMILIES = ("llama", "deepseek2", "glm4moe", "qwen3")


def family_folder(name: str, parent: Path) -> Path:
    """Return the folder of a model of a family, made in `parent` where it is not in examples/."""
    if name == "llama":
        return EXAMPLES / "small-llama"
    if name == "deepseek2":
        return EXAMPLES / "tiny-deepseek-v3"
    recorded, changes, shapes = _MADE[name]
    folder = parent / name
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    for path in (MODELS / recorded).iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder / path.name)
    config = read_config(MODELS / recorded) | changes
    rng = np.random.default_rng(7)
    tensors: Tensors = {}
    for tensor, shape in decoder(config | shapes):
        dtype = np.float32 if tensor.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
        tensors[tensor] = weights(rng, shape, is_norm="norm" in tensor).astype(dtype)
    return write_checkpoint(folder, config, tensors)


def weights(rng: np.random.Generator, shape: tuple[int, ...], *, is_norm: bool) -> np.ndarray:
    """Make weights as training leaves them: heavy tails, and rows and columns of several sizes."""
    if len(shape) == 1:
        return rng.normal(1, 0.2, shape) if is_norm else rng.normal(0, 0.1, shape)
    rows, cols = (np.exp(rng.normal(0, 0.3, length)) for length in shape)
    return 0.02 * rng.standard_t(5, shape) * np.outer(rows, cols)
