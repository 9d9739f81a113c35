"""Models of other architectures with packed experts: the file is that of the decoded weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

import convert
from gguf_tools import open_gguf
from tests.end_to_end.arch_models import model
from tests.support.checkpoints import Tensors, edit_config, edit_tensors, read_config
from tests.support.packers import pack_low_first

GROUP = 32
SETTINGS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
    }}},
}  # fmt: skip
"""quantization_config of Kimi K2-Thinking and K2.5."""


def packed(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a matrix as int4 in groups of columns, symmetric, and the weights that this stands for."""
    groups = weight.astype(np.float32).reshape(len(weight), -1, GROUP)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / 7).astype(ml_dtypes.bfloat16)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)), -8, 7).astype(np.int8)
    decoded = (codes.astype(np.float32) * scale.astype(np.float32)).reshape(weight.shape)
    words = pack_low_first((codes + 8).astype(np.uint8).reshape(weight.shape), 4)
    tensors = {
        "weight_packed": words.view(np.int32),
        "weight_scale": scale.reshape(len(weight), -1),
        "weight_shape": np.array(weight.shape, np.int64),
    }
    return tensors, decoded


def test_kimi_s_int4_experts(tmp_path: Path) -> None:
    source = model("kimi-k2.5")
    plain, thinking = (Path(shutil.copytree(source, tmp_path / name)) for name in ("plain", "thinking"))

    def pack(tensors: Tensors, *, keep: bool) -> None:
        for name in [name for name in tensors if re.search(r"experts\.\d+\..*\.weight$", name)]:
            parts, decoded = packed(tensors.pop(name))
            stem = name.removesuffix("weight")
            tensors.update({stem + part: data for part, data in parts.items()} if keep else {name: decoded})

    edit_tensors(thinking, lambda tensors: pack(tensors, keep=True))
    text = read_config(thinking)["text_config"]
    edit_config(thinking, text_config={**text, "quantization_config": SETTINGS})
    edit_tensors(plain, lambda tensors: pack(tensors, keep=False))
    for outtype in ("bf16", "Q4_K_M"):
        files = [folder / "out.gguf" for folder in (plain, thinking)]
        for folder, file in zip((plain, thinking), files, strict=True):
            convert.convert(folder, file, outtype=outtype, model_name="kimi", provenance=False, force=True)
        with open_gguf(files[0]) as one, open_gguf(files[1]) as two:
            assert set(one.tensors) == set(two.tensors)
            for name in one.tensors:
                assert (one.raw(name) == two.raw(name)).all(), name
