"""Merging, checking and repairing files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import convert
from gguf_tools.commands.imatrix import main
from gguf_tools.errors import BadImportance
from gguf_tools.findings import Finding
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from imatrix.check import CheckedModel, as_text, check, read_model
from imatrix.merge import merge
from imatrix.repair import repair
from imatrix.store import load, save
from quantize.importances.entries import Importance, ImportanceFile
from tests.support import oracle

GOLDEN = Path(__file__).parents[1] / "golden" / "imatrix"
GGUF, DAT = GOLDEN / "tiny-deepseek-v3.imatrix.gguf", GOLDEN / "tiny-deepseek-v3.imatrix.dat"
EXPERTS = "blk.1.ffn_up_exps.weight"


def importance(values: list[list[float]], counts: list[float]) -> Importance:
    return Importance(np.array(values, np.float32), np.array(counts, np.float32))


def a_file(entries: dict[str, Importance], name: str = "a", chunk_size: int = 8) -> ImportanceFile:
    return ImportanceFile(entries, (f"{name}.txt",), 2, chunk_size, Path(f"{name}.gguf"))


# ---- merge


def test_merge_adds_up_per_expert() -> None:
    one = a_file({EXPERTS: importance([[1, 2], [0, 0]], [3, 0])})
    other = a_file(
        {EXPERTS: importance([[5, 5], [7, 8]], [1, 2]), "output.weight": importance([[1]], [9])}, "b"
    )
    merged = merge([one, other])
    found = merged.importances
    assert found.entries[EXPERTS].values.tolist() == [[6, 7], [7, 8]]
    assert found.entries[EXPERTS].counts.tolist() == [4, 2]
    assert found.entries["output.weight"].counts.tolist() == [9]
    assert (found.chunk_count, found.chunk_size, found.datasets) == (4, 8, ("a.txt", "b.txt"))
    assert merged.notes == ("a.gguf has no data for 1 entries (output.weight)",)


def test_merging_the_two_forms_of_one_file_doubles_it() -> None:
    merged = merge([load(GGUF), load(DAT)])
    assert "counts chunks of unknown size: taken for 512 tokens" in merged.notes[0]
    expected = load(GGUF).entries
    for name, entry in merged.importances.entries.items():
        assert np.allclose(entry.weights(), expected[name].weights(), rtol=1e-5), name
        if "_exps" not in name:
            assert entry.counts.tolist() == [2 * 64 * 512]


def test_files_that_do_not_match() -> None:
    one, other = a_file({"x": importance([[1, 2]], [1])}), a_file({"x": importance([[1, 2, 3]], [1])}, "b")
    with pytest.raises(BadImportance, match=r"x: a.gguf has 2 values and 1 counts, b.gguf has 3 values"):
        merge([one, other])


def test_merge_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert main(["merge", str(GGUF), str(GGUF), "-o", str(out)]) == 0
    assert load(out).chunk_count == 128
    assert main(["--in-file", str(GGUF), "-o", str(tmp_path / "same.gguf")]) == 0
    assert (tmp_path / "same.gguf").read_bytes() == GGUF.read_bytes()
    cut = replace(load(GGUF), entries={"blk.0.ffn_up.weight": importance([[1]], [1])})
    save(tmp_path / "other.gguf", cut)
    capsys.readouterr()
    before = out.read_bytes()
    assert main(["merge", str(GGUF), str(tmp_path / "other.gguf"), "-o", str(out)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "of another model?" in err
    assert out.read_bytes() == before


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_llama_cpp_reads_what_is_merged(tmp_path: Path) -> None:
    merged = merge([load(GGUF), load(GGUF)]).importances
    save(tmp_path / "m.gguf", merged)
    found = oracle.read_gguf(tmp_path / "m.gguf")
    assert found.metadata["imatrix.chunk_count"] == 128
    raw = (tmp_path / "m.gguf").read_bytes()
    for name, entry in merged.entries.items():
        facts = found.tensors[f"{name}.in_sum2"]
        start = found.data_offset + facts.offset
        values = np.frombuffer(raw[start : start + facts.n_bytes], "<f4")
        assert np.array_equal(values, entry.values.reshape(-1))


# ---- check


def texts(findings: list[Finding]) -> list[str]:
    return [as_text(finding) for finding in findings]


def test_check_of_numbers() -> None:
    found = check(
        a_file(
            {
                "a": importance([[1, np.nan]], [1]),
                "b": importance([[1, -1]], [1]),
                "c": importance([[0, 0]], [4]),
                "d": importance([[0, 0]], [0]),
                "e": importance([[1, 1], [0, 0]], [4, 0]),
            }
        )
    )
    assert texts(found) == [
        "error: a: 1 of 2 values are not finite",
        "error: b: 1 of 2 values are negative",
        "error: c: all sums are zero",
        "error: d: has seen nothing",
        "warning: c: 2 columns at zero",
        "warning: e: 1 of 2 matrices never seen",
    ]


def test_check_against_a_model(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.convert(tiny_folder, tmp_path / "m.gguf", outtype="bf16")
    for model in (tiny_folder, tmp_path / "m.gguf"):
        assert main(["check", str(GGUF), "--model", str(model), "--recipe", "IQ2_XS"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "warning: IQ2_XS: output.weight becomes Q5_K without data",
            "warning: IQ2_XS: token_embd.weight becomes Q2_K without data",
            f"{GGUF}: 0 errors, 2 warnings",
        ]
    headers = read_model(tiny_folder)
    golden = load(GGUF)
    entries = dict(golden.entries)
    del entries["blk.1.attn_output.weight"]
    entries["blk.7.attn_output.weight"] = entries["blk.0.attn_q_a.weight"]
    entries["blk.0.ffn_up.weight"] = importance([[1, 2]], [1])
    found = texts(check(replace(golden, entries=entries), headers, "IQ2_XS"))
    assert any("blk.0.ffn_up.weight: its importances have 2 values, expected 256" in text for text in found)
    assert "error: blk.7.attn_output.weight: not in the model" in found
    assert "warning: blk.1.attn_output.weight: no data" in found
    assert any("IQ2_XS: blk.1.attn_output.weight becomes" in text for text in found)
    save(tmp_path / "bad.gguf", replace(golden, entries=entries))
    assert main(["check", str(tmp_path / "bad.gguf"), "--model", str(tiny_folder)]) == 1
    assert main(["check", str(GGUF), "--recipe", "IQ2_XS"]) == 2


@pytest.mark.parametrize("has", ["ffn_gate_up_exps", "ffn_up_exps", "ffn_down_exps"])
def test_data_of_a_merged_matrix_are_no_stray_ones(has: str) -> None:
    contents = a_file({"blk.0.ffn_gate_up_exps.weight": importance([[1, 2], [3, 4]], [5, 6])})
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}
    model = CheckedModel((TensorInfo(f"blk.0.{has}.weight", (2, 4, 2), F32),), metadata)
    stray = [finding.text for finding in check(contents, model) if finding.kind == "stray data"]
    assert len(stray) == (has == "ffn_down_exps")


# ---- repair


def test_repair_lists_every_change() -> None:
    contents = a_file(
        {
            "blk.0.attn_v_b.weight": importance([[1, 2, 3, 6]], [5]),
            "blk.1.attn_kv_b.weight": importance([[1, 2]], [5]),
            "blk.1.ffn_up_exps.weight": importance([[4, 8], [0, 0]], [2, 0]),
            "blk.2.ffn_gate.weight": importance([[1, 1]], [1]),
        }
    )
    done = repair(contents, n_heads=2)
    entries = done.importances.entries
    assert entries["blk.0.attn_kv_b.weight"].values.tolist() == [[2, 4]]
    assert entries["blk.1.attn_v_b.weight"].values.tolist() == [[1, 2, 1, 2]]
    assert entries["blk.1.ffn_up_exps.weight"].values.tolist() == [[4, 8], [3, 3]]
    assert entries["blk.1.ffn_gate_exps.weight"].counts.tolist() == [2, 1]
    assert entries["blk.2.ffn_up.weight"].values.tolist() == [[1, 1]]
    assert done.changes == (
        "blk.0.attn_kv_b.weight: from blk.0.attn_v_b.weight",
        "blk.1.attn_v_b.weight: from blk.1.attn_kv_b.weight",
        "blk.1.ffn_gate_exps.weight: from blk.1.ffn_up_exps.weight, which multiplies the same activations",
        "blk.2.ffn_up.weight: from blk.2.ffn_gate.weight, which multiplies the same activations",
        "blk.1.ffn_up_exps.weight: 1 of 2 matrices had seen nothing, now neutral (1)",
        "blk.1.ffn_gate_exps.weight: 1 of 2 matrices had seen nothing, now neutral (1)",
    )
    assert repair(done.importances, n_heads=2).changes == ()


def test_repair_makes_what_the_model_has_of_merged_matrices() -> None:
    contents = a_file(
        {
            "blk.0.ffn_gate_up_exps.weight": importance([[1, 2], [3, 4]], [5, 6]),
            "blk.0.attn_q.weight": importance([[1, 2]], [5]),
        }
    )
    names = [f"blk.0.{part}.weight" for part in ("attn_qkv", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")]
    done = repair(contents, names=names)
    assert set(done.importances.entries) == {*contents.entries, *names[:3]}
    assert done.importances.entries[names[1]] == contents.entries["blk.0.ffn_gate_up_exps.weight"]
    assert done.changes == tuple(
        f"blk.0.{new}.weight: from blk.0.{old}.weight, which multiplies the same activations"
        for new, old in (
            ("attn_qkv", "attn_q"),
            ("ffn_gate_exps", "ffn_gate_up_exps"),
            ("ffn_up_exps", "ffn_gate_up_exps"),
        )
    )
    assert repair(contents).changes == ()


def test_repair_refuses_what_it_can_not_know() -> None:
    with pytest.raises(BadImportance, match="expected a finite number"):
        repair(a_file({"a": importance([[np.inf]], [1])}))


def test_repair_command(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert main(["repair", str(GGUF), "-o", str(out), "--model", str(tiny_folder)]) == 0
    assert "3 changes" in capsys.readouterr().out
    found = load(out).entries["blk.0.attn_kv_b.weight"]
    assert (found.values.shape, found.counts.tolist()) == ((1, 256), [64 * 512])
