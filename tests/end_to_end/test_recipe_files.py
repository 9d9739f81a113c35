"""A recipe file does what its options do, on the command line and from Python, and lint predicts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools.commands.quantize
import quantize
from gguf_tools import open_gguf

RECIPE = r"""
name: mine
file_type: Q4_K_S
tensor-type:
  - blk\.[01]\.attn_output=Q8_0
  - ffn_down_exps=Q6_K
fallback:
  - blk\.0\.attn_k_b=Q8_0
  - attn_k_b=Q4_1
token-embedding-type: Q5_0
"""

SAME_WORDS = [
    *("--tensor-type", r"blk\.[01]\.attn_output=Q8_0", "--tensor-type", "ffn_down_exps=Q6_K"),
    *("--fallback", r"blk\.0\.attn_k_b=Q8_0", "--fallback", "attn_k_b=Q4_1"),
    *("--token-embedding-type", "Q5_0"),
]


def test_a_recipe_file_is_its_options(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(tiny_gguf("bf16"))
    recipe, by_file, by_words, by_python = (
        tmp_path / name for name in ("r.yaml", "file.gguf", "words.gguf", "python.gguf")
    )
    recipe.write_text(RECIPE)
    assert gguf_tools.commands.quantize.main([source, str(by_file), str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "Q4_1" in out, out
    assert gguf_tools.commands.quantize.main([*SAME_WORDS, source, str(by_words), "Q4_K_S"]) == 0
    quantize.quantize(source, by_python, str(recipe))
    assert by_file.read_bytes() == by_words.read_bytes() == by_python.read_bytes()
    with open_gguf(by_file) as file:
        found = {name: tensor.type.name for name, tensor in file.tensors.items()}
        assert file.get("general.file_type") == 14
    assert [found[f"blk.{i}.attn_k_b.weight"] for i in range(3)] == ["Q8_0", "Q4_1", "Q4_1"]
    assert [found[f"blk.{i}.attn_output.weight"] for i in range(3)] == ["Q8_0", "Q8_0", "Q4_K"]
    assert found["token_embd.weight"] == "Q5_0"

    capsys.readouterr()
    assert gguf_tools.commands.quantize.main(["lint", "--json", str(recipe), source]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == by_file.stat().st_size


def test_the_default_output_has_the_recipes_name(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    source.symlink_to(tiny_gguf("bf16"))
    recipe = tmp_path / "r.json"
    recipe.write_text(json.dumps({"name": "small", "file_type": "Q4_0", "pure": True}))
    result = quantize.quantize(source, None, str(recipe))
    assert result.paths == (tmp_path / "ggml-model-small.gguf",)


def test_a_fallback_that_does_not_fit_stops_the_run(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "q.gguf"
    words = ["--fallback", "attn_k_b=Q6_K", str(tiny_gguf("bf16")), str(output), "Q4_K_M"]
    assert gguf_tools.commands.quantize.main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in ("attn_k_b.weight", "row length 128", "Q6_K"))
    assert not output.exists()
