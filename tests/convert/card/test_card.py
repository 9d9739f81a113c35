"""Cards of quantized files, read with the Hub's own reader."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import gguf_tools.commands.convert
import gguf_tools.commands.main
import gguf_tools.commands.quantize
from convert.card.page import MARK
from gguf_tools import Value
from tests.gguf_tools.sample_files import METADATA, write_file
from tests.support.trained_model import EXAMPLE

MATRIX = {
    "quantize.imatrix.file": Value.string("tiny.imatrix"),
    "quantize.imatrix.dataset": Value.string("calibration.txt"),
    "quantize.imatrix.entries_count": Value.u32(35),
    "quantize.imatrix.chunks_count": Value.u32(64),
}
STATED = {
    "general.license": Value.string("apache-2.0"),
    "general.languages": Value.strings(["de", "no"]),
    "general.quantized_by": Value.string("maker"),
}
COMMIT = "1730315ad9d394d884c589ba35ef0f0151fd671b"


def make(words: list[str], main: Any = gguf_tools.commands.main.main) -> int:
    code: int = main(words)
    return code


def front_matter(folder: Path) -> dict[str, Any]:
    """Return what the Hub would read, which must be what is written."""
    entries: dict[str, Any] = ModelCard.load(folder / "README.md").data.to_dict()
    return entries


def report(path: Path, *files: Path) -> Path:
    models = [
        {
            "path": str(file), "n_bytes": file.stat().st_size, "ppl": 21.5, "same_top": 0.9325,
            "kld": {"mean": 0.0125, "error": 0.0003, "p99": 0.2},
        }
        for file in files
    ]  # fmt: skip
    text = {
        "path": "texts/held-out.txt", "sha256": "0", "n_chunks": 16, "chunk_size": 512,
        "n_tokens_measured": 4096,
    }  # fmt: skip
    path.write_text(json.dumps({"text": text, "base": {"ppl": 21.32}, "models": models}))
    return path


def test_a_card_of_files_alone(tmp_path: Path) -> None:
    write_file(tmp_path / "a.gguf", {**METADATA, **STATED})
    assert make(["card", str(tmp_path / "a.gguf")]) == 0
    assert front_matter(tmp_path) == {
        "quantized_by": "maker", "license": "apache-2.0", "language": ["de", "no"], "library_name": "gguf",
        "pipeline_tag": "text-generation", "tags": ["gguf", "quantized"],
    }  # fmt: skip
    page = (tmp_path / "README.md").read_text()
    assert "# Größe 深度 🐳, GGUF" in page
    assert "| [a.gguf](a.gguf) |" in page
    assert "F32 2, " in page
    assert "Importance matrix" not in page


@pytest.mark.parametrize(("trained", "advised"), [(2048, 2048), (131072, 8192)])
def test_no_more_context_is_advised_than_the_model_was_trained_with(
    trained: int, advised: int, tmp_path: Path
) -> None:
    write_file(tmp_path / "a.gguf", {**METADATA, "deepseek2.context_length": Value.u32(trained)})
    assert make(["card", str(tmp_path / "a.gguf")]) == 0
    page = (tmp_path / "README.md").read_text()
    assert f"llama-server -m a.gguf -c {advised}\n" in page
    assert f"cache for {advised:,} tokens" in page


def test_what_the_source_s_card_says_goes_first(tmp_path: Path) -> None:
    source = tmp_path / "cache" / "models--deepseek-ai--DeepSeek-V2-Lite" / "snapshots" / COMMIT
    source.mkdir(parents=True)
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: deepseek\nlicense_link: LICENSE-MODEL\nlanguage: en\n"
        "tags: [conversational, safetensors, custom_code]\npipeline_tag: question-answering\n---\n# Lite\n"
    )
    write_file(tmp_path / "a.gguf", {**METADATA, **STATED, **MATRIX})
    words = ["card", str(tmp_path / "a.gguf"), "--source", str(source), "--quantized-by", "me"]
    assert make(words) == 0
    assert front_matter(tmp_path) == {
        "base_model": "deepseek-ai/DeepSeek-V2-Lite", "base_model_relation": "quantized",
        "quantized_by": "me", "license": "other", "license_name": "deepseek",
        "license_link": "https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/LICENSE-MODEL",
        "language": ["en"], "library_name": "gguf", "pipeline_tag": "question-answering",
        "tags": ["gguf", "quantized", "imatrix", "conversational"],
    }  # fmt: skip
    page = (tmp_path / "README.md").read_text()
    assert "`tiny.imatrix`, collected on `calibration.txt` (64 chunks): data for 35 tensors" in page


def test_measured_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for path in (a, b):
        write_file(path)
    measured = report(tmp_path / "report.json", a)
    assert make(["card", str(a), str(b), "--report", str(measured)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "| 0.01250 ± 0.00030 | 0.2000 | 93.25% | 21.5000 |" in page
    assert "`held-out.txt`: 4,096 tokens measured, in chunks of 512" in page
    row = next(line for line in page.splitlines() if "[b.gguf]" in line)
    assert row.endswith("|  |  |  |  |")
    a.write_bytes(a.read_bytes() + b"more")
    assert make(["card", str(b), "--report", str(report(measured, b))]) == 0
    shutil.copy(b, a)
    content = json.loads(measured.read_text().replace("b.gguf", "a.gguf"))
    content["models"][0]["n_bytes"] += 1
    measured.write_text(json.dumps(content))
    before = (tmp_path / "README.md").read_bytes()
    assert make(["card", str(a), "--report", str(measured)]) == 1
    assert "evaluate it again" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_bytes() == before
    measured.write_text("{}")
    assert make(["card", str(a), "--report", str(measured)]) == 1
    assert "not a report of `evaluate --json`" in capsys.readouterr().err


def test_quality_over_the_classes_of_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "report.json"
    write_file(tmp_path / "a.gguf")
    classes = [
        {
            "name": name, "sha256": "0", "n_chunks": 8, "chunk_size": 512, "n_tokens_measured": n_tokens,
            "base_ppl": 9.0,
        }
        for name, n_tokens in (("prose", 2040), ("code", 1020))
    ]  # fmt: skip
    over_all = {"kld": 0.0125, "kld_error": "nan", "kld_p99": 0.2, "same_top": 0.9325, "ppl": 21.5}
    model = {"path": "a.gguf", "n_bytes": (tmp_path / "a.gguf").stat().st_size, "all": over_all}
    content = {"suite": {"name": "default", "classes": classes}, "base": {"path": "b"}, "models": [model]}
    measured.write_text(json.dumps(content))
    assert make(["card", str(tmp_path / "a.gguf"), "--report", str(measured)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "| 0.01250 | 0.2000 | 93.25% | 21.5000 |" in page
    assert "Means over the classes prose, code of the suite `default`: divergence from" in page
    assert "perplexity. 3,060 tokens measured, in chunks of 512." in page
    classes.clear()
    measured.write_text(json.dumps(content))
    assert make(["card", str(tmp_path / "a.gguf"), "--report", str(measured)]) == 1
    assert "(the suite has no class)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.symlink_to("a.gguf"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.write_text("<svg>mine</svg>"),
    ],
    ids=["link", "dangling link", "folder", "pipe", "file"],
)
def test_what_has_the_chart_s_name_stays_and_is_told(
    plant: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write_file(tmp_path / "a.gguf")
    measured = report(tmp_path / "report.json", tmp_path / "a.gguf")
    plant(tmp_path / "report.svg")
    before = (tmp_path / "report.svg").lstat()
    assert make(["card", str(tmp_path / "a.gguf"), "--report", str(measured)]) == 0
    after = (tmp_path / "report.svg").lstat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert "report.svg: not a chart of gguf-tools, so it stays" in capsys.readouterr().err
    assert "report.svg" not in (tmp_path / "README.md").read_text()


def test_a_second_run_keeps_the_first_one_s_files_and_what_was_added(tmp_path: Path) -> None:
    """The first command, the base and a person's own text stay; a file that is gone goes from the table."""
    for name in ("Q8_0", "BF16"):
        output = str(tmp_path / f"t {name}.gguf")
        words = ["-q", "--card", str(EXAMPLE), "--outfile", output, "--outtype", name]
        base = ["--base-model", "hf://me/tiny"] if name == "Q8_0" else []
        assert make([*words, *base], gguf_tools.commands.convert.main) == 0
        if name == "Q8_0":
            with open(tmp_path / "README.md", "a") as file:
                file.write("\n## Thanks\n\nto all\n")
    page = (tmp_path / "README.md").read_text()
    assert page.endswith("\n## Thanks\n\nto all\n")
    assert page.count(MARK) == 2
    assert front_matter(tmp_path)["base_model"] == "me/tiny"
    assert front_matter(tmp_path)["license"] == "mit"
    assert "| [t Q8_0.gguf](t%20Q8_0.gguf) |" in page
    for name in ("Q8_0", "BF16"):
        assert f"# t {name}.gguf\nconvert-hf-to-gguf -q --card " in page
        assert f"--outtype {name}" in page
    (tmp_path / "t Q8_0.gguf").unlink()
    assert make(["card", str(tmp_path / "t BF16.gguf")]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "t Q8_0.gguf" not in page
    assert "--outtype BF16" in page


def test_several_types_share_a_command(tmp_path: Path) -> None:
    words = ["-q", "--card", str(EXAMPLE), f"{tmp_path}/t-{{FTYPE}}.gguf", "Q8_0,F16"]
    assert make(words, gguf_tools.commands.quantize.main) == 0
    page = (tmp_path / "README.md").read_text()
    assert "# t-Q8_0.gguf\n# t-F16.gguf\nquantize -q --card" in page
    assert page.count("quantize -q") == 1


def test_somebody_else_s_card_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a model's own nor one that lost our marks, and this is said before the work."""
    folder = shutil.copytree(EXAMPLE, tmp_path / "model")
    before = sorted(path.name for path in folder.iterdir())
    assert make(["--card", str(folder)], gguf_tools.commands.convert.main) == 1
    assert "is not a card of gguf-tools" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_stranger_s_card_is_replaced_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, card = tmp_path / "t.gguf", tmp_path / "README.md"
    assert make(["-q", str(EXAMPLE), "--outfile", str(model)], gguf_tools.commands.convert.main) == 0
    card.write_bytes(b"# Mine\n\xff")
    assert make(["card", str(model)]) == 1
    assert "gguf-tools card --force" in capsys.readouterr().err
    capsys.readouterr()
    assert make(["card", str(model), "--force", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    page = card.read_text()
    assert (page.count(MARK), "Mine" in page, "t.gguf" in page) == (2, False, True)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--base-model", "me/tiny"], "--card is missing"),
        (["--card", "--base-model", "tiny"], "expected OWNER/NAME"),
        (["--card", "--report", "none.json"], "none.json: can't be read"),
    ],
)
def test_refusals(words: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        make(["-q", *words, str(EXAMPLE), f"{tmp_path}/t.gguf", "Q8_0"], gguf_tools.commands.quantize.main)
        == 1
    )
    assert part in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_of_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").mkdir()
    write_file(tmp_path / "a.gguf")
    write_file(tmp_path / "b" / "b.gguf")
    assert make(["card", str(tmp_path / "a.gguf"), str(tmp_path / "b" / "b.gguf")]) == 1
    assert "lie in one folder" in capsys.readouterr().err


def test_a_stranger_s_names_can_not_leave_the_table(tmp_path: Path) -> None:
    hostile = {
        "general.name": Value.string("a\n# b | c"),
        "general.license": Value.string("mit\nbase_model: x"),
        "quantize.imatrix.file": Value.string("`|\n"),
    }
    write_file(tmp_path / "a.gguf", {**METADATA, **MATRIX, **hostile})
    assert make(["card", str(tmp_path / "a.gguf")]) == 0
    assert front_matter(tmp_path)["license"] == "mit\nbase_model: x"
    prose = (tmp_path / "README.md").read_text().split("```")[::2]  # without what is for a shell
    lines = "".join(prose).splitlines()
    assert [line for line in lines if line.startswith("# ")] == [r"# 'a\\n\# b \| c', GGUF"]
    assert any(r"Importance matrix '\`\|\\n', collected" in line for line in lines)
