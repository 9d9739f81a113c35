"""llama.cpp loads what the editing commands write, and refuses what they refuse without --force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import open_gguf
from gguf_tools.commands.main import main
from tests.support import oracle

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

MakeFile = Callable[[str], Path]
IDS = [1, 5, 9, 200, 17]


def logits(path: Path) -> np.ndarray:
    with oracle.Model(path) as model:
        return model.logits(IDS)


@pytest.mark.parametrize(
    "flags", ["--max-tensors 7", "--max-size 2M", "--no-tensor-first-split"], ids=lambda text: text.split()[0]
)
def test_llama_cpp_loads_what_is_split_and_merged(tiny_gguf: MakeFile, tmp_path: Path, flags: str) -> None:
    whole = tiny_gguf("bf16")
    assert main(["split", str(whole), str(tmp_path / "m"), *flags.split()]) == 0
    first, *others = sorted(tmp_path.iterdir())
    assert others
    np.testing.assert_array_equal(logits(first), logits(whole))
    assert main(["merge", str(first), str(tmp_path / "merged.gguf")]) == 0
    assert (tmp_path / "merged.gguf").read_bytes() == whole.read_bytes()


def test_llama_cpp_loads_edited_models(tiny_gguf: MakeFile, tmp_path: Path) -> None:
    whole = tiny_gguf("bf16")
    assert main(["split", str(whole), str(tmp_path / "m"), "--max-tensors", "20"]) == 0
    first = next(path for path in tmp_path.iterdir() if "-00001-of-" in path.name)
    edits = [
        ["set", "general.name=y", "tokenizer.chat_template=str:{{ messages }}", "general.tags=[str]:a,b"],
        ["set", "general.alignment=u32:256"],
        ["remove-key", "general.tags"],
        ["set", "tokenizer.ggml.add_bos_token=false"],
    ]
    for command, *arguments in edits:
        assert main([command, str(first), *arguments]) == 0
        np.testing.assert_array_equal(logits(first), logits(whole))
    facts = oracle.read_gguf(first)
    assert facts.alignment == 256
    assert facts.metadata["general.name"] == "y"
    assert facts.metadata["tokenizer.chat_template"] == "{{ messages }}"
    with open_gguf(first) as source:
        assert source.get("tokenizer.ggml.add_bos_token") is False


def test_llama_cpp_finds_a_renamed_tensor_under_its_new_name(tiny_gguf: MakeFile, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert main(["rename", str(tiny_gguf("bf16")), "output_norm.weight=other.weight", "-o", str(path)]) == 0
    with pytest.raises(RuntimeError, match=r"tensor 'output_norm\.weight' not found"):
        oracle.Model(path)
    assert main(["rename", str(path), "other.weight=output_norm.weight"]) == 0
    assert path.read_bytes() == tiny_gguf("bf16").read_bytes()


@pytest.mark.parametrize(
    "assignment",
    [
        "general.architecture=[str]:deepseek2",
        "deepseek2.block_count=i32:3",
        "deepseek2.context_length=u64:256",
        "deepseek2.attention.head_count=i32:4",
        "deepseek2.attention.layer_norm_rms_epsilon=f64:1e-6",
        "deepseek2.expert_weights_norm=u8:1",
        "deepseek2.attention.kv_lora_rank=[u32]:32",
        "deepseek2.rope.scaling.type=u32:1",
        "tokenizer.ggml.model=[str]:gpt2",
        "tokenizer.ggml.bos_token_id=i32:0",
        "tokenizer.ggml.add_bos_token=u8:1",
        "tokenizer.ggml.token_type=[u32]:1",
        "general.file_type=i32:7",
    ],
)
def test_kinds_that_need_force_are_those_that_llama_cpp_refuses(
    tiny_gguf: MakeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], assignment: str
) -> None:
    path = tmp_path / "m.gguf"
    command = ["set", str(tiny_gguf("bf16")), assignment, "-o", str(path)]
    assert main(command) == 1
    assert "llama.cpp reads" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    with pytest.raises(RuntimeError, match="can't load it"):
        oracle.Model(path)
