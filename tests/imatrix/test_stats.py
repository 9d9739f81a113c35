"""Statistics, against llama-imatrix's formulas spelled out, and pictures of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.commands.imatrix import main
from imatrix.stats import as_json, entry_stats, layer_stats, plot, stats_lines
from imatrix.store import load
from quantize.importances.entries import Importance, ImportanceFile

GOLDEN = Path(__file__).parents[1] / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"


def test_numbers_of_an_entry() -> None:
    values = np.array([[2.0, 4.0, 0.0, 2.0], [0, 0, 0, 0], [3.0, 3.0, 3.0, 39.0]], np.float32)
    before = np.ones((3, 4), np.float32)
    contents = ImportanceFile(
        {
            "blk.1.ffn_up_exps.weight": Importance(values, np.array([2, 0, 3], np.float32)),
            "blk.0.ffn_up_exps.weight": Importance(before, np.array([9, 1, 100], np.float32)),
        }
    )
    first, second = entry_stats(contents)
    assert (first.layer, second.layer, second.kind) == (0, 1, "ffn_up_exps")
    means = [1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 13.0]
    assert second.total == pytest.approx(20)
    assert second.mean == pytest.approx(2.5)
    assert (second.min, second.max, second.n_elements) == (0, 13, 8)
    deviation = math.sqrt(sum(m * m for m in means) / 8 - 2.5**2)
    assert second.deviation == pytest.approx(deviation)
    assert second.active == pytest.approx(7 / 8)
    entropy = -sum(m / 20 * math.log2(m / 20) for m in means if m)
    assert second.entropy == pytest.approx(entropy)
    assert second.entropy_share == pytest.approx(entropy / 3)
    assert second.outliers == pytest.approx(1 / 8)
    assert second.similarity == pytest.approx(values.sum() / np.linalg.norm(values) / math.sqrt(12))
    assert first.similarity is None
    assert (second.n_mats, second.n_unseen, second.n_zero_columns) == (3, 1, 1)
    assert (first.n_unseen, first.n_rare) == (0, 0)
    layers = layer_stats((first, second))
    assert [layer.total for layer in layers] == [pytest.approx(first.total), pytest.approx(20)]
    assert "1 of 3 matrices never seen, 1 columns at zero" in "\n".join(stats_lines(contents))


def test_rarely_seen_and_never_seen() -> None:
    counts = np.array([100, 100, 10, 11, 0], np.float32)
    contents = ImportanceFile({"blk.0.ffn_up_exps.weight": Importance(np.ones((5, 2), np.float32), counts)})
    (entry,) = entry_stats(contents)
    assert (entry.n_unseen, entry.n_rare) == (1, 0)  # the median is 11
    nothing = ImportanceFile({"a.weight": Importance(np.zeros((1, 2), np.float32), np.zeros(1, np.float32))})
    (entry,) = as_json(nothing)["entries"]
    assert entry["mean"] is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_comes_out_as_such(bad: float) -> None:
    values = np.ones((2, 4), np.float32)
    values[1, 2] = bad
    entries = {f"blk.{i}.ffn_up_exps.weight": Importance(values, np.ones(2, np.float32)) for i in range(2)}
    for entry in entry_stats(ImportanceFile(entries, ("t",), 1, 512)):
        np.testing.assert_equal(entry.total, bad)
        assert entry.n_elements == 8


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["stats", str(GOLDEN)]) == 0
    assert "means per layer" in capsys.readouterr().out
    assert main(["stats", "--json", str(GOLDEN)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["entries"]) == len(load(GOLDEN).entries)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2]
    assert sum(found["coverage"]["blk.1.ffn_up_exps.weight"]) == 64 * 512 * 4


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["stats", str(GOLDEN), "--plot", str(tmp_path / "m.png")]) == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["stats", str(GOLDEN), "--plot", str(tmp_path / "m.svg")]) == 0
    svg = (tmp_path / "m.svg").read_text()
    assert "mean squared activation" in svg
    assert "prefers-color-scheme: dark" in svg
    assert "#00ff" not in svg, "a colour that stands for a name is left"
    capsys.readouterr()
    assert main(["stats", str(GOLDEN), "--plot", str(tmp_path / "m.html")]) == 1
    assert "m.html: a picture can't be 'html', expected one of " in capsys.readouterr().err
    assert main(["stats", str(GOLDEN), "--plot", str(tmp_path / "no" / "m.png")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_plot_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gguf_tools.drawing.find_spec", lambda name: None)
    assert main(["stats", str(GOLDEN), "--plot", str(tmp_path / "m.png")]) == 1
    assert "--plot needs matplotlib: pip install 'gguf-tools[report]'" in capsys.readouterr().err


def test_a_dense_model_fills_its_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    rows = np.arange(1, 65, dtype=np.float32)[None]
    entries = {
        f"blk.{layer}.{kind}.weight": Importance(rows * 10.0**layer, np.ones(1, np.float32))
        for layer in range(4) for kind in kinds
    }  # fmt: skip
    plot(ImportanceFile(entries), tmp_path / "dense.png")
    drawn = image.imread(tmp_path / "dense.png")[..., :3].min(2) < 0.97
    columns = np.flatnonzero(drawn.mean(0) > 0.3)
    assert columns[0] < 0.2 * drawn.shape[1]
    assert columns[-1] > 0.8 * drawn.shape[1]
    assert len(columns) > 0.6 * drawn.shape[1]
