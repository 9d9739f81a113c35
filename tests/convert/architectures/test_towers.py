"""Vision towers: what is refused, and in which words; rows that are read in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.architectures.vision import TOWERS, find_tower
from convert.pipeline import CheckpointSources, open_conversion
from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest, CheckpointError, MissingTensor, UnexpectedTensors
from tests.support.checkpoints import Tensors, edit_config, edit_tensors
from tests.support.towers import NAMES, recorded, write


def refused(folder: Path, words: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error, match=words) as caught:
        convert.convert(folder, folder / "out.gguf", mmproj=True)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.gguf*"))


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return write(recorded("qwen3-vl"), tmp_path / "qwen3-vl")


def test_a_model_without_a_known_tower(qwen: Path) -> None:
    edit_config(qwen, architectures=["LlavaForConditionalGeneration"])
    refused(qwen, "no vision tower is known of architecture LlavaForConditionalGeneration, only of Qwen3VL")
    edit_config(qwen, architectures=None)
    refused(qwen, "no architectures|architectures is None")


def test_a_checkpoint_without_its_tower(qwen: Path) -> None:
    def drop_tower(tensors: Tensors) -> None:
        for name in [name for name in tensors if "visual." in name]:
            del tensors[name]

    edit_tensors(qwen, drop_tower)
    refused(qwen, r"the checkpoint has no vision tower, no weight visual\.")


def test_a_config_without_a_tower(qwen: Path) -> None:
    edit_config(qwen, vision_config=None)
    refused(qwen, "config.json: no vision_config, so there is nothing to make an mmproj file of")


@pytest.mark.parametrize("mean", [None, [0.5, 0.5], ["a", 0.5, 0.5]])
def test_images_without_a_mean(qwen: Path, mean: object) -> None:
    path = qwen / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_mean": mean}))
    refused(qwen, r"preprocessor_config\.json: image_mean is .*, expected three numbers")
    path.unlink()
    refused(qwen, r"no image_mean, expected three numbers \(preprocessor_config\.json or")


KERNEL = "model.visual.patch_embed.proj.weight"


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (lambda tensors: tensors.pop(KERNEL), MissingTensor, r"missing 1 tensor: visual\.patch_embed\.proj"),
        (
            lambda tensors: tensors.update({"model.visual.extra": tensors[KERNEL]}),
            UnexpectedTensors,
            r"unexpected 1 tensor: visual\.extra",
        ),
        (
            lambda tensors: tensors.update({KERNEL: tensors[KERNEL][:, :, :1]}),
            CheckpointError,
            r"shape \(64, 3, 1, 16, 16\), expected \(64, 3, 2, 16, 16\)",
        ),
    ],
)
def test_weights_that_do_not_fit(
    qwen: Path, edit: Callable[[Tensors], object], error: type[Exception], words: str
) -> None:
    edit_tensors(qwen, edit)
    refused(qwen, words, error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes is .3., expected different numbers"),
        ({"deepstack_visual_indexes": [1, 1]}, "expected different numbers of the 3 layers"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, expected 2: llama.cpp takes two frames"),
        ({"depth": 10**9}, r"vision_config\.num_hidden_layers is 1000000000, expected a whole number"),
        ({"patch_size": 0}, r"vision_config\.patch_size is 0, expected a whole number"),
    ],
)
def test_configurations_that_can_not_be(qwen: Path, change: dict[str, object], words: str) -> None:
    edit_config(qwen, lambda config: config["vision_config"].update(change))
    refused(qwen, words)


def test_options_of_a_text_model(qwen: Path) -> None:
    for choices in ({"vocab_only": True}, {"pre_tokenizer": "qwen2"}):
        with pytest.raises(BadRequest, match="has no tokenizer"):
            convert.convert(qwen, mmproj=True, **choices)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="mtp=True: Qwen3VLForConditionalGeneration has no such option"):
        convert.convert(qwen, mmproj=True, mtp=True)


def test_every_class_is_that_of_its_tower() -> None:
    for name in TOWERS:
        canonical = {"Qwen": "visual.", "Gemm": "embed_vision."}[name[:4]]
        prefix = "vision_tower." if name.startswith("Gemma3") else canonical
        assert name in find_tower({"architectures": [name]}, "config.json", [prefix]).hf_names


@pytest.mark.parametrize("name", NAMES)
def test_rows_read_in_pieces_are_those_read_at_once(name: str, tmp_path: Path) -> None:
    """In the form in which a worker of another process opens them."""
    folder = write(recorded(name), tmp_path / name)
    with open_conversion(folder, mmproj=True) as conversion:
        names = {tensor.name: tensor.name for tensor in conversion.tensors}
    with CheckpointSources(folder, False, {}, True, names).open() as sources:
        for tensor in sources.values():
            n_rows = int(np.prod(tensor.shape[:-1]))
            whole = tensor.raw_rows(0, n_rows).reshape(n_rows, -1)
            step = n_rows // 3 + 1
            pieces = [tensor.raw_rows(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]
            assert np.array_equal(np.concatenate(pieces), whole.reshape(-1)), tensor.name
            rows = tensor.read_rows(0, n_rows)
            assert rows.shape == (n_rows, tensor.shape[-1])
            assert np.array_equal(np.ascontiguousarray(rows).reshape(-1).view(np.uint8), whole.reshape(-1))


def test_bounds_that_clip_nothing(tmp_path: Path) -> None:
    """A model that was never calibrated has infinities, which no file may have."""
    folder = write(recorded("gemma-4-e"), tmp_path / "gemma-4-e")
    attention = "model.vision_tower.encoder.layers.0.self_attn"

    def unbind(tensors: Tensors) -> None:
        for name in (f"{attention}.q_proj.input_min", f"{attention}.q_proj.output_max"):
            tensors[name] = np.full((), np.inf if name.endswith("max") else -np.inf, tensors[name].dtype)
        del tensors[f"{attention}.k_proj.input_min"]

    edit_tensors(folder, unbind)
    convert.convert(folder, tmp_path / "out.gguf", outtype="f16", mmproj=True)
    largest = np.finfo(np.float32).max
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.raw("v.blk.0.attn_q.input_min").view(np.float32).tolist() == [-largest]
        assert file.raw("v.blk.0.attn_q.output_max").view(np.float32).tolist() == [largest]
        assert "v.blk.0.attn_k.input_min" not in file.tensors
