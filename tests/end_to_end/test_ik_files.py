"""Files for ik_llama.cpp: its file types, its notation, its layouts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.quantize
from convert.options import ConvertOptions
from convert.pipeline import plan_run
from gguf_tools import open_gguf
from gguf_tools.format.ggml_types import by_name
from quantize.fill.sources import GGUFTensor
from quantize.plan.overrides import parse_custom_q
from quantize.plan.plan import PlanOptions
from quantize.repack import repack

MODEL = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"


def types_of(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


def rows_of(path: Path, name: str) -> np.ndarray:
    """Return a tensor's weights, float32."""
    with open_gguf(path) as file:
        return GGUFTensor(file, name).read_rows(0, file.tensors[name].n_rows)


def run(*words: object) -> int:
    return gguf_tools.commands.quantize.main([str(word) for word in words])


def test_a_file_type_with_interleaved_rows_has_the_weights_of_its_base_type(tmp_path: Path) -> None:
    assert run("--verify", MODEL, tmp_path / "ik.gguf", "Q4_0_R8") == 0
    assert run(MODEL, tmp_path / "llama.gguf", "Q4_0") == 0
    types = types_of(tmp_path / "ik.gguf")
    assert types["blk.1.ffn_up_exps.weight"] == "Q4_0_R8"
    assert types["token_embd.weight"] == "Q4_0"
    assert types["blk.1.attn_kv_a_mqa.weight"] == "Q8_0"
    with open_gguf(tmp_path / "ik.gguf") as file:
        assert file.get("general.file_type") == 202
    repack(tmp_path / "llama.gguf", tmp_path / "r.gguf", verify=True)
    assert types_of(tmp_path / "r.gguf")["blk.1.attn_kv_a_mqa.weight"] == "Q4_0_R8"
    repack(tmp_path / "r.gguf", tmp_path / "back.gguf", undo=True, verify=True)
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "llama.gguf").read_bytes()
    for name in ("blk.0.ffn_down.weight", "blk.1.ffn_up_exps.weight", "blk.2.ffn_down_shexp.weight"):
        ours = [rows_of(tmp_path / file, name) for file in ("ik.gguf", "llama.gguf")]
        np.testing.assert_array_equal(*ours)


def test_custom_q_names_types_after_those_of_tensor_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [r"ffn_down_exps=q8_0,ffn_.*_exps=q4_0_r8", "--tensor-type", r"blk\.2\.ffn_down_exps=Q8_0_R8"]
    assert run("--custom-q", *rules, MODEL, tmp_path / "out.gguf", "Q8_0_R8") == 0
    types = types_of(tmp_path / "out.gguf")
    assert [types[f"blk.{i}.ffn_down_exps.weight"] for i in (1, 2)] == ["Q8_0", "Q8_0_R8"]
    assert types["blk.1.ffn_gate_exps.weight"] == "Q4_0_R8"
    assert run("--dry-run", "--custom-q", "a,b=q8_0", MODEL, "Q8_0") == 2
    assert "found 'a' between commas, expected REGEX=TYPE" in capsys.readouterr().err


def planned(outtype: str, **options: Any) -> tuple[set[str], tuple[str, ...]]:
    """Return which tensors of attention the first layer gets, and the notes."""
    with plan_run(MODEL, None, ConvertOptions(outtype=outtype, **options), allow_problems=True) as run_:
        plan = run_.preparation.plan
        names = {t.name for t in plan.tensors if re.match(r"blk\.0\.attn_(k|v|kv)_b", t.name)}
        return {name.split(".")[2] for name in names}, plan.notes


BOTH, SPLIT = {"attn_kv_b", "attn_k_b", "attn_v_b"}, {"attn_k_b", "attn_v_b"}


def test_types_that_only_ik_llama_cpp_reads_bring_its_layout_of_attention() -> None:
    overrides = PlanOptions(overrides=parse_custom_q("ffn_up=iq3_k"))
    for outtype, options, layout in (
        ("Q8_0", {}, SPLIT),
        ("bf16", {}, SPLIT),
        ("IQ4_KS", {}, BOTH),
        ("Q8_0", {"types": overrides}, BOTH),
        ("Q8_0", {"types": PlanOptions(output_type=by_name("Q6_0"))}, BOTH),
        ("IQ4_KS", {"mla": "split"}, SPLIT),
        ("Q8_0", {"program": "ik_llama.cpp"}, BOTH),
    ):
        names, notes = planned(outtype, **options)
        assert names == layout, (outtype, options)
        assert any(note.startswith("attention has layout both") for note in notes) == (layout == BOTH)
    assert planned("IQ4_KS")[1][0] == (
        "attention has layout both, as ik_llama.cpp wants it, the only program that reads IQ4_KS"
        " (--mla names another)"
    )


def test_the_commands_take_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry-run", MODEL, "Q4_0_R8") == 0
    assert "blk.0.attn_kv_b.weight" in capsys.readouterr().out
    assert run("--dry-run", "--mla", "split", MODEL, "Q4_0_R8") == 0
    assert "blk.0.attn_kv_b.weight" not in capsys.readouterr().out
    assert gguf_tools.commands.convert.main(["--dry-run", "--outtype", "Q4_0_R8", str(MODEL)]) == 0
    assert "blk.0.attn_kv_b.weight" in capsys.readouterr().out
    assert gguf_tools.commands.convert.main([str(MODEL), "--outfile", str(tmp_path / "in.gguf")]) == 0
    assert run("--dry-run", "--mla", "split", tmp_path / "in.gguf", "Q4_0_R8") == 2
    assert "gguf-tools mla-layout changes the layout of a file" in capsys.readouterr().err
