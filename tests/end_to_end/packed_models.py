"""Whole models with packed weights, and beside each the same model with its weights decoded.

The packers of tests/support make the checkpoints from the layouts alone, and decode them as well: the loaders
have no part in the expected values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import convert
from gguf_tools import open_gguf
from tests.support import oracle
from tests.support.checkpoints import load_transformers, shard, transformers_checkpoint
from tests.support.packers import Packed, pack_projections
from tests.support.tokenizer_files import VOCAB_SIZES, copy_tokenizer

TEXT = "def mean(values):\n    return sum(values) / len(values)\n\n# 中文, 日本語 and 3.14159\n" * 3
SIZES = {"q_lora_rank": 64, "moe_intermediate_size": 64, "vocab_size": VOCAB_SIZES["tiny"]}

Pack = Callable[[str, np.ndarray], Packed | None]
"""Callback for a module's name and weight: the packed weight, None if it stays plain."""


@dataclass(frozen=True)
class Format:
    """How modules are packed, and what config.json says."""

    pack: Pack
    quantization: dict[str, Any]


def packed_model(folder: Path, format_: Format, **changes: Any) -> tuple[Path, Path]:
    """Return two Hugging Face folders below `folder`: the packed model, and the decoded one.

    changes  to the model's sizes
    """
    packed = transformers_checkpoint(folder / "hf", "v3", **(SIZES | changes))
    decoded = folder / "decoded"
    pack_projections(packed, decoded, format_.pack, format_.quantization)
    for model in (packed, decoded):
        copy_tokenizer("tiny", model)
    return packed, decoded


def error_of_logits(folder: Path, format_: Format) -> float:
    """Return how far llama.cpp, on what we convert, is from transformers on the decoded weights."""
    import torch

    packed, decoded = packed_model(folder, format_)
    shard(packed, 4)
    convert.convert(packed, folder / "model.gguf", outtype="f32")
    with oracle.Model(folder / "model.gguf") as model:
        ids = model.tokenize(TEXT)
        logits = model.logits(ids, n_threads=1)
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = load_transformers(decoded)(torch.tensor([ids])).logits[0].numpy()
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def assert_same_q8_0(folder: Path, format_: Format) -> None:
    """Q8_0 of a packed checkpoint is Q8_0 of its decoded weights, with nothing in between."""
    for model in packed_model(folder, format_):
        convert.convert(model, folder / f"{model.name}.gguf", outtype="q8_0")
    with open_gguf(folder / "hf.gguf") as found, open_gguf(folder / "decoded.gguf") as expected:
        assert set(found.tensors) == set(expected.tensors)
        for tensor in found.tensors:
            assert np.array_equal(found.raw(tensor), expected.raw(tensor)), tensor
