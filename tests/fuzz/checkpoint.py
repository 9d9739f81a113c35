"""model.safetensors.index.json, and the quantization settings in config.json, of a folder with weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

from convert.weights import open_checkpoint
from convert.weights.model_weights import checkpoint_text
from tests.fuzz import mutate, scratch
from tests.support.checkpoints import write_safetensors

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [2, 2], "activation_scheme": "dynamic",
        "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "modules_to_not_convert": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
    },
}  # fmt: skip
INDEX = {
    "metadata": {"total_size": 60},
    "weight_map": {
        "a.weight": "model-00001-of-00002.safetensors",
        "a.weight_scale_inv": "model-00001-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
    },
}


def make(rng: random.Random) -> bytes:
    """Return config.json and the index, one of them changed, on a line each."""
    both = [CONFIG, INDEX]
    changed = rng.randrange(2)
    text = mutate.json_bytes(rng, json.dumps(both[changed]))
    whole = json.dumps(both[1 - changed]).encode()
    return b"\n".join((text, whole) if changed == 0 else (whole, text))


def warm_up() -> None:
    one_input(b"\n".join(json.dumps(part).encode() for part in (CONFIG, INDEX)))


def read(folder: Path) -> None:
    """List the weights of a folder; raises CheckpointError if the folder is refused."""
    with open_checkpoint(folder) as weights:
        checkpoint_text(weights)


def one_input(data: bytes) -> None:
    folder = scratch.folder("checkpoint")
    if not any(folder.iterdir()):
        _write_weights(folder)
    config, _, index = data.partition(b"\n")
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors.index.json").write_bytes(index)
    read(folder)


def _write_weights(folder: Path) -> None:
    import ml_dtypes
    import numpy as np

    codes, scales = np.zeros((4, 4), ml_dtypes.float8_e4m3fn), np.ones((2, 2), np.float32)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    write_safetensors(folder / "model-00001-of-00002.safetensors", tensors)
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b.weight": np.zeros((2, 3), np.float32)})
