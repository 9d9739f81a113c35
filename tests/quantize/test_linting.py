from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.quantize
from quantize.importances.entries import Importance
from quantize.linting import lint, lint_lines
from quantize.plan.plan import PlanOptions
from quantize.plan.recipes import RECIPES
from tests.quantize.plan.layouts import LAYOUTS, write_header


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of V2-Lite's size without any weight."""
    return write_header(LAYOUTS["tied"], tmp_path / "model.gguf")


def write_recipe(folder: Path, **entries: object) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_what_a_recipe_would_do(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        file_type="Q4_K_M",
        **{
            "tensor-type": ["attn_output=Q8_0", "blk.3.attn_output=Q4_0", "attn_q=Q8_0"],
            "fallback": ["blk.0.attn_k_b=F16"],
        },
    )
    report = lint(recipe, model)
    assert not report.stops
    *warnings, last = lint_lines(report)
    assert warnings == [
        "warning: override 'blk.3.attn_output=Q4_0' is shadowed by 'attn_output=Q8_0', which came first:"
        " blk.3.attn_output.weight",
        "warning: override 'attn_q=Q8_0' matches no tensor that can be quantized",
        "warning: Q8_0 instead of Q6_K, because rows of 1408 can't be cut into blocks of 256: 13 of 190"
        " tensors: blk.0-2,5,8,11,14,17,20,23-26.ffn_down_exps.weight; whole blocks with"
        " pad, another type with fallbacks",
        "warning: Q5_0 instead of Q4_K, because rows of 1408 can't be cut into blocks of 256: 14 of 190"
        " tensors: blk.3-4,6-7,9-10,12-13,15-16,18-19,21-22.ffn_down_exps.weight; whole blocks with"
        " pad, another type with fallbacks",
        "warning: 32.4 % of the weights have another type than the one asked for; pad=256: padding with"
        " zeros (deepseek2.expert_feed_forward_length 1408 -> 1536): 10,293,460,992 bytes of tensors with it,"
        " 10,367,102,976 without (-0.71 %); 14 tensors Q4_K instead of Q5_0; 13 tensors Q6_K instead of Q8_0",
        "note: F16 instead of Q4_K, because rows of 128 can't be cut into blocks of 256: 1 of 190 tensors:"
        " blk.0.attn_k_b.weight",
        "note: Q5_0 instead of Q4_K, because rows of 128 can't be cut into blocks of 256: 26 of 190 tensors:"
        " blk.1-26.attn_k_b.weight; another type with fallbacks",
    ]
    assert last == "mine: 0 errors, 5 warnings; 10,367,118,848 bytes (9.66 GiB), 5.3564 bits per weight"


def test_missing_importances_stop(model: Path) -> None:
    report = lint("IQ2_XXS", model)
    assert report.stops
    data = report.to_json()
    (error,) = [f for f in data["findings"] if f["kind"] == "importances needed"]
    assert error["level"] == "error"
    assert "blk.26.ffn_gate_exps.weight" in error["tensors"]
    assert data["total_bytes"] > 0


def test_each_of_several_errors_is_found(model: Path) -> None:
    wrong = {"blk.0.attn_output.weight": Importance(np.ones((1, 5), np.float32), np.ones(1, np.float32))}
    report = lint("IQ2_XXS", model, importances=wrong)
    kinds = {finding.kind.value for finding in report.findings if finding.stops}
    assert {"importances do not fit", "importances needed"} <= kinds


def test_without_a_plan_there_is_no_size(model: Path, tmp_path: Path) -> None:
    report = lint(write_recipe(tmp_path, file_type="Q4_0", fallback=["k_b=Q4_K"]), model)
    assert not report.stops
    report = lint(write_recipe(tmp_path, file_type="Q4_K_S", fallback=["k_b=Q4_K"]), model)
    assert report.stops
    assert report.to_json()["total_bytes"] is None
    lines = list(lint_lines(report))
    assert lines[0].startswith(
        "error: rows do not fit the fallback that is named for blk.0-26.attn_k_b.weight"
    )
    assert lines[1] == "mine: 1 error, 0 warnings; no plan, so no size"


def test_options_reach_the_report(model: Path) -> None:
    plain, pure = lint("Q4_K_M", model), lint("Q4_K_M", model, options=PlanOptions(pure=True))
    assert plain.preparation is not None
    assert pure.preparation is not None
    assert pure.preparation.total_bytes < plain.preparation.total_bytes


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q2_K", "Q8_0"])
def test_the_command(file_type: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.quantize.main(["lint", "--json", file_type, str(model)]) == 0
    linted = json.loads(capsys.readouterr().out)
    assert gguf_tools.commands.quantize.main(["--dry-run", "--json", str(model), file_type]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert linted["total_bytes"] == planned["total_bytes"]
    texts = [finding["text"] for finding in linted["findings"] if finding["kind"] != "padding"]
    assert texts == planned["notes"]
    n_elems = sum(int(np.prod(tensor["shape"])) for tensor in planned["tensors"])
    assert linted["bits_per_weight"] == pytest.approx(8 * planned["total_bytes"] / n_elems, rel=1e-5)


def test_the_command_says_by_its_exit_code_whether_a_run_would_stop(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, file_type="Q4_K_M")
    assert gguf_tools.commands.quantize.main(["lint", "--custom-q", "xyz=Q8_0", recipe, str(model)]) == 0
    assert "warning: override 'xyz=Q8_0' matches no tensor" in capsys.readouterr().out
    assert gguf_tools.commands.quantize.main(["lint", "--tensor-type", "xyz=Q8_0", recipe, str(model)]) == 1
    assert "error: --tensor-type 'xyz=Q8_0' matches no tensor" in capsys.readouterr().out
    assert gguf_tools.commands.quantize.main(["lint", "Q2_K_S", str(model)]) == 1
    printed = capsys.readouterr()
    assert "error: " in printed.out
    assert printed.err == ""
    assert gguf_tools.commands.quantize.main(["lint", recipe, recipe]) == 1
    assert capsys.readouterr().err.startswith("quantize lint: error: ")
    # In either order: that of quantize, and the one that lint had at first.
    for words in ([str(model), "q5"], ["q5", str(model)]):
        assert gguf_tools.commands.quantize.main(["lint", *words]) == 2
        assert "unknown file type 'q5': a number of bits" in capsys.readouterr().err
    assert gguf_tools.commands.quantize.main(["lint"]) == 2


def test_a_model_may_be_called_lint(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.rename(model.with_name("lint"))
    monkeypatch.chdir(model.parent)
    assert gguf_tools.commands.quantize.main(["--dry-run", "lint", "Q4_0"]) == 0
    assert gguf_tools.commands.quantize.main(["lint", "Q4_0", "lint"]) == 0
    assert "Q4_0: 0 errors" in capsys.readouterr().out


@pytest.mark.parametrize("file_type", RECIPES)
def test_every_file_type_can_be_linted(file_type: str, model: Path) -> None:
    report = lint(file_type, model)
    assert report.preparation is not None
    assert json.dumps(report.to_json())


def test_types_that_no_program_has_together(model: Path, tmp_path: Path) -> None:
    mixed = {"tensor-type": ["attn_output=IQ4_KS", "ffn_up_exps=TQ2_0"], "fallback": ["attn_k_b=NVFP4"]}
    warnings = list(lint_lines(lint(write_recipe(tmp_path, file_type="Q4_K_M", **mixed), model)))
    start = (
        "warning: no program reads IQ4_KS and NVFP4, TQ2_0 in one file: llama.cpp lacks the former,"
        " ik_llama.cpp the latter: 54 of 190 tensors: "
    )
    assert sum(line.startswith(start) for line in warnings) == 1
    for rules in (["attn_output=IQ4_KS", "ffn_up_exps=MXFP4"], ["ffn_up_exps=TQ2_0"]):
        report = lint(write_recipe(tmp_path, file_type="Q4_K_M", **{"tensor-type": rules}), model)
        assert not any("no program" in line for line in lint_lines(report))
