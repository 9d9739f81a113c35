"""Every command that takes a model takes one on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import convert.cli
import imatrix.cli
import quality.cli
import quantize.cli
from tests.support.hub_server import HubServer

Main = Callable[[list[str]], int]
NAME = "owner/tiny-deepseek-v3"

COMMANDS: list[tuple[Main, str]] = [
    (convert.cli.main, "MODEL --outfile m.gguf"),
    (quantize.cli.main, "MODEL m.gguf Q8_0"),
    (imatrix.cli.main, "-m MODEL -f text.txt -o m.gguf"),
    (quality.cli.main, "MODEL -f text.txt m.gguf"),
    (quality.cli.sensitivity, "MODEL -f text.txt -o m.json"),
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
    assert main(words.replace("MODEL", "owner/none").split()) == 1
    assert "owner/none: not found at http://127.0.0.1" in capsys.readouterr().err
    assert hub.requests == ["GET /api/models/owner/none"]


@pytest.mark.slow
def test_quantize_in_one_pass(hub: HubServer, tiny_folder: Path, tmp_path: Path) -> None:
    assert quantize.cli.main(["-q", str(tiny_folder), "local.gguf", "Q8_0"]) == 0
    assert quantize.cli.main(["-q", f"hf://{NAME}", "hub.gguf", "Q8_0"]) == 0
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
