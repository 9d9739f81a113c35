"""Models of a Hub: the real client against a server on the loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gguf_tools.commands.convert
from convert.sources import model_path, source_folder
from gguf_tools import open_gguf
from gguf_tools.hub import client
from tests.support.hub_server import HubServer, Trouble
from tests.support.trained_model import trained_model

NAME = "owner/tiny-deepseek-v3"

CLIENT_CHUNK_BYTES = 10 << 20
"""Bytes that the client writes at once: less than that of a broken answer is lost."""

MANY = 12_000_000
"""Bytes after which an answer breaks off, half of the model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model, with what a model's page has besides."""
    made = trained_model(tmp_path_factory.mktemp("models"))
    for name in ("modeling_x.py", "pytorch_model.bin", "consolidated.safetensors", "training_args.bin"):
        (made / name).write_bytes(b"x" * 1000)
    (made / "onnx").mkdir()
    (made / "onnx" / "config.json").write_text("{}")
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text("{}")
    return made


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with the trained model, which the client uses with an empty cache; waiting takes no time."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    with HubServer({NAME: folder}) as server, server.client(tmp_path / "cache"):
        yield server


def says(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and standard error, which must be one line, of a conversion."""
    capsys.readouterr()
    code = gguf_tools.commands.convert.main(["-q", *words])
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return code, err


def test_a_model_of_the_hub_becomes_what_its_folder_becomes(
    hub: HubServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has the model's name, not the commit's, and goes into the current folder."""
    local = tmp_path / "local"
    local.mkdir()
    plain = shutil.copytree(folder, local / folder.name, ignore=shutil.ignore_patterns("*.bin", "consol*"))
    assert gguf_tools.commands.convert.main([str(plain), "--outfile", str(local)]) == 0
    assert gguf_tools.commands.convert.main([NAME]) == 0
    (made,) = tmp_path.glob("*.gguf")
    (expected,) = local.glob("*.gguf")
    assert (made.name, made.read_bytes()) == (expected.name, expected.read_bytes())
    assert "tiny-deepseek" in made.name
    assert list((tmp_path / "cache").rglob("*.gguf")) == []
    assert "fetching 1 file, " in capsys.readouterr().err


def test_only_what_is_needed_is_fetched(hub: HubServer) -> None:
    path = model_path(f"https://huggingface.co/{NAME}/tree/main", quiet=True)
    fetched = sorted(each.relative_to(path).as_posix() for each in path.rglob("*"))
    assert fetched == [
        "1_Pooling", "1_Pooling/config.json", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert hub.asked("/onnx/") == hub.asked(".py") == hub.asked(".bin") == hub.asked("consolidated") == []
    assert path.parent.parent.name == "models--owner--tiny-deepseek-v3"


def test_nothing_is_fetched_twice_nor_for_a_vocabulary(hub: HubServer) -> None:
    assert gguf_tools.commands.convert.main(["-q", f"hf://{NAME}@main", "--vocab-only"]) == 0
    assert hub.asked("model.safetensors") == []
    model_path(NAME, quiet=True)
    bodies = len(hub.asked("GET /cdn/"))
    assert bodies == 1
    model_path(NAME, quiet=True)
    assert len(hub.asked("GET /cdn/")) == bodies


def test_a_shard_of_the_index(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """An index decides which files are the weights, and one that names a file too many is told at once."""
    sharded = shutil.copytree(folder, tmp_path / "sharded")
    (sharded / "model.safetensors").rename(sharded / "weights-a.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "weights-a.safetensors"}}))
    hub.models["owner/sharded"] = sharded
    assert (model_path("owner/sharded", quiet=True) / "weights-a.safetensors").exists()
    index.write_text(json.dumps({"weight_map": {"x": "weights-a.safetensors", "y": "weights-b.safetensors"}}))
    (sharded / "added.txt").write_text("another commit")
    with pytest.raises(Exception, match=r"names weights-b\.safetensors, which is not on the Hub"):
        model_path("owner/sharded", quiet=True)


def test_what_lies_here_is_meant(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "owner").mkdir()
    code, err = says([NAME], capsys)
    assert (code, f"{NAME}: no such folder" in err) == (1, True)
    (tmp_path / NAME).mkdir()
    assert model_path(NAME) == Path(NAME)
    assert hub.requests == []
    shutil.rmtree(tmp_path / "owner")
    assert model_path(f"hf://{NAME}", quiet=True).is_dir()


def test_a_broken_line_is_taken_up_again(hub: HubServer, folder: Path) -> None:
    hub.troubles.append(Trouble("GET /cdn/", times=1, broken_at=MANY))
    path = model_path(NAME, quiet=True)
    assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    starts = [request.partition("bytes=")[2] for request in hub.asked("GET /cdn/")]
    assert starts == ["", f"{CLIENT_CHUNK_BYTES}-"]


def test_a_fetch_that_broke_off_goes_on_with_the_next_file(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TRIES", 1)
    hub.troubles.append(Trouble("GET /cdn/", broken_at=0))
    code, err = says([NAME], capsys)
    assert (code, "can't be reached, or broke off" in err) == (1, True)
    assert hub.asked("GET /owner")
    hub.troubles.clear()
    hub.requests.clear()
    path = model_path(NAME, quiet=True)
    assert (hub.asked("GET /owner"), len(hub.asked("GET /cdn/"))) == ([], 1)
    assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "where", ["GET /api/models/owner", "HEAD /owner/tiny-deepseek-v3/resolve", "GET /cdn/"], ids=str
)
@pytest.mark.parametrize("status", [429, pytest.param(503, marks=pytest.mark.slow)])
def test_a_busy_hub_is_asked_again(hub: HubServer, where: str, status: int) -> None:
    hub.troubles.append(Trouble(where, times=2, status=status, headers={"Retry-After": "0"}))
    assert (model_path(NAME, quiet=True) / "model.safetensors").exists()


REFUSALS: list[tuple[str, Callable[[HubServer], object], str]] = [
    ("owner/none", lambda hub: None, "owner/none: not found at http://127.0.0.1"),
    (f"{NAME}@v9", lambda hub: None, f"{NAME}@v9: there is no such revision"),
    (NAME, lambda hub: hub.gated.add(NAME), f"gated: ask for access at http://127.0.0.1:PORT/{NAME} and"),
    (NAME, lambda hub: hub.troubles.append(Trouble("GET /api", status=401)), "asks for a login (401)"),
    (
        NAME,
        lambda hub: hub.troubles.append(Trouble("GET /api", status=403)),
        "lacks permission for this (403): in",
    ),
    (NAME, lambda hub: hub.troubles.append(Trouble("GET /api", status=429)), "too many requests (429)"),
    (NAME, lambda hub: hub.troubles.append(Trouble("GET /api", status=500)), "answered 500: in trouble"),
    (NAME, lambda hub: hub.troubles.append(Trouble("HEAD /", status=502)), "answered 502"),
    (NAME, lambda hub: hub.troubles.append(Trouble("GET /cdn", status=404)), "no such file (404)"),
    ("https://example.com/a/b", lambda hub: None, "not an address of the Hub"),
]


@pytest.mark.parametrize(("name", "prepare", "part"), REFUSALS, ids=[part for _, _, part in REFUSALS])
def test_refusals_are_one_line(
    name: str, prepare: Callable[[HubServer], object], part: str, hub: HubServer,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prepare(hub)
    code, err = says([name], capsys)
    assert code == 1
    assert part.replace("PORT", str(hub.port)) in err


def test_a_gated_model_with_a_token(hub: HubServer, tmp_path: Path) -> None:
    """The token opens the model's page, and never goes to the large storage on another host."""
    hub.gated.add(NAME)
    hub.tokens.add("hf_secret")
    with hub.client(tmp_path / "other", HF_TOKEN="hf_secret"):
        assert (model_path(NAME, quiet=True) / "model.safetensors").exists()
    assert hub.asked("GET /cdn/")
    assert hub.leaked_tokens == []


def test_without_the_hub(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Offline, and when the Hub is away, the cache serves; without the model in it, there is one line."""
    with hub.client(tmp_path / "cache", HF_HUB_OFFLINE="1"):
        code, err = says([NAME], capsys)
        assert (code, "HF_HUB_OFFLINE" in err) == (1, True)
    path = model_path(NAME, quiet=True)
    n_requests = len(hub.requests)
    with hub.client(tmp_path / "cache", HF_HUB_OFFLINE="1"):
        assert model_path(NAME, quiet=True) == path
        assert gguf_tools.commands.convert.main(["-q", NAME]) == 0
    assert len(hub.requests) == n_requests
    with hub.client(tmp_path / "cache", HF_ENDPOINT="http://127.0.0.1:9"):
        assert model_path(NAME) == path
        assert "http://127.0.0.1:9 can't be reached; using what is in the cache" in caplog.text
        code, err = says(["owner/none"], capsys)
        assert (code, "http://127.0.0.1:9 can't be reached" in err) == (1, True)


@pytest.mark.parametrize("where", ["away", "offline", "there"])
def test_a_mistyped_path(
    where: str, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It looks like a name on the Hub. The answer speaks of this machine too, and comes at the first try."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    settings = {"away": {"HF_ENDPOINT": "http://127.0.0.1:9"}, "offline": {"HF_HUB_OFFLINE": "1"}}
    with hub.client(tmp_path / "cache", **settings.get(where, {})):
        code, err = says(["modles/lite"], capsys)
    assert (code, "nor is there a file or folder modles/lite on this machine" in err) == (1, True)
    assert waits == []


def test_what_the_hub_knows_is_no_mistyped_path(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub.gated.add(NAME)
    code, err = says([NAME], capsys)
    assert (code, "nor is there" in err) == (1, False)


def test_half_a_model_in_the_cache(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gguf_tools.commands.convert.main(["-q", NAME, "--vocab-only"]) == 0
    with hub.client(tmp_path / "cache", HF_HUB_OFFLINE="1"):
        assert gguf_tools.commands.convert.main(["-q", NAME, "--vocab-only", "--force"]) == 0
        code, err = says([NAME], capsys)
        assert (code, "no weights" in err) == (1, True)


def test_pickles_are_asked_for(
    hub: HubServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.models["owner/pickled"] = shutil.copytree(
        folder, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors")
    )
    code, err = says(["owner/pickled"], capsys)
    assert (code, "its weights are pickles (pytorch_model.bin ...)" in err) == (1, True)
    assert hub.asked("pytorch_model.bin") == []
    fetched = source_folder("owner/pickled", quiet=True, allow_pickle=True)
    assert (Path(fetched) / "pytorch_model.bin").exists()


def test_a_disk_that_is_too_small(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1 << 20))
    code, err = says([NAME], capsys)
    assert (code, "has 1.00 MiB left" in err) == (1, True)
    assert hub.asked("GET /cdn/") == []


@pytest.mark.slow
def test_the_name_in_the_file(hub: HubServer, tmp_path: Path) -> None:
    assert gguf_tools.commands.convert.main(["-q", NAME, "--outfile", "m.gguf"]) == 0
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("general.name") == "Tiny Deepseek v3"
