"""The command: what it prints and writes, its exit code, and how little of the Hub it reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_tools.commands.main import main
from tests.contract.import_graph import ROOT
from tests.convert.audit.conftest import Base, Make
from tests.convert.audit.faults import FAULTS, damage
from tests.support.hub_server import HubServer


@pytest.fixture(scope="module")
def broken(base: Base, made: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with gate and up swapped, and the wrong id of a special token."""
    folder = tmp_path_factory.mktemp("broken")
    damage(made("llama", "Q4_K_M"), base("llama"), folder / "half.gguf", FAULTS["gate and up swapped"])
    damage(folder / "half.gguf", base("llama"), folder / "broken.gguf", FAULTS["special token"])
    return folder / "broken.gguf"


def test_a_clean_file(base: Base, made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(made("llama", "Q4_K_M")), str(base("llama")), "-q"]) == 0
    printed = capsys.readouterr().out
    assert "nothing is wrong" in printed
    assert re.search(r"^Q4_K +39 ", printed, re.MULTILINE)


def test_what_is_wrong_is_printed_and_written(
    base: Base, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", str(broken), str(base("llama")), "-q"]
    words += ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "bad: tokenizer.ggml.eos_token_id: special token: is 2, the base's is 1" in lines
    (swapped,) = (line for line in lines if "ffn" in line and line.startswith("bad"))
    assert swapped == (
        "bad: blk.5.ffn_gate.weight: swapped with blk.5.ffn_up.weight: each holds the other's weights"
    )
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["ok"]
    assert [each["kind"] for each in report["findings"]] == ["metadata", "swapped-tensor"]
    assert report["findings"][1]["about"] == ["blk.5.ffn_gate.weight", "blk.5.ffn_up.weight"]
    wrong = {each["name"]: each["wrong"] for each in report["tensors"] if each["wrong"]}
    assert wrong == {name: ["swapped-tensor"] for name in report["findings"][1]["about"]}
    page = (tmp_path / "r.html").read_text()
    assert page.lower().count("compared with") == 1
    assert "something is wrong" in page
    names = re.findall(r'<tr><td class="name">([^<]+)', page)
    assert set(names[:2]) == set(wrong), "bad tensors come first"
    assert len(names) == len(report["tensors"])
    assert "each holds the other&#x27;s weights" in page
    assert re.findall(r'(?:src|href)="', page) == []
    assert main(words) == 1
    assert "--force" in capsys.readouterr().err


def test_what_is_ignored_is_a_note(base: Base, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", str(broken), str(base("llama")), "-q"]
    assert main([*words, "--ignore", "tokenizer.ggml.eos_token_id", "--ignore", "blk.5.ffn_*"]) == 0
    assert "note: tokenizer.ggml.eos_token_id: special token" in capsys.readouterr().out


def test_warnings_count_where_asked(
    base: Base, made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.gguf"
    assert main(["set", str(made("llama", "Q4_K_M")), "llama.context_length=u32:4096", "-o", str(path)]) == 0
    words = ["audit", str(path), str(base("llama")), "-q"]
    assert main(words) == 0
    assert main([*words, "--strict"]) == 1
    assert "warning: llama.context_length: context: is 4096, the base's is 2048" in capsys.readouterr().out


def test_divergence_is_added(
    base: Base, made: Make, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "r.json"
    words = ["audit", str(made("llama", "Q4_K_M")), str(base("llama")), "-q", "--json", str(output)]
    assert main([*words, "-f", str(calibration), "-c", "64", "--chunks", "2"]) == 0
    evaluation = json.loads(output.read_text())["evaluation"]
    assert 0 < evaluation["models"][0]["kld"]["mean"] < 0.2
    assert "KLD" in capsys.readouterr().out


def test_little_is_read_of_a_base_on_the_hub(
    base: Base, made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubServer({"me/small-llama": base("llama")}) as server, server.client(tmp_path / "cache"):
        assert main(["audit", str(made("llama", "Q4_K_M")), "me/small-llama", "-q"]) == 0
        assert "runs of rows of every matrix" in capsys.readouterr().out
        assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_tensors_are_compared_without_torch(base: Base, made: Make) -> None:
    run = "from gguf_tools.commands.main import main; exit(main(sys.argv[1:]))"
    code = f"import sys; sys.modules['torch'] = None; {run}"
    words = ["audit", str(made("llama", "Q4_K_M")), str(base("llama")), "-q"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["nothing.gguf", "nowhere"], ["-f"]])
def test_a_mistake_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) != 0
    assert len(capsys.readouterr().err.splitlines()) <= 3
