"""Names of models on the Hub, and folders of its cache."""

from __future__ import annotations

from importlib import reload
from pathlib import Path

import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.hub import library
from gguf_tools.hub.names import HubName, cached_name, folder_name, parse_hub_name

COMMIT = "1730315ad9d394d884c589ba35ef0f0151fd671b"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3", None),
        ("a/b.c_d@v1.0", "a/b.c_d", "v1.0"),
        ("a/b@refs/pr/7", "a/b", "refs/pr/7"),
        (f"a/b@{COMMIT}", "a/b", COMMIT),
        ("hf://a/b", "a/b", None),
        ("hf://a/b@main", "a/b", "main"),
        ("https://huggingface.co/a/b", "a/b", None),
        ("https://huggingface.co/a/b/", "a/b", None),
        ("https://hf.co/a/b/tree/main", "a/b", "main"),
        ("https://huggingface.co/a/b/tree/refs%2Fpr%2F7", "a/b", "refs/pr/7"),
        ("https://huggingface.co/a/b?not-for-all-audiences=true", "a/b", None),
    ],
)
def test_names(text: str, repo: str, revision: str | None) -> None:
    assert parse_hub_name(text) == HubName(repo, revision)


@pytest.mark.parametrize(
    "text",
    [
        "m.gguf",
        "folder",
        "a/b/c",
        "/a/b",
        "./a/b",
        "../b",
        "a/b.gguf",
        "a/..",
        "a/b--c",
        "a/",
        "~/b",
        "a/b@",
        "a/b@../main",
        "a/b@x//y",
        "a/b@/x",
    ],
)
def test_paths(text: str) -> None:
    assert parse_hub_name(text) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hf://a", "expected hf://OWNER/NAME"),
        ("hf://a/b/model.safetensors", "expected hf://OWNER/NAME"),
        ("https://example.com/a/b", "not an address of the Hub"),
        ("https://huggingface.co/a", "names no model"),
        ("https://huggingface.co/a/b/blob/main/config.json", "names no model"),
        ("https://huggingface.co/a/b/tree/", "names no model"),
        ("https://huggingface.co/../b", "names no model"),
    ],
)
def test_addresses_of_something_else(text: str, part: str) -> None:
    with pytest.raises(BadRequest, match=part):
        parse_hub_name(text)


def test_another_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com:8443")
    assert parse_hub_name("https://hub.example.com:8443/a/b") == HubName("a/b")
    assert parse_hub_name("https://huggingface.co/a/b") == HubName("a/b")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:password@hub.example.com:8443")
    assert parse_hub_name("https://hub.example.com:8443/a/b") == HubName("a/b")


@pytest.mark.parametrize(
    "address", ["http://[::1", "http://e\x1b[31m", "http://u:secret@h:99999", "http://h:secret"]
)
def test_an_endpoint_that_is_no_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"http.*: not an address"):
        parse_hub_name("https://[::1/a/b")
    monkeypatch.setenv("HF_ENDPOINT", address)
    for call in (lambda: reload(library), lambda: parse_hub_name("https://huggingface.co/a/b")):
        with pytest.raises(BadRequest, match="HF_ENDPOINT: not an address") as caught:
            call()
        assert "secret" not in str(caught.value)


def test_folders_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--deepseek-ai--DeepSeek-V3" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert (cached_name(snapshot), folder_name(snapshot)) == ("DeepSeek-V3", "DeepSeek-V3")
    monkeypatch.chdir(snapshot)
    assert folder_name(".") == "DeepSeek-V3"
    other = tmp_path / "datasets--a--b" / "snapshots" / COMMIT
    assert (cached_name(other), folder_name(other)) == (None, COMMIT)
    assert cached_name(snapshot.parent / "main") is None
    assert cached_name("/") is None
    assert folder_name(tmp_path / "DeepSeek-V2") == "DeepSeek-V2"
