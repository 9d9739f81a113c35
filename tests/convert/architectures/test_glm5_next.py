"""GLM-5 Next: what its config.json may say, and files that llama.cpp loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, ToolkitError, UnsupportedCheckpoint
from tests.support import oracle
from tests.support.checkpoints import edit_config
from tests.support.published_models import write


def changed(folder: Path, **fields: Any) -> Path:
    return edit_config(folder, lambda config: config["text_config"].update(fields))


@pytest.mark.parametrize(
    ("field", "value", "error", "told"),
    [
        ("hc_mult", 2, UnsupportedCheckpoint, "hc_mult is 2, expected 4"),
        ("qk_rope_head_dim", 8, UnsupportedCheckpoint, "qk_rope_head_dim is 8, expected 0"),
        ("mla_use_nope", False, UnsupportedCheckpoint, "mla_use_nope"),
        ("q_lora_rank", None, BadConfig, "compressed queries"),
        ("index_kpool", 1, BadConfig, "index_kpool is 1"),
        ("index_topk", 15, BadConfig, r"a multiple of index_kpool \(4\)"),
        ("indexer_types", ["full", "shared", "full", "full", "full"], BadConfig, "'full' for layer 1"),
        ("linear_attn_config", {"num_heads": 8}, UnsupportedCheckpoint, r"linear_attn_config\.num_heads"),
        ("linear_attn_config", {"num_heads": 4, "gate_lower_bound": 5.0}, BadConfig, "a number below 0"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    field: str, value: Any, error: type[ToolkitError], told: str, tmp_path: Path
) -> None:
    folder = changed(write("glm-5.3-flash", tmp_path / "m"), **{field: value})
    with pytest.raises(error, match=told):
        convert.convert(folder, tmp_path / "m.gguf")


def test_fields_have_two_spellings(tmp_path: Path) -> None:
    """transformers saves fields of KDA beside the others, and its own name of layers with an indexer."""
    folder = write("glm-5.3-flash", tmp_path / "m")
    convert.convert(folder, tmp_path / "lists.gguf", provenance=False)
    kinds = ["linear_attention", "indexed_attention"] * 2 + ["indexed_attention"]
    net = {
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
    }
    changed(folder, layer_types=kinds, linear_attn_config=None, **net)
    convert.convert(folder, tmp_path / "fields.gguf", provenance=False)
    assert (tmp_path / "fields.gguf").read_bytes() == (tmp_path / "lists.gguf").read_bytes()


def test_a_bound_of_null_is_that_of_transformers(tmp_path: Path) -> None:
    net = {"num_heads": 4, "head_dim": 16, "gate_lower_bound": None}
    folder = changed(write("glm-5.3-flash", tmp_path / "m"), linear_attn_config=net)
    convert.convert(folder, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("glm5-next.kda.gate_lower_bound") == -5.0


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_llama_cpp_computes_it(tmp_path: Path) -> None:
    convert.convert(write("glm-5.3-flash", tmp_path / "m"), tmp_path / "m.gguf", outtype="bf16")
    with oracle.Model(tmp_path / "m.gguf") as model:
        logits = model.logits(list(range(20, 80)))
    assert np.isfinite(logits).all()
    assert np.abs(logits).max() > 0
