"""A Hub that would have the token sent to another server."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.checkpoint import hub as checkpoint_hub
from convert.checkpoint.hub import fetch
from gguf_tools.hub import answers
from tests.hostile.small_hub import (
    CONFIG,
    LISTING,
    NAME,
    refusal,
    weights_of,
)
from tests.support.hub_server import HubServer, Trouble


def test_the_token_stays_at_the_endpoint(hub: HubServer, small_model: Path) -> None:
    """Another port of the same host is another server."""
    with HubServer({NAME.repo: small_model}) as other:
        config = next(iter(other.files(NAME.repo)))
        for where, path in (
            (LISTING, "/api/models/owner/small"),
            (CONFIG, f"/owner/small/resolve/{hub.commit(NAME.repo)}/{config}"),
        ):
            elsewhere = {"Location": other.endpoint + path}
            hub.troubles.append(Trouble(where, times=1, status=307, headers=elsewhere))
        fetch(NAME, quiet=True)
        assert other.requests
        assert other.authorized == []
    assert hub.authorized
    assert {given for given, _, _ in hub.authorized} == {"Bearer hf_secret"}


def test_user_and_password_of_the_endpoint_are_not_used(
    hub: HubServer, small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubServer({NAME.repo: small_model}) as other:
        address = other.endpoint.replace("http://", "http://user:password@")
        with other.client(tmp_path / "other", HF_ENDPOINT=address, HF_TOKEN="hf_secret"):
            fetch(NAME, quiet=True)
            weights_of(NAME)
        assert {(given, host) for given, host, _ in other.authorized} == {
            ("Bearer hf_secret", f"127.0.0.1:{other.port}")
        }
        assert other.leaked_tokens == []
    told = capsys.readouterr().err
    assert "user name and password in HF_ENDPOINT are not used" in told
    assert "password@" not in told


@pytest.mark.parametrize(
    ("address", "is_sent"),
    [
        ("https://hub.example/x", True), ("https://HUB.example:443/x", True), ("http://hub.example/x", False),
        ("https://hub.example:8443/x", False), ("https://a.hub.example/x", False),
        ("https://huggingface.co/x", False), ("https://hub.example@evil.example/x", False),
    ],
)  # fmt: skip
def test_where_the_token_goes(address: str, is_sent: bool, hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub.utils import get_session

    with hub.client(tmp_path / "other", HF_ENDPOINT="https://hub.example"), answers.guarded():
        session = get_session()
        request = session.build_request("GET", address, headers={"Authorization": "Bearer hf_secret"})
        for hook in session.event_hooks["request"]:
            hook(request)
        assert ("Authorization" in request.headers) == is_sent
        assert request.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("place", ["https://evil.example/renew", "http://127.0.0.1:1/renew", "{hub}/renew"])
def test_access_to_xet_is_renewed_at_the_endpoint_alone(place: str, hub: HubServer) -> None:
    """The library that renews it sends the token wherever it is told."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    route = place.replace("{hub}", hub.endpoint)
    headers = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": route}
    hub.troubles.append(Trouble("HEAD /", headers=headers))
    with answers.guarded():
        metadata = get_hf_file_metadata(hf_hub_url(NAME.repo, "model.safetensors"))
    assert (metadata.xet_file_data is not None) == route.startswith(hub.endpoint)


def test_the_session_is_the_callers_again(hub: HubServer) -> None:
    """Who uses the client besides may have made its session, and asks for files of any size."""
    from huggingface_hub.utils import get_session

    session = get_session()
    session.cookies.set("own", "1")
    before = {when: list(hooks) for when, hooks in session.event_hooks.items()}
    fetch(NAME, quiet=True)
    assert hub.cookies == []
    assert get_session() is session
    assert session.event_hooks == before
    assert session.cookies["own"] == "1"


def test_redirects_without_end(hub: HubServer) -> None:
    place = f"{hub.endpoint}/api/models/owner/small"
    hub.troubles.append(Trouble(LISTING, status=302, headers={"Location": place}))
    assert "redirect" in refusal(lambda: fetch(NAME, quiet=True)).lower()
    assert len(hub.asked(LISTING)) < 30


def test_small_files_are_small(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_hub, "MAX_SMALL_BYTES", 10)
    assert "none of its 2 files" in refusal(lambda: fetch(NAME, quiet=True))
