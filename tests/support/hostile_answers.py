"""Answers that a Hub which means harm may give, at random."""

from __future__ import annotations

import functools
import gzip
import json
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

from tests.support.hub_server import Trouble

Answer = tuple[str, Trouble]
Write = Callable[[bytes], object]

_pause = time.sleep  # as it is before anybody makes waiting take no time

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"

ODD_NAMES = (
    "/tmp/out", '"/tmp/out"', "../../../../out", '".."', "", '""', "a/b", "x" * 5000, "W/", "\\\\host\\share",
    "~", ".", "a" * 40, "con", "%2e%2e%2f", "\xe9", "'", "main", "refs/heads/main", "0" * 64,
)  # fmt: skip
ODD_NUMBERS = (
    "-1",
    "0",
    "1",
    "9" * 25,
    "1e9",
    "soon",
    "",
    "0x10",
    "1.5",
    "+7",
    "1, 2",
    "\xb2",
    "NaN",
    " 12 ",
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e308, 1 << 70, "", "x", "../../x", [], [[]], {}, {"a": 1}, "\0",
    "x" * 3000, ["x"],
)  # fmt: skip
STATUSES = (
    100, 101, 103, 200, 201, 204, 206, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 404, 405, 408, 409,
    410, 416, 418, 429, 451, 500, 501, 502, 503, 504, 511, 599, 999,
)  # fmt: skip
ERROR_CODES = (
    "RepoNotFound",
    "RevisionNotFound",
    "EntryNotFound",
    "GatedRepo",
    "DisabledRepo",
    "Nonsense",
    "",
)


def hostile_answer(rng: random.Random, request: str, endpoint: str, elsewhere: str) -> Answer:
    """Return what is wrong with an answer, in words, and the answer.

    request    that it answers, "METHOD path"
    endpoint   of the server that answers
    elsewhere  of another one
    """
    kinds = [_bits, _cut, _length, _headers, _status, _redirect, _body, _packed, _endless, _raw]
    weights = [20, 12, 8, 16, 12, 8, 8, 4, 2, 6]
    if "/api/" in request:
        kinds.append(_json)
        weights.append(25)
    if rng.random() < 0.004:
        return _drip(rng)
    (kind,) = rng.choices(kinds, weights)
    path = request.partition(" ")[2]
    if kind is _redirect:
        return _redirect(rng, path, endpoint, elsewhere)
    what, trouble = kind(rng)  # type: ignore[operator]
    return f"{kind.__name__[1:]} {what}", trouble


def _bits(rng: random.Random) -> Answer:
    n_bits, seed = rng.choice([1, 1, 1, 8, 1000]), rng.random()

    def flip(body: bytes) -> bytes:
        inner, data = random.Random(seed), bytearray(body)
        for _ in range(n_bits * bool(body)):
            data[inner.randrange(len(data))] ^= 1 << inner.randrange(8)
        return bytes(data)

    return f"{n_bits}", Trouble("", change=flip)


def _cut(rng: random.Random) -> Answer:
    at = rng.choice([0, 1, 10, 1000, 70_000, 200_000, 390_000])
    if rng.random() < 0.5:
        return f"told, at {at}", Trouble("", change=lambda body: body[:at])
    return f"at {at}", Trouble("", broken_at=at)


def _length(rng: random.Random) -> Answer:
    text = rng.choice([*ODD_NUMBERS, "5", "100000", "400000"])
    if rng.random() < 0.3:
        return "twice the body", Trouble("", change=lambda body: body * 2)
    return text, Trouble("", headers={"Content-Length": text}, broken_at=rng.choice([None, 100]))


def _headers(rng: random.Random) -> Answer:
    name = rng.choice(
        [
            "ETag", "ETag", "X-Linked-ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Repo-Commit",
            "X-Linked-Size",
            "Content-Range", "Content-Range", "Location", "Link", "X-Xet-Hash", "Content-Disposition", "Date",
            "Content-Type", "Set-Cookie", "Transfer-Encoding", "Connection", "X-HF-Warning", "ratelimit",
            "Accept-Ranges", "Retry-After",
        ]
    )  # fmt: skip
    if rng.random() < 0.15:
        return f"without {name}", Trouble("", headers={name: None})
    ranges = [
        "bytes 0-0/1",
        "bytes */5",
        "bytes 0-99/99999",
        "bytes 5-1/4",
        "items 0-1/2",
        f"bytes 0-9/{'9' * 30}",
    ]
    values = {
        "Content-Range": [*ranges, *ODD_NUMBERS],
        "Link": ['<http://127.0.0.1:9/x>; rel="xet-auth"', "<", ";;;", '<x>; rel="next"', "<x>; " * 500],
        "Transfer-Encoding": ["chunked", "gzip", "chunked, chunked", "x"],
        "ratelimit": ['"api";r=0;t=99999', '"api";r=0;t=1', ";;;"],
        "X-HF-Warning": ["x" * 3000, "topic; message"],
    }.get(name, [*ODD_NAMES, *ODD_NUMBERS])
    value = rng.choice(values)
    more: dict[str, str | None] = {}
    if name == "X-Xet-Hash":
        more["X-Xet-Refresh-Route"] = rng.choice(["http://127.0.0.1:9/x", "", "x", "//127.0.0.1"])
    return f"{name}: {value[:40]!r}", Trouble("", headers={name: value, **more})


def _status(rng: random.Random) -> Answer:
    status = rng.choice([*STATUSES, 429, 503, 429, 503])
    headers: dict[str, str | None] = {}
    if rng.random() < 0.6:
        dates = [
            "Wed, 21 Oct 2099 07:28:00 GMT",
            "Wed, 21 Oct 1999 07:28:00 GMT",
            "Wed, 99 Foo",
            "120",
            "0",
            "0",
        ]
        headers["Retry-After"] = rng.choice([*ODD_NUMBERS, *dates])
    if rng.random() < 0.4:
        headers["X-Error-Code"] = rng.choice(ERROR_CODES)
    if rng.random() < 0.3:
        headers["X-Error-Message"] = rng.choice(
            ["x" * 5000, "Access to this resource is disabled.", "\x1b[2J", ""]
        )
    body = rng.choice(
        [b'{"error": "in trouble"}', b'{"error": ["a", 3]}', b'{"errors": [{"message": 5}]}', b"null",
         b"[" * 9999,
         b"", b"\xff\xfe", b"<html>" * 99, b'{"error": "' + b"x\\n" * 2000 + b'"}', b'{"error": {"a": []}}']
    )  # fmt: skip
    if rng.random() < 0.5:
        headers["Content-Type"] = "application/json"
    return f"{status} {headers}"[:200], Trouble("", status=status, headers=headers, change=lambda _: body)


def _redirect(rng: random.Random, path: str, endpoint: str, elsewhere: str) -> Answer:
    host = elsewhere.removeprefix("http://")
    place = rng.choice(
        [
            endpoint + path, elsewhere + path, elsewhere + path, f"//{host}{path}", path, "", f"http://u:p@{host}{path}",
            elsewhere.replace("127.0.0.1", "localhost") + path, "http://127.0.0.1:1/x", "file:///etc/passwd",
            "ftp://127.0.0.1/x", "http://[::1", "http://127.0.0.1:99999/x", "javascript:0", "x" * 5000, "http://",
            f"https://{host}{path}", "http://127.0.0.1:port/", "..", "?", "\x7f",
            f"{endpoint}/api/models/a/b",
        ]
    )  # fmt: skip
    status = rng.choice([301, 302, 303, 307, 308])
    return f"redirect {status} {place[:80]!r}", Trouble("", status=status, headers={"Location": place})


def _body(rng: random.Random) -> Answer:
    body = rng.choice(
        [b"", b"x", b"<html></html>", b"\0" * 500_000, b"[" * 100_000, b"{}", b"null", b"\xff" * 100]
    )
    return f"{body[:10]!r} of {len(body)}", Trouble("", change=lambda _: body)


@functools.cache
def _bomb() -> bytes:
    """Return 256 MiB in 256 KiB, made without having them in memory."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(256)), packer.flush()])


def _packed(rng: random.Random) -> Answer:
    encoding = rng.choice(["gzip", "deflate", "br", "zstd", "gzip, gzip", "x", "identity", "GZIP"])
    if rng.random() < 0.5:
        return f"{encoding} bomb", Trouble(
            "", headers={"Content-Encoding": encoding}, change=lambda _: _bomb()
        )
    return f"{encoding}", Trouble("", headers={"Content-Encoding": encoding}, change=gzip.compress)


def _endless(rng: random.Random) -> Answer:
    heads = [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + bytes(1 << 16) + b"\r\n"),
        (b"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16)),
        (b"HTTP/1.1 500 OK\r\n\r\n", bytes(1 << 16)),
        (b"HTTP/1.1 200 OK\r\n", b"X-Y: z\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 10_000),
        (b"", b"HTTP/1.1 103 Early Hints\r\nX: " + b"y" * 4000 + b"\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: y\r\n" * 1000),
        (b"HTTP/1.1 302 X\r\nLocation: /x\r\n" + CHUNKED, b"400\r\n" + bytes(1024) + b"\r\n"),
    ]  # fmt: skip
    head, piece = rng.choice(heads)

    def speak(write: Write) -> None:
        write(head)
        for _ in range((64 << 20) // len(piece)):
            write(piece)

    return f"{(head + piece)[:30]!r}", Trouble("", speak=speak)


def _raw(rng: random.Random) -> Answer:
    text = rng.choice(
        [
            b"", b"\0", b"HTTP/1.1\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
            b"hello\r\n" * 100,
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", b"HTTP/1.1 200 OK\r\n: x\r\n\r\n", b"SSH-2.0-OpenSSH\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n", rng.randbytes(200),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
            b"HTTP/1.1 200 OK\r\nX: \xff\xfe\0\r\n\r\n", b"\x15\x03\x01\0\x02\x02\x16",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            b"<html></html>",
            b"HTTP/1.1 204 No\r\nETag: \"/tmp/x\"\r\nX-Repo-Commit: x\r\n\r\n", b"HTTP/1.0 200\r\n\r\n{}",
        ]
    )  # fmt: skip
    return f"{text[:40]!r}", Trouble("", speak=lambda write: write(text))


def _json(rng: random.Random) -> Answer:
    """Another value at a random place of the list of files."""
    seed = rng.random()

    def change(body: bytes) -> bytes:
        inner = random.Random(seed)
        try:
            value = json.loads(body)
        except ValueError:
            return body
        holders: list[tuple[Any, Any]] = []
        level: list[Any] = [value]
        while level:
            holder = level.pop()
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            for key in keys:
                holders.append((holder, key))
                if isinstance(holder[key], dict | list):
                    level.append(holder[key])
        holder, key = inner.choice(holders)
        holder[key] = inner.choice(ODD_VALUES)
        return json.dumps(value).encode()

    return f"{seed}", Trouble("", change=change)


def _drip(rng: random.Random) -> Answer:
    head, piece = rng.choice(
        [
            (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
            (b"", b""),
        ]
    )

    def speak(write: Write) -> None:
        write(head)
        for _ in range(100):
            write(piece)
            _pause(0.05)

    return f"drip {head[-20:]!r}", Trouble("", speak=speak)
