"""A Hub whose answers have other shapes, no end, or take all the time in the world."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from convert.checkpoint.hub import fetch
from gguf_tools.hub import answers, client
from gguf_tools.hub.downloads import download, list_files
from tests.hostile.small_hub import (
    CONFIG,
    LARGE,
    LISTING,
    NAME,
    Speak,
    is_whole,
    refusal,
    weights_of,
)
from tests.support.hub_server import HubServer, Trouble

SIBLING = {"rfilename": "config.json", "size": 3}
COMMIT = "a" * 40

PAUSE = time.sleep
"""As it is before the tests make waiting take no time."""


@pytest.mark.parametrize(
    "answer",
    [
        [], None, 7, "x", {}, {"sha": None}, {"sha": "main"}, {"sha": ["a"]}, {"sha": "../../x"},
        {"sha": COMMIT, "siblings": 3}, {"sha": COMMIT, "siblings": {"a": 1}},
        {"sha": COMMIT, "siblings": [None]}, {"sha": COMMIT, "siblings": [{}]},
        {"sha": COMMIT, "siblings": []},
        *({"sha": COMMIT, "siblings": [{**SIBLING, "rfilename": name}]} for name in
          (None, 3, "", ".", "..", "../x", "/etc/passwd", "a//b", "a/../b", "a\\b", "\0", "\n", "x" * 2000)),
        *({"sha": COMMIT, "siblings": [{**SIBLING, "size": size}]} for size in
          ("3", 3.5, -1, [3], True, 1 << 60, {})),
        *({"sha": COMMIT, "siblings": [{**SIBLING, "lfs": lfs}]} for lfs in
          ("x", [], {}, {"sha256": None}, {"sha256": "../../x"}, {"sha256": 3})),
        *({"sha": COMMIT, "siblings": [{**SIBLING, "blobId": blob}]} for blob in (3, "x", "../x")),
    ],
    ids=lambda answer: json.dumps(answer)[:60],
)  # fmt: skip
def test_lists_of_other_shapes(answer: object, hub: HubServer) -> None:
    hub.troubles.append(Trouble(LISTING, change=lambda body: json.dumps(answer).encode()))
    assert "owner/small: " in refusal(lambda: fetch(NAME, quiet=True))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"<html>busy</html>", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested deeper"),
        (b"[" * 5000 + b"]" * 5000, "nested deeper"),
        (b'{"sha": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" + b"{}," * 3_000_000 + b"{}]", "memory"),
        (b" " * (33 << 20), "expected at most"),
    ],
    ids=["html", "nothing", "bytes", "open", "deep", "digits", "many", "long"],
)
def test_lists_that_are_no_json(body: bytes, part: str, hub: HubServer) -> None:
    hub.troubles.append(Trouble(LISTING, change=lambda _: body))
    assert part in refusal(lambda: fetch(NAME, quiet=True))


def endlessly(head: bytes, piece: bytes) -> Speak:
    """Return how to answer with `head` and then `piece` until the other side hangs up, or 100 MB are sent."""

    def speak(write: Callable[[bytes], object]) -> None:
        write(head)
        for _ in range((100 << 20) // len(piece)):
            write(piece)
        raise AssertionError("was read to the end")

    return speak


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + bytes(1 << 16) + b"\r\n"


@pytest.mark.parametrize(
    ("where", "speak"),
    [
        (LISTING, endlessly(CHUNKED, CHUNK)),
        (LISTING, endlessly(OK + b"\r\n", bytes(1 << 16))),
        (LISTING, endlessly(b"HTTP/1.1 500 Busy\r\n\r\n", bytes(1 << 16))),
        (CONFIG, endlessly(CHUNKED, CHUNK)),
        (LARGE, endlessly(CHUNKED, CHUNK)),
    ],
    ids=["list", "unframed list", "error", "config.json", "weights"],
)
def test_answers_without_end(where: str, speak: Speak, hub: HubServer) -> None:
    hub.troubles.append(Trouble(where, speak=speak))
    refusal(lambda: fetch(NAME, quiet=True))
    assert len(hub.asked(where)) <= 3


@pytest.mark.parametrize("where", [LISTING, CONFIG, LARGE])
def test_a_packed_answer_is_refused_unread(where: str, hub: HubServer) -> None:
    bomb = gzip.compress(bytes(64 << 20), 1)
    hub.troubles.append(Trouble(where, change=lambda _: bomb, headers={"Content-Encoding": "gzip"}))
    assert "packed its answer (gzip)" in refusal(lambda: fetch(NAME, quiet=True))
    assert "packed its answer (gzip)" in refusal(lambda: weights_of(NAME))


@pytest.mark.parametrize("broken_at", [0, 1, 1000])
def test_ranges_that_bring_hardly_anything(broken_at: int, hub: HubServer) -> None:
    hub.troubles.append(Trouble(LARGE, broken_at=broken_at))
    assert "broke off" in refusal(lambda: weights_of(NAME))
    assert len(hub.asked(LARGE)) == client.TRIES_WITHOUT_PROGRESS


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda body: b"", "broke off"),
        (lambda body: body[:1], "broke off"),
        (lambda body: body * 2, "sent more"),
    ],
    ids=["nothing", "a byte", "twice"],
)
def test_ranges_of_another_length(change: Callable[[bytes], bytes], part: str, hub: HubServer) -> None:
    """Their lengths are told as they are, so nothing looks broken to who reads them."""
    hub.troubles.append(Trouble(LARGE, change=change))
    assert part in refusal(lambda: weights_of(NAME))
    assert len(hub.asked(LARGE)) <= client.TRIES_WITHOUT_PROGRESS


@pytest.mark.parametrize("broken_at", [1, 1000])
def test_a_file_that_breaks_off_at_once_again_and_again(broken_at: int, hub: HubServer) -> None:
    hub.troubles.append(Trouble(LARGE, broken_at=broken_at))
    assert "broke off" in refusal(lambda: fetch(NAME, quiet=True))
    assert len(hub.asked(LARGE)) == client.TRIES_WITHOUT_PROGRESS


def dripping(head: bytes, piece: bytes) -> Speak:
    """Return how to answer with `head` and then a little of what never ends, in time for each read."""

    def speak(write: Callable[[bytes], object]) -> None:
        write(head)
        for _ in range(500):
            write(piece)
            PAUSE(0.02)

    return speak


@pytest.mark.parametrize(
    ("where", "speak"),
    [
        (LISTING, dripping(CHUNKED, b"1\r\nx\r\n")),
        (LARGE, dripping(CHUNKED, b"1\r\nx\r\n")),
    ],
    ids=["list", "weights"],
)
@pytest.mark.usefixtures("impatient")
def test_answers_that_drip(where: str, speak: Speak, hub: HubServer) -> None:
    hub.troubles.append(Trouble(where, speak=speak))
    assert "broke off" in refusal(lambda: fetch(NAME, quiet=True))


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("where", [LISTING, "HEAD /", CONFIG, LARGE])
def test_a_busy_server_is_waited_for_with_a_word(
    where: str, status: int, hub: HubServer, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.troubles.append(Trouble(where, times=1, status=status, headers={"Retry-After": "42"}))
    fetch(NAME, quiet=True)
    assert waits == [42]
    assert "going on in 42 s" in capsys.readouterr().err


@pytest.mark.parametrize("where", [LISTING, "HEAD /", CONFIG, LARGE])
@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "301"},
        {"Retry-After": "9" * 40},
        {"Retry-After": format_datetime(datetime.now(UTC) + timedelta(days=1))},
        {"ratelimit": '"api";r=0;t=4000'},
    ],
    ids=["seconds", "digits", "date", "limit"],
)
def test_a_wait_that_is_too_long_is_refused(
    where: str, headers: dict[str, str], hub: HubServer, waits: list[float]
) -> None:
    hub.troubles.append(Trouble(where, status=429, headers=headers))
    assert "the longest wait allows 300 s" in refusal(lambda: fetch(NAME, quiet=True))
    assert waits == []


@pytest.mark.parametrize("text", ["", "-5", "soon", "1e9", "\u0663", "Wed, 99 Foo 2026", "0x10", "1.5"])
def test_an_odd_wait_is_none(text: str) -> None:
    assert answers.asked_wait({"Retry-After": text}) is None


@pytest.mark.parametrize("cookie", ["a=\xb2", "a=b; Domain=127.0.0.1; Path=/", "\xb2"])
def test_a_cookie_is_not_kept(cookie: str, hub: HubServer, small_model: Path) -> None:
    """One that can't be sent back would end every call from then on."""
    hub.troubles.append(Trouble("", times=3, headers={"Set-Cookie": cookie}))
    assert is_whole(fetch(NAME, quiet=True), small_model)
    assert hub.cookies == []


@pytest.mark.parametrize("status", [429, 503, 400, 404])
@pytest.mark.parametrize("where", [LISTING, CONFIG])
@pytest.mark.parametrize(
    "body", [b"[" * 9999, b"null", b'{"error": ["a", 3]}', b'{"errors": [{"message": 5}]}', b"\xff"]
)
def test_errors_of_other_shapes(body: bytes, where: str, status: int, hub: HubServer) -> None:
    json_type = {"Content-Type": "application/json"}
    hub.troubles.append(Trouble(where, status=status, headers=json_type, change=lambda _: body))
    refusal(lambda: fetch(NAME, quiet=True))


def test_after_an_error_the_other_files_are_not_waited_for(hub: HubServer) -> None:
    n_written = 0

    def speak(write: Callable[[bytes], object]) -> None:
        nonlocal n_written
        write(CHUNKED)
        while n_written < 3000:
            write(b"1\r\nx\r\n")
            n_written += 1
            PAUSE(0.01)

    hub.troubles.append(Trouble(LARGE, speak=speak))
    hub.troubles.append(Trouble(CONFIG, status=404))
    listing = list_files(NAME)
    refusal(lambda: download(NAME, listing.commit, listing.files.values()))
    assert n_written < 3000


@pytest.mark.parametrize("where", [LISTING, "HEAD /", CONFIG, LARGE])
@pytest.mark.usefixtures("impatient")
def test_an_answer_that_never_comes(where: str, hub: HubServer) -> None:
    """The client would ask by itself again, for a minute each time."""
    hub.troubles.append(Trouble(where, status=103))
    assert "broke off" in refusal(lambda: fetch(NAME, quiet=True))
    assert len(hub.asked(where)) <= client.TRIES_WITHOUT_PROGRESS
