"""Adapters of a Hub, and a base there: the real client against a server on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_tools.commands.convert
from tests.support.adapters import pair_of, write_adapter
from tests.support.decoder_models import decoder_model
from tests.support.hub_server import HubServer

pytest.importorskip("torch")

BASE, ADAPTER = "owner/base", "owner/my-adapter"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A base and its adapter, which has what trainers leave beside it."""
    base = tmp_path / "base"
    decoder_model("llama-biases", base)
    tensors = pair_of(base, "model.layers.1.self_attn.o_proj")
    adapter = write_adapter(tmp_path / "my-adapter", tensors, base_model_name_or_path=BASE)
    (adapter / "optimizer.pt").write_bytes(b"x" * 1000)
    return {BASE: base, ADAPTER: adapter}


@pytest.fixture
def hub(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with HubServer(folders) as server, server.client(tmp_path / "cache"):
        yield server


def convert(*words: object) -> int:
    return gguf_tools.commands.convert.main(["-q", *map(str, words)])


def test_an_adapter_of_the_hub_is_merged_as_its_folder_is(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert convert(folders[BASE], "--lora", folders[ADAPTER], "--outfile", "expected.gguf") == 0
    assert convert(folders[BASE], "--lora", ADAPTER, "--outfile", "made.gguf") == 0
    assert Path("made.gguf").read_bytes() == Path("expected.gguf").read_bytes()
    assert hub.asked("optimizer.pt") == []


def test_the_file_of_an_adapter_needs_no_weights_of_its_base(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    """It has the adapter's name, not the commit's, and goes into the current folder."""
    assert convert(folders[ADAPTER], "--base", folders[BASE], "--outfile", "expected.gguf") == 0
    assert convert(ADAPTER, "--base", BASE) == 0
    assert Path("my-adapter-F32.gguf").read_bytes() == Path("expected.gguf").read_bytes()
    cached = list((tmp_path / "cache").rglob("models--owner--base/snapshots/*/model*.safetensors"))
    assert cached == []


def test_what_is_no_adapter_is_refused(
    hub: HubServer, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(folders[BASE], "--lora", BASE, "--outfile", "made.gguf") == 1
    assert "owner/base: no adapter among its" in capsys.readouterr().err
    assert not Path("made.gguf").exists()
