"""Models in the layouts that programs save become what they become in their published ones.

scripts/check/checkpoint_layouts.py tries every family in every layout.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.errors import CheckpointError
from gguf_tools.format.ggml_types import MXFP4
from tests.end_to_end.arch_models import model as published_model
from tests.end_to_end.layouts.judge import judge, made_of
from tests.end_to_end.layouts.ways import LAYOUTS, layouts_of, mlx_pair, mlx_quantized, saved
from tests.support.checkpoints import Tensors, read_config, read_tensors, write_checkpoint
from tests.support.packers import pack_low_first

pytest.importorskip("transformers")

SWEEP = Path(__file__).parents[2] / "scripts" / "check" / "checkpoint_layouts.py"

MANY = (
    "mixtral", "granite4-h", "nemotron-3", "gpt-oss", "qwen35moe", "deepseek3", "gemma4-experts", "deepseek4",
)  # fmt: skip
"""Models that among them have every way in which experts and names are stored."""


@pytest.mark.parametrize("name", MANY)
def test_other_names_and_stacks_are_the_same_model(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "published")
    published = made_of(model.folder)
    for number, layout in enumerate(("transformers 5", "base class, transformers 5", "MLX", "Unsloth")):
        if layout in layouts_of(name):
            outcome = judge(LAYOUTS[layout], model, published, tmp_path / str(number))
            assert outcome.kind in ("equal", "noted"), f"{layout}: {outcome.why}"


def test_every_layout_of_a_small_model(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path / "published")
    published = made_of(model.folder)
    for number, (layout, each) in enumerate(layouts_of("qwen3").items()):
        outcome = judge(each, model, published, tmp_path / str(number))
        assert outcome.kind != "wrong", f"{layout}: {outcome.why}"


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 32), (5, 64), (6, 32), (8, 64)])
def test_codes_of_mlx_are_what_they_mean(bits: int, group_size: int, tmp_path: Path) -> None:
    """Stacks of experts, embeddings, and modules with settings of their own are among them."""
    model = saved("qwen3moe", tmp_path / "published")
    mlx_pair(model, tmp_path / "codes", tmp_path / "decoded", bits, group_size)
    codes, decoded = made_of(tmp_path / "codes"), made_of(tmp_path / "decoded")
    assert codes.notes == decoded.notes
    assert set(codes.tensors) == set(decoded.tensors)
    for name, numbers in codes.tensors.items():
        assert np.array_equal(numbers, decoded.tensors[name]), name


def test_the_sweep_finds_nothing_wrong() -> None:
    rows = runpy.run_path(str(SWEEP))["sweep"]("seed-oss", "DDP", False)
    assert [(layout, outcome.kind) for _, layout, outcome in rows] == [("DDP", "equal")]


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_the_packer_is_the_obvious_one(bits: int) -> None:
    import torch

    stored, meaning = mlx_quantized(torch.from_numpy(np.random.RandomState(1).randn(3, 64)).float(), bits, 32)
    scales, low = (stored[key].float().repeat_interleave(32, 1) for key in (".scales", ".biases"))
    codes = ((meaning - low) / scales).round().to(torch.uint8).numpy()
    words = stored[".weight"].view(torch.int32).numpy().view(np.uint32)
    assert np.array_equal(words, pack_low_first(codes, bits))


def mlx_gpt_oss(published: Path, folder: Path) -> Path:
    """Store a gpt-oss as mlx-lm does: gate and up apart, blocks as words."""
    made: Tensors = {}
    for name, tensor in read_tensors(published).items():
        name = name.replace("_proj_blocks", "_proj.weight").replace("_proj_scales", "_proj.scales")
        name = name.replace("_proj_bias", "_proj.bias")
        if ".experts." in name and name.endswith(".weight"):
            tensor = tensor.reshape(*tensor.shape[:2], -1).view(np.uint32)
        if "gate_up_proj" in name:
            made[name.replace("gate_up", "gate")] = tensor[:, 0::2]
            made[name.replace("gate_up", "up")] = tensor[:, 1::2]
        else:
            made[name] = tensor
    config = read_config(published)
    config["quantization"] = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    config["quantization_config"] = config["quantization"]
    write_checkpoint(folder, config, made)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((published / file).read_bytes())
    return folder


def test_gpt_oss_of_mlx_keeps_its_codes(tmp_path: Path) -> None:
    published = published_model("gpt-oss")
    made = []
    for number, folder in enumerate((published, mlx_gpt_oss(published, tmp_path / "mlx"))):
        convert.convert(folder, tmp_path / f"{number}.gguf", outtype="q8_0")
        with open_gguf(tmp_path / f"{number}.gguf") as file:
            made.append({name: (file.tensors[name].type, file.raw(name).tobytes()) for name in file.tensors})
    assert made[0]["blk.1.ffn_up_exps.weight"][0] == MXFP4
    assert made[0] == made[1]


def test_an_unknown_layout_of_mlx_says_so(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    write_checkpoint(folder, read_config(published_model("qwen3moe")), {})
    save_file({"model.strange": np.ones(2)}, folder / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(CheckpointError, match="MLX has written the checkpoint"):
        convert.convert(folder, tmp_path / "out.gguf")
