"""Models without some layers: llama.cpp computes with the file what transformers does without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from convert.architectures import find_by_gguf_name
from gguf_tools import open_gguf
from quantize import PlanOptions
from tests.support import oracle
from tests.support.decoder_models import decoder_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

IDS = np.random.RandomState(0).randint(3, 550, 40).tolist()


def leave_out(model: Any, layer: int) -> None:
    """Take a layer out of a model of transformers."""
    del model.model.layers[layer]
    config = model.config
    config.num_hidden_layers -= 1
    for kinds in ("layer_types", "layers_block_type"):
        if isinstance(getattr(config, kinds, None), list):
            left = list(getattr(config, kinds))
            if len(left) > config.num_hidden_layers:
                del left[layer]
                setattr(config, kinds, left)


def _sliding(config: Any) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention")


@pytest.mark.parametrize(
    ("name", "layer", "sizes"),
    [
        ("granite4-h", 1, {}),
        ("olmo3", 0, {}),
        ("gemma3", 2, {}),
        ("gpt-oss", 0, {"num_hidden_layers": 4}),
        ("qwen35", 0, {}),
        ("gemma4", 2, {}),
    ],
)
def test_logits(name: str, layer: int, sizes: dict[str, int], tmp_path: Path) -> None:
    model = decoder_model(name, tmp_path / name, **sizes)
    convert.convert(tmp_path / name, tmp_path / "whole.gguf", outtype="f32")
    output = tmp_path / "pruned.gguf"
    quantize.quantize(tmp_path / "whole.gguf", output, "F32", types=PlanOptions(prune_layers=(layer,)))
    leave_out(model, layer)
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    with open_gguf(output) as header:
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        if name in ("olmo3", "gemma3", "gpt-oss"):
            family = find_by_gguf_name(str(header.get("general.architecture")))
            assert family is not None
            read = family.read_file(header.metadata, shapes, output)
            assert read.sliding_layers == _sliding(model.config)
    with oracle.Model(output) as file:
        assert np.abs(file.logits(IDS) - expected).max() < 5e-3 * np.abs(expected).max()
