"""Models of a Hub whose weights are read by ranges while they are converted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.quantize
from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.hub import stream
from convert.weights import open_weights
from gguf_tools.errors import HubError
from gguf_tools.hub import client
from gguf_tools.hub.names import HubName
from tests.support.checkpoints import shard, to_fp8
from tests.support.golden_checkpoints import cases_in, folder_of
from tests.support.hub_server import HubServer, Trouble
from tests.support.trained_model import trained_model

NAME = "owner/tiny-deepseek-v3"
SHARDED = "other/tiny-deepseek-v3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with FP8 weights, in five shards, so that the experts of a layer are in several."""
    made = trained_model(tmp_path_factory.mktemp("sharded"))
    to_fp8(made)
    return shard(made, 5)


@pytest.fixture
def hub(folder: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    with HubServer({NAME: folder, SHARDED: sharded}) as server, server.client(tmp_path / "cache"):
        yield server


def weights_in(place: Path) -> int:
    """Return the bytes of safetensors files below a folder."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.stat().st_size > 1 << 19)


@pytest.mark.parametrize("name", [pytest.param(NAME, marks=pytest.mark.slow), SHARDED])
def test_a_streamed_model_becomes_what_its_folder_becomes(
    name: str, hub: HubServer, folder: Path, sharded: Path, tmp_path: Path
) -> None:
    """Each byte of the weights is fetched once or hardly more, and none of them is left on the disk."""
    local = folder if name == NAME else sharded
    words = ["-q", "--outtype", "Q8_0", "--model-name", "x", "--threads", "2", "--outfile"]
    assert gguf_tools.commands.convert.main([str(local), *words, "local.gguf"]) == 0
    assert gguf_tools.commands.convert.main([name, *words, "streamed.gguf", "--stream"]) == 0
    assert Path("streamed.gguf").read_bytes() == Path("local.gguf").read_bytes()
    assert weights_in(tmp_path / "cache") < 2 << 20  # that is tokenizer.json
    shards = sum(path.stat().st_size for path in local.glob("*.safetensors"))
    small = sum(path.stat().st_size for path in local.iterdir() if path.suffix == ".json")
    assert shards <= hub.sent_bytes - small < 1.1 * shards
    assert hub.leaked_tokens == []


@pytest.mark.slow
def test_quantize_and_verify(hub: HubServer, folder: Path) -> None:
    assert gguf_tools.commands.quantize.main(["-q", str(folder), "local.gguf", "Q8_0"]) == 0
    assert (
        gguf_tools.commands.quantize.main(["-q", "--stream", "--verify", NAME, "streamed.gguf", "Q8_0"]) == 0
    )
    assert Path("streamed.gguf").read_bytes() == Path("local.gguf").read_bytes()


@pytest.mark.parametrize(
    "format_", ["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "exl2", "hqq"))]
)
def test_formats_that_read_columns(format_: str, hub: HubServer) -> None:
    case = min(cases_in(format_))
    hub.models["owner/packed"] = folder_of(format_, case)
    streamed = stream(HubName("owner/packed"), quiet=True)
    with Checkpoint(streamed) as checkpoint, Checkpoint(folder_of(format_, case)) as local:
        weights, expected = open_weights(checkpoint), open_weights(local)
        assert list(weights.names()) == list(expected.names())
        for name in weights.names():
            weight = weights.weight(name)
            half = weight.shape[0] // 2 if len(weight.shape) > 1 else 1
            rows = weight.read_rows(0, half)
            np.testing.assert_array_equal(rows, expected.weight(name).read_rows(0, half))


def test_a_dry_run_fetches_headers_alone(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    for main, words in (
        (gguf_tools.commands.convert.main, [SHARDED]),
        (gguf_tools.commands.quantize.main, [SHARDED, "Q4_K_M"]),
    ):
        assert main(["--dry-run", *words]) == 0
        assert "bits per weight" in capsys.readouterr().out
    assert hub.sent_bytes < 0.8 * sum(path.stat().st_size for path in hub.files(SHARDED).values())


def test_broken_lines_busy_servers_and_addresses_that_run_out(hub: HubServer, folder: Path) -> None:
    assert gguf_tools.commands.convert.main(["-q", str(folder), "--outfile", "local.gguf"]) == 0
    hub.troubles += [
        Trouble("GET /cdn/", times=3, broken_at=300_000),
        Trouble("GET /cdn/", times=2, status=429, headers={"Retry-After": "0"}),
        Trouble("GET /cdn/", times=1, status=503),
        Trouble("GET /cdn/", times=1, status=403),
        Trouble("GET /cdn/", times=1, broken_at=0),
    ]
    assert gguf_tools.commands.convert.main(["-q", NAME, "--stream", "--outfile", "streamed.gguf"]) == 0
    assert [trouble.times for trouble in hub.troubles] == [0] * 5
    assert Path("streamed.gguf").read_bytes() == Path("local.gguf").read_bytes()
    assert len(hub.asked("HEAD /owner/tiny-deepseek-v3/resolve/")) >= 2  # asked again after 403


def says(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = gguf_tools.commands.convert.main(["-q", *words])
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return code, err


def test_a_run_that_failed_goes_on(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TRIES", 2)
    words = [NAME, "--stream", "--outtype", "Q8_0", "--outfile", "streamed.gguf", "--threads", "1"]
    hub.troubles += [Trouble("GET /cdn/", times=60, broken_at=1 << 30), Trouble("GET /cdn/", status=500)]
    code, err = says(words, capsys)
    assert (code, "model.safetensors: the Hub answered 500" in err) == (1, True)
    assert Path("streamed.gguf.partial").exists()
    hub.troubles.clear()
    hub.sent_bytes = 0
    assert gguf_tools.commands.convert.main(words) == 0
    assert "resumed an interrupted run" in capsys.readouterr().out
    assert hub.sent_bytes < 0.8 * (folder / "model.safetensors").stat().st_size
    assert (
        gguf_tools.commands.convert.main(["-q", str(folder), "--outtype", "Q8_0", "--outfile", "local.gguf"])
        == 0
    )
    assert Path("streamed.gguf").read_bytes() == Path("local.gguf").read_bytes()


@pytest.mark.slow
def test_a_flipped_bit_ends_a_run_and_is_not_gone_on_with(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [NAME, "--stream", "--outtype", "Q8_0", "--outfile", "streamed.gguf", "--threads", "1"]

    def flipped(body: bytes) -> bytes:
        return body[:-9] + bytes([body[-9] ^ 1]) + body[-8:]

    hub.troubles.append(Trouble("GET /cdn/", times=5, change=lambda body: body))
    hub.troubles.append(Trouble("GET /cdn/", times=1, change=flipped))
    code, err = says(words, capsys)
    assert (code, "the content that came is not the Hub's" in err) == (1, True), err
    assert not Path("streamed.gguf").exists()
    code, err = says(words, capsys)
    assert (code, "source model.safetensors was" in err, "--restart" in err) == (1, True, True), err
    assert gguf_tools.commands.convert.main(["-q", *words, "--restart"]) == 0
    assert (
        gguf_tools.commands.convert.main(["-q", str(folder), "--outtype", "Q8_0", "--outfile", "local.gguf"])
        == 0
    )
    assert Path("streamed.gguf").read_bytes() == Path("local.gguf").read_bytes()


@pytest.mark.slow
def test_another_commit_s_weights_are_not_mixed_in(
    hub: HubServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(client, "TRIES", 1)
    changed = shutil.copytree(folder, tmp_path / "changed")
    hub.models["owner/changed"] = changed
    words = ["owner/changed", "--stream", "--outtype", "Q8_0", "--outfile", "m.gguf", "--threads", "1"]
    hub.troubles += [Trouble("GET /cdn/", times=60, broken_at=1 << 30), Trouble("GET /cdn/", status=500)]
    assert says(words, capsys)[0] == 1
    hub.troubles.clear()
    data = bytearray((changed / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (changed / "model.safetensors").write_bytes(data)
    code, err = says(words, capsys)
    assert (code, "source model.safetensors was" in err) == (1, True), err


REFUSALS: list[tuple[list[str], Callable[[HubServer], object], str]] = [
    (["{folder}"], lambda hub: None, "--stream reads a model of the Hub"),
    (["owner/none"], lambda hub: None, "not found at"),
    ([NAME], lambda hub: hub.gated.add(NAME), "gated"),
    ([NAME], lambda hub: setattr(hub, "ignores_ranges", True), "the server sent no range"),
    (
        [NAME],
        lambda hub: hub.troubles.append(Trouble("GET /cdn", status=403)),
        "lacks permission for this (403)",
    ),
    ([NAME], lambda hub: hub.troubles.append(Trouble("GET /cdn", broken_at=0)), "broke off"),
]


@pytest.mark.parametrize(("words", "prepare", "part"), REFUSALS, ids=[part for _, _, part in REFUSALS])
def test_refusals_are_one_line(
    words: list[str], prepare: Callable[[HubServer], object], part: str, hub: HubServer, folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prepare(hub)
    words = [word.replace("{folder}", str(folder)) for word in words]
    code, err = says([*words, "--stream", "--outfile", "m.gguf"], capsys)
    assert (code, part in err) == (1, True), err
    assert list(Path().glob("m.gguf*")) == []


def test_a_header_that_lies(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """A remote file is checked as one on the disk: here its last tensor is cut off."""
    cut = shutil.copytree(folder, tmp_path / "cut")
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate((cut / "model.safetensors").stat().st_size - 10)
    hub.models["owner/cut"] = cut
    with pytest.raises(Exception, match="it is truncated"):
        Checkpoint(stream(HubName("owner/cut"), quiet=True))


def test_what_computes_is_not_streamed(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("text")
    for more in (["--calibrate", "text.txt"], ["--evaluate", "text.txt"]):
        assert gguf_tools.commands.quantize.main(["-q", "--stream", *more, NAME, "m.gguf", "Q8_0"]) == 1
        assert "--stream can't be used here" in capsys.readouterr().err
    assert hub.requests == []


def test_a_streamed_folder_can_be_sent_to_another_process(hub: HubServer) -> None:
    import pickle

    streamed = stream(HubName(NAME, "main"), quiet=True)
    again = pickle.loads(pickle.dumps(streamed))
    assert again == streamed
    with Checkpoint(again) as checkpoint, Checkpoint(hub.models[NAME]) as local:
        name = local.names()[0]
        np.testing.assert_array_equal(checkpoint.raw(name).read(), local.raw(name).read())
    with hub.client(Path("other"), HF_HUB_OFFLINE="1"), pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        Checkpoint(again)


def test_shards_that_the_index_misses(hub: HubServer, sharded: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(sharded, tmp_path / "broken")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    (broken / max(index["weight_map"].values())).unlink()
    hub.models["owner/broken"] = broken
    with pytest.raises(Exception, match="which is not on the Hub"):
        stream(HubName("owner/broken"), quiet=True)
