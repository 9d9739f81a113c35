"""Uploads: the real client against a server on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_tools.commands.main
from gguf_tools.hub import client
from tests.gguf_tools.sample_files import write_file
from tests.support.hub_server import HubServer, Trouble

REPO = "me/lite-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(client, "TRIES", 3)
    with HubServer({}) as server, server.client(tmp_path / "cache", HF_TOKEN="hf_mine"):
        server.uploads = tmp_path / "uploads"
        server.tokens.add("hf_mine")
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of outputs: a small file, a large one, a card, and what is not for others."""
    made = tmp_path / "lite"
    (made / ".cook").mkdir(parents=True)
    write_file(made / "small.gguf")
    (made / "large.safetensors").write_bytes(bytes(range(256)) * 8192)
    (made / "README.md").write_text("---\nlicense: mit\n---\n# Lite\n")
    (made / "next.gguf.partial").write_text("unfinished")
    (made / ".hidden").write_text("mine")
    return made


def run(*words: str | Path) -> int:
    return gguf_tools.commands.main.main(["upload", *map(str, words)])


def test_a_folder(hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, REPO, "--private") == 0
    there = {path.name: path.read_bytes() for path in hub.models[REPO].iterdir()}
    assert there == {
        name: (folder / name).read_bytes() for name in ("small.gguf", "large.safetensors", "README.md")
    }
    assert hub.made[0]["visibility"] == "private"
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["small.gguf", "large.safetensors", "README.md"]
    assert hub.leaked_tokens == []


def test_an_upload_that_broke_off_goes_on(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The large file is stored when its commit fails; the next call commits it without sending it."""
    hub.troubles.append(Trouble("POST /api/models/me/lite-GGUF/commit", times=100, status=500))
    assert run(folder / "large.safetensors", REPO) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), "the Hub answered 500" in err) == (1, True)
    assert len(hub.asked("PUT /storage/")) == 1
    hub.troubles.clear()
    assert run(folder / "large.safetensors", REPO) == 0
    assert len(hub.asked("PUT /storage/")) == 1
    assert (hub.models[REPO] / "large.safetensors").read_bytes() == (
        folder / "large.safetensors"
    ).read_bytes()


def test_what_is_there_is_replaced_by_force_alone(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, REPO) == 0
    (folder / "more.gguf").write_bytes((folder / "small.gguf").read_bytes())
    hub.requests.clear()
    assert run(folder, REPO) == 0
    assert len(hub.asked("/commit/")) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line for line in lines if ": uploaded" in line] == [line for line in lines if "more.gguf" in line]
    large = hub.models[REPO] / "large.safetensors"
    changed = bytes(folder.joinpath("large.safetensors").read_bytes()[::-1])
    folder.joinpath("large.safetensors").write_bytes(changed)
    folder.joinpath("README.md").write_text("---\nlicense: MIT\n---\n# Lite\n")
    hub.requests.clear()
    assert run(folder, REPO, "-q") == 1
    err = capsys.readouterr().err
    assert "large.safetensors exists with other content (and 1 other files); --force replaces it" in err
    assert (err.count("\n"), hub.asked("/commit/"), large.read_bytes() == changed) == (1, [], False)
    assert run(folder, REPO, "--force") == 0
    assert large.read_bytes() == changed


def test_a_busy_hub_is_asked_again(hub: HubServer, folder: Path) -> None:
    for where in ("POST /api/repos", "POST /api/models/me/lite-GGUF/commit", "PUT /storage"):
        hub.troubles.append(Trouble(where, times=1, status=429, headers={"Retry-After": "0"}))
    assert run(folder / "large.safetensors", REPO) == 0
    assert (hub.models[REPO] / "large.safetensors").exists()


def test_a_branch(hub: HubServer, folder: Path) -> None:
    assert run(folder / "README.md", REPO, "--revision", "draft", "-q") == 0
    assert {"branch": "draft"} in hub.made
    assert hub.asked("commit/draft")


def test_a_dry_run_asks_nobody(hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, REPO, "--dry-run") == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:3]] == [
        "small.gguf",
        "large.safetensors",
        "README.md",
    ]
    assert "would upload 3 files, 2.0" in out
    assert err.startswith("left out: .cook/, .hidden, next.gguf.partial (")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none.gguf", REPO], "none.gguf: no such file or folder"),
        (["next.gguf.partial", REPO], "is unfinished"),
        (["README.md", "small.gguf"], "expected OWNER/NAME"),
    ],
)
def test_refusals(
    words: list[str], part: str, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert run(*words) == 1
    assert part in capsys.readouterr().err
    assert hub.requests == []


def test_two_files_of_one_name(
    hub: HubServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("another")
    assert run(folder, tmp_path / "README.md", REPO) == 1
    assert "has the same name" in capsys.readouterr().err


def test_without_a_token(hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.tokens.clear()
    assert run(folder, REPO, "-q") == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), "log in" in err) == (1, True), err


def test_storage_that_refuses_a_file(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses_content = True
    assert run(folder / "large.safetensors", REPO) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), "no room left for this file" in err) == (1, True), err


STRANGERS = (
    "other.gguf.job",
    "other.gguf.undo",
    "notes.txt",
    "id_rsa",
    ".env",
    "o.gguf.journal",
    "secrets.json",
)


def test_what_does_not_belong_to_a_model_stays(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in STRANGERS:
        (folder / name).write_text("mine")
    (folder / "o.gguf.work").mkdir()
    assert run(folder, REPO) == 0
    told = capsys.readouterr().err
    assert all(name in told for name in (*STRANGERS, "o.gguf.work/"))
    there = {path.name for path in hub.models[REPO].iterdir()}
    assert there == {"small.gguf", "large.safetensors", "README.md"}
    assert run(folder, REPO, "--include", "*.txt", "--include", "*") == 0
    there = {path.name for path in hub.models[REPO].iterdir()} - there
    assert there == {*STRANGERS, "other.gguf.job"} - {".env", "id_rsa", "secrets.json", "o.gguf.journal"}
    assert run(folder, REPO, "--include", ".env", "-q") == 0
    assert (hub.models[REPO] / ".env").exists()


@pytest.mark.parametrize("target", ["{outside}/mine", "../mine", "here/mine"])
def test_links_out_of_a_folder(
    target: str, hub: HubServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that stays in the folder is the file that it leads to."""
    for place in (tmp_path, folder / "here"):
        place.mkdir(exist_ok=True)
        (place / "mine").write_text("mine")
    (folder / "copy.gguf").symlink_to(target.replace("{outside}", str(tmp_path)))
    code = run(folder, REPO, "--dry-run")
    out, err = capsys.readouterr()
    if target.startswith("here"):
        assert (code, "copy.gguf" in out) == (0, True)
        return
    assert (code, out, "outside of the folder" in err) == (1, "", True)
    (folder / "copy.gguf").rename(folder / "copy.job")
    assert run(folder, REPO, "--dry-run") == 0
    assert run(folder, REPO, "--dry-run", "--include", "*.job") == 1


def test_a_file_that_is_being_edited(
    hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "small.gguf.undo").write_text("the old header")
    assert run(folder, REPO) == 1
    assert "is being edited" in capsys.readouterr().err


def test_a_folder_with_nothing_of_a_model(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    assert run(tmp_path / "notes", REPO) == 1
    assert "nothing to upload" in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.parametrize("body", [b"[]", b"null", b"x", b'{"files": 3}', b'{"files": [{}]}', b"[" * 100_000])
@pytest.mark.parametrize("where", ["POST /api/repos/create", "POST /api/models/me/lite-GGUF/preupload"])
def test_answers_of_other_shapes(
    where: str, body: bytes, hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.troubles.append(Trouble(where, change=lambda _: body))
    assert run(folder / "large.safetensors", REPO, "-q") == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), "the Hub's answer is n" in err) == (1, True), err


def test_a_wait_that_is_too_long(hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.troubles.append(Trouble("PUT /storage", status=429, headers={"Retry-After": "999"}))
    assert run(folder / "large.safetensors", REPO, "-q") == 1
    assert "--timeout allows 300 s" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [(["--timeout", "20"], 1), (["--timeout", "42"], 0)])
def test_the_user_says_how_long_a_wait_may_be(
    words: list[str], code: int, hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.troubles.append(Trouble("PUT /storage", times=1, status=503, headers={"Retry-After": "42"}))
    assert run(folder / "large.safetensors", REPO, "-q", *words) == code
    assert ("--timeout allows 20 s" if code else "going on in 42 s") in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300", "soon"])
def test_times_that_are_none(text: str, hub: HubServer, folder: Path) -> None:
    assert run(folder, REPO, "--timeout", text) == 2
    assert hub.requests == []


def test_user_and_password_of_the_endpoint_are_not_used(
    hub: HubServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = hub.endpoint.replace("http://", "http://user:password@")
    with hub.client(tmp_path / "other", HF_ENDPOINT=address, HF_TOKEN="hf_mine"):
        assert run(folder, REPO) == 0
    assert {given for given, _, _ in hub.authorized} == {"Bearer hf_mine"}
    assert "password@" not in capsys.readouterr().err
