"""Every command that takes a model takes one on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
from imatrix.store import save
from quantize.importances.entries import Importance, ImportanceFile
from tests.support.hub_server import HubServer

Main = Callable[[list[str]], int]
NAME = "owner/tiny-deepseek-v3"

COMMANDS: list[tuple[Main, str]] = [
    (gguf_tools.commands.convert.main, "MODEL --outfile m.gguf"),
    (gguf_tools.commands.quantize.main, "MODEL m.gguf Q8_0"),
    (gguf_tools.commands.imatrix.main, "-m MODEL -f text.txt -o m.gguf"),
    (gguf_tools.commands.evaluate.main, "MODEL -f text.txt m.gguf"),
    (gguf_tools.commands.sensitivity.main, "MODEL -f text.txt -o m.json"),
    (gguf_tools.commands.quantize.main, "lint Q4_K_M MODEL"),
    (gguf_tools.commands.main.main, "checkpoint MODEL"),
    (gguf_tools.commands.imatrix.main, "check m.imatrix.gguf --model MODEL"),
    (gguf_tools.commands.imatrix.main, "repair m.imatrix.gguf -o m.dat --model MODEL"),
    (gguf_tools.commands.imatrix.main, "convert m.imatrix.gguf m.dat --mla both --model MODEL"),
]


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    with HubServer({NAME: tiny_folder}) as server, server.client(tmp_path / "cache"):
        yield server


@pytest.mark.parametrize(("main", "words"), COMMANDS, ids=[words for _, words in COMMANDS])
def test_every_command_asks_the_hub(
    main: Main, words: str, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time")
    entry = Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32))
    save(tmp_path / "m.imatrix.gguf", ImportanceFile({"blk.0.ffn_up.weight": entry}, ("text",), 1, 512))
    assert main(words.replace("MODEL", "owner/none").split()) == 1
    assert "owner/none: not found at http://127.0.0.1" in capsys.readouterr().err
    assert hub.requests == ["GET /api/models/owner/none"]


def test_headers_of_a_model_on_the_hub_are_enough(
    hub: HubServer, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lint and checkpoint say of it what they say of the folder, and fetch no weights."""
    for main, *words in (
        (gguf_tools.commands.quantize.main, "lint", "Q4_K_M"),
        (gguf_tools.commands.quantize.main, "lint", "IQ2_XS", "--json"),
        (gguf_tools.commands.main.main, "checkpoint"),
    ):  # fmt: skip
        told = []
        for model in (f"hf://{NAME}", str(tiny_folder)):
            code = main([*words, model])
            out = capsys.readouterr().out
            told.append((code, out.splitlines()[1 if main is gguf_tools.commands.main.main else 0 :]))
        assert told[0] == told[1]
        assert told[0][1]
    weights = sum(path.stat().st_size for path in tiny_folder.glob("*.safetensors"))
    assert hub.sent_bytes < weights


@pytest.mark.slow
def test_quantize_in_one_pass(hub: HubServer, tiny_folder: Path, tmp_path: Path) -> None:
    assert gguf_tools.commands.quantize.main(["-q", str(tiny_folder), "local.gguf", "Q8_0"]) == 0
    assert gguf_tools.commands.quantize.main(["-q", f"hf://{NAME}", "hub.gguf", "Q8_0"]) == 0
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
