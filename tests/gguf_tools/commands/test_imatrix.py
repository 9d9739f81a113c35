from __future__ import annotations

import json
from pathlib import Path

import pytest

from gguf_tools.commands.imatrix import main

GOLDEN = Path(__file__).parents[2] / "golden" / "imatrix"
GGUF, DAT = GOLDEN / "tiny-deepseek-v3.imatrix.gguf", GOLDEN / "tiny-deepseek-v3.imatrix.dat"


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json", str(GGUF)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["chunk_count"], shown["chunk_size"]) == (64, 512)
    entries = {entry["name"]: entry for entry in shown["entries"]}
    experts = entries["blk.1.ffn_down_exps.weight"]
    assert (experts["n_mats"], experts["n_cols"]) == (16, 256)
    # every token goes to 4 of the 16 experts
    assert experts["min_count"] < 64 * 512 * 4 / 16 < experts["max_count"]
    heads = entries["blk.0.attn_k_b.weight"]
    assert (heads["n_mats"] * heads["n_cols"], heads["max_count"]) == (128 * 4, 64 * 512)


def test_show_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(DAT)]) == 0
    out = capsys.readouterr().out
    assert "form dat" in out
    assert "blk.2.ffn_up_exps.weight" in out


def test_convert_says_what_dat_can_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(GGUF), str(tmp_path / "m.dat")]) == 0
    assert (tmp_path / "m.dat").read_bytes() == DAT.read_bytes()
    out = capsys.readouterr().out
    assert "does not hold counts per expert of 6 entries" in out
    assert "does not hold the chunk size (512 tokens)" in out


def test_a_file_that_is_neither_form_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.txt").write_text("not importances at all, just a text\n")
    assert main(["convert", str(tmp_path / "m.txt"), str(tmp_path / "m.gguf")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("imatrix: error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("n_chunks", [1, 24, 25, 1000])
def test_a_long_text_shows_few_running_perplexities(n_chunks: int) -> None:
    torch = pytest.importorskip("torch")
    from imatrix.forward.logits import Perplexity
    from imatrix.options import perplexity_lines

    perplexity = Perplexity()
    for _ in range(n_chunks):
        perplexity.add_chunk(torch.ones(2, dtype=torch.float64))
    *steps, total = perplexity_lines(perplexity)
    assert len(steps) <= 5
    assert f"[{n_chunks}] 2.7183" in steps[-1]
    assert total.startswith("perplexity 2.7183")
