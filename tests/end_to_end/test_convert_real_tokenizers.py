"""Small models with the real tokenizers, converted and run by llama.cpp: the same logits, the same ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from tests.support import oracle
from tests.support.checkpoints import (
    load_transformers,
    shard,
    to_fp8,
    to_older_spelling,
    transformers_checkpoint,
    write_checkpoint,
)
from tests.support.tokenizer_files import VOCAB_SIZES, copy_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

TEXT = """def area(r: float) -> float:
    \"\"\"圆的面积 — 円の面積 🙂👩‍💻\"\"\"
\treturn 3.14159265 * r**2   # 1234567890 + 0x1F

Привет, мир! Ça va? naïve café; Ⅷ ½ ²³ 你好，世界。こんにちは、カタカナ 한국어
{"a": [1, 22, 333, 4444], 'b': null}\r\n\r\n    trailing\x20\x20
"""


@dataclass(frozen=True)
class Model:
    """A small model: its style with changes, what is done to its folder, and the name of its tokenizer."""

    style: str
    tokenizer: str
    then: Callable[[Path], Path] = lambda folder: folder
    changes: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "V3": Model("v3", "deepseek-v3"),
    "V3 in FP8, sharded": Model("v3", "deepseek-v3", lambda folder: shard(to_fp8(folder))),
    "V2": Model("v2", "deepseek-llm", to_older_spelling),
    "V2-Lite": Model("v2-lite", "deepseek-llm"),
}


def decoded(folder: Path, target: Path) -> Path:
    """Write the checkpoint in `folder` again with decoded weights, which transformers can run."""
    with Checkpoint(folder) as checkpoint:
        loader = open_weights(checkpoint)
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        tensors = {}
        for name in loader.names():
            weight = loader.weight(name)
            rows = weight.read_rows(0, int(np.prod(weight.shape[:-1])))
            tensors[name] = rows.reshape(weight.shape).astype(np.float32)
    return write_checkpoint(target, config, tensors)


ALWAYS = "V3 in FP8, sharded"
"""The model that has most to it; tests/imatrix/forward/test_text.py compares what both tokenizers cut."""

CASES = [pytest.param(name, marks=[] if name == ALWAYS else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_and_cuts_as_the_original_does(name: str, tmp_path: Path) -> None:
    import tokenizers
    import torch

    model = MODELS[name]
    sizes = {"vocab_size": VOCAB_SIZES[model.tokenizer], **model.changes}
    folder = model.then(transformers_checkpoint(tmp_path / "hf", model.style, **sizes))
    copy_tokenizer(model.tokenizer, folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    convert.convert(folder, tmp_path / "model.gguf", outtype="f32")
    with oracle.Model(tmp_path / "model.gguf") as loaded:
        ids = loaded.tokenize(TEXT)
        assert ids == library.encode(TEXT, add_special_tokens=False).ids
        found = loaded.logits(ids)
    with torch.no_grad():
        original = load_transformers(decoded(folder, tmp_path / "decoded"))
        expected = original(torch.tensor([ids])).logits[0].numpy()
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= 1e-5
