"""Models with an indexer (DeepSeek V3.2, GLM-5): which layers have one, MTP layers, keys there and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.architectures import find_architecture
from convert.architectures.base import Conversion, build
from convert.architectures.deepseek2.deepseek32 import DEEPSEEK_V32, IndexedConfig
from convert.architectures.deepseek2.relatives import GLM5, GLM_DSA
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, MissingTensor
from tests.support.checkpoints import Tensors, edit_config, edit_tensors, read_config

V32_FOLDER = Path(__file__).parents[2] / "golden" / "arch" / "models" / "deepseek-v3.2"


def glm(folder: Path, drop: Callable[[str], bool] = lambda name: False, **changes: Any) -> Path:
    """Return the recorded V3.2 checkpoint as if it were a GLM-5, without the tensors that `drop` names."""
    shutil.copytree(V32_FOLDER, folder, dirs_exist_ok=True)

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if drop(name)]:
            del tensors[name]

    edit_tensors(folder, edit)
    return edit_config(folder, architectures=[GLM_DSA], model_type="glm_moe_dsa", **changes)


def converted(folder: Path, **options: Any) -> Conversion:
    checkpoint = Checkpoint(folder)
    return build(find_architecture(checkpoint.config), open_weights(checkpoint), options)


def indexed(conversion: Conversion) -> set[int]:
    """Return the layers that have an indexer."""
    names = [tensor.name for tensor in conversion.tensors]
    return {int(name.split(".")[1]) for name in names if ".indexer.attn_k." in name}


def read(**changes: Any) -> IndexedConfig:
    raw = read_config(V32_FOLDER) | {"architectures": [GLM_DSA]} | changes
    config: IndexedConfig = GLM5.read_config(raw, Path("config.json"))
    return config


def test_layers_may_share_a_choice(tmp_path: Path) -> None:
    types = ["full", "shared", "full"]
    folder = glm(tmp_path, lambda name: "layers.1.self_attn.indexer" in name, indexer_types=types)
    conversion = converted(folder)
    assert conversion.architecture.gguf_name == "glm-dsa"
    assert conversion.metadata["glm-dsa.attention.indexer.types"].plain == (True, False, True)
    assert indexed(conversion) == {0, 2, 3}
    mtp = glm(tmp_path / "2", lambda name: "indexer" in name and "layers.0" not in name, indexer_types=types)
    with pytest.raises(MissingTensor, match=r"missing 5 tensors: model\.layers\.2\.self_attn\.indexer"):
        converted(mtp)


def test_an_mtp_layer_of_which_nothing_is_said_may_go_without(tmp_path: Path) -> None:
    types = ["full", "shared", "full"]
    folder = glm(tmp_path, lambda name: "layers.3.self_attn.indexer" in name, indexer_types=types)
    assert indexed(converted(folder)) == {0, 1, 2}


def test_all_layers_have_an_indexer_unless_config_json_says_otherwise(tmp_path: Path) -> None:
    conversion = converted(glm(tmp_path))
    assert indexed(conversion) == {0, 1, 2, 3}
    assert "glm-dsa.attention.indexer.types" not in conversion.metadata


@pytest.mark.parametrize(
    ("changes", "types"),
    [
        ({"indexer_types": ["full", "full", "shared"]}, (True, True, False)),
        ({"index_topk_pattern": "FSF"}, (True, False, True)),
        ({"index_topk_pattern": ["shared", "full", "full"]}, (False, True, True)),
        ({"index_topk_freq": 2}, (True, True, False)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (True, False, True)),
        ({"index_topk_freq": 1}, None),
    ],
)
def test_the_ways_of_saying_which_layers_have_an_indexer(
    changes: dict[str, Any], types: tuple[bool, ...] | None
) -> None:
    assert read(**changes).indexer_types == types


def test_they_are_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for changes in ({"index_topk_freq": 4}, {"index_topk_freq": 3, "index_skip_topk_offset": 0}):
        theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=12, **changes).indexer_types
        ours = read(num_hidden_layers=12, **changes).indexer_types
        assert ours == tuple(kind == "full" for kind in theirs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_types": ["full"]}, "indexer_types is .*, expected full or shared for each of 3 layers"),
        ({"indexer_types": ["full", "none", "full"]}, "expected full or shared"),
        ({"index_topk_pattern": "FSX"}, "index_topk_pattern is 'FSX', expected F or S"),
        ({"index_head_dim": 4}, r"index_head_dim is 4, expected at least qk_rope_head_dim \(8\)"),
        ({"q_lora_rank": None}, "q_lora_rank is None, expected a whole number"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        read(**changes)


def test_mtp_layers_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    kept, without = converted(V32_FOLDER), converted(V32_FOLDER, mtp=False)
    assert [c.metadata["deepseek32.block_count"].data for c in (kept, without)] == [4, 3]
    assert "deepseek32.nextn_predict_layers" not in without.metadata
    stated = converted(glm(tmp_path, lambda name: ".layers.3." in name, num_nextn_predict_layers=0))
    assert stated.metadata["glm-dsa.nextn_predict_layers"].data == 0


def test_a_note_says_that_bos_is_added(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(V32_FOLDER, tmp_path / "v32"))
    for name, changes in (
        ("tokenizer_config.json", {"add_bos_token": False}),
        ("tokenizer.json", {"post_processor": None}),
    ):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")
    result = convert.convert(folder, tmp_path / "v32.gguf", outtype="bf16")
    assert [note for note in result.preparation.plan.notes if note.startswith("add_bos_token: true, as this")]
    with open_gguf(tmp_path / "v32.gguf") as file:
        assert file.get("tokenizer.ggml.add_bos_token") is True


def test_the_file_says_again_what_config_json_said(tmp_path: Path) -> None:
    convert.convert(V32_FOLDER, tmp_path / "v32.gguf", outtype="bf16")
    with open_gguf(tmp_path / "v32.gguf") as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        found = DEEPSEEK_V32.read_file(file.metadata, shapes, tmp_path)
    expected = IndexedConfig.from_dict(read_config(V32_FOLDER))
    for name in vars(expected):
        one, other = getattr(found, name), getattr(expected, name)
        if name not in ("rope", "lengths_first"):
            assert np.isclose(one, other) if isinstance(other, float) else one == other, name
    assert np.isclose(found.rope.theta, expected.rope.theta)
