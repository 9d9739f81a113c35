"""A Hub on the loopback: the routes that the real client `huggingface_hub` uses, over folders of files.

    with HubServer({"owner/name": folder}) as hub:
        with hub.client(tmp_path / "cache"):
            gguf_tools.commands.convert.main(["owner/name"])

Large files lie on another host, as on the real Hub: their address redirects from 127.0.0.1 to localhost, and
a token that turns up there is an error. `hub.troubles` says what goes wrong, `hub.requests` what was asked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1 << 20
"""Size from which a file lies in the large storage."""


@dataclass
class Trouble:
    """What goes wrong with requests whose method and path contain `where`, as in "GET /cdn/".

    times       how many of them; the others go well
    status      the answer's status; None: it is the right one
    headers     the answer's headers besides; None: without this one
    broken_at   close the connection after so many bytes of the body; None: send all
    change      what becomes of the body, whose length is told as it is then
    speak       answers instead, by the function it gets, and closes the connection
    """

    where: str
    times: int = 1_000_000
    status: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    broken_at: int | None = None
    change: Callable[[bytes], bytes] = lambda body: body
    speak: Callable[[Callable[[bytes], object]], object] | None = None


class HubServer:
    """A running Hub.

    models         OWNER/NAME -> folder
    requests       "METHOD path [range]", in their order
    sent_bytes     of all bodies
    gated, tokens  models whose files are for holders of one of the tokens alone
    leaked_tokens  addresses of the large storage that were asked with a token
    authorized     Authorization, Host and path of the requests that had any
    refuses_content  whether the storage has no room for large files
    uploads        folder in which new models get theirs
    stored         contents of large files by their SHA-256
    made           requests for repositories and branches
    ignores_ranges whether whole files are sent to those who ask for a range
    """

    def __init__(self, models: Mapping[str, Path]) -> None:
        self.models = dict(models)
        self.requests: list[str] = []
        self.sent_bytes = 0
        self.troubles: list[Trouble] = []
        self.gated: set[str] = set()
        self.tokens: set[str] = set()
        self.leaked_tokens: list[str] = []
        self.authorized: list[tuple[str, str, str]] = []
        self.cookies: list[str] = []
        self.ignores_ranges = False
        self.refuses_content = False
        self.uploads = Path()
        self.stored: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, repo: str) -> str:
        """Return the commit that a model's main branch is at: a hash of names and sizes of its files."""
        names = "".join(f"{name} {path.stat().st_size}\n" for name, path in self.files(repo).items())
        return hashlib.sha1(f"{repo}\n{names}".encode()).hexdigest()

    def files(self, repo: str) -> dict[str, Path]:
        folder = self.models[repo]
        return {
            path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
        }

    def asked(self, part: str) -> list[str]:
        """Return the requests that contain `part`."""
        return [request for request in self.requests if part in request]

    def trouble(self, request: str) -> Trouble | None:
        """Return what is to go wrong with a request, and count it."""
        with self.lock:
            for trouble in self.troubles:
                if trouble.where in request and trouble.times > 0:
                    trouble.times -= 1
                    return trouble
        return None

    def environment(self, cache: Path, **settings: str) -> dict[str, str]:
        """Return variables by which a client uses this Hub, and a cache of its own."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **settings,
        }

    @contextmanager
    def client(self, cache: Path, **settings: str) -> Iterator[None]:
        """Let the client of this process use this Hub; it reads its variables once, so it reads them anew."""
        wanted = self.environment(cache, **settings)
        names = [*wanted, "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"]
        before = {name: os.environ.get(name) for name in names}
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(wanted)
        _read_settings()
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            _read_settings()


def _read_settings() -> None:
    import importlib

    import huggingface_hub.constants

    importlib.reload(huggingface_hub.constants)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        asked_range = self.headers.get("Range")
        request = f"{self.command} {path}"
        with hub.lock:
            hub.requests.append(request if asked_range is None else f"{request} {asked_range}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.cookies += self.headers.get_all("Cookie") or []
        if self.headers.get("Authorization"):
            hub.authorized.append((self.headers["Authorization"], self.headers["Host"], path))
        self.trouble = hub.trouble(request) or Trouble("")
        if self.trouble.speak is not None:
            self.close_connection = True
            self.trouble.speak(self.wfile.write)
            return
        if self.trouble.status is not None:
            self._send(self.trouble.status, b'{"error": "in trouble"}')
            return
        parts = path.strip("/").split("/")
        if self.command in ("POST", "PUT"):
            self._take(parts)
            return
        if parts[0] == "cdn":
            self._large_file(parts[1:], asked_range)
        elif parts[:2] == ["api", "models"]:
            self._model("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), asked_range)
        else:
            self._send(404, b"no such route")

    def _take(self, parts: list[str]) -> None:
        """Answer a request that brings something: a repository, a branch, a file's content, a commit."""
        hub = self.server_hub
        if parts[0] == "storage":
            hub.stored[parts[1]] = self.body
            if hashlib.sha256(self.body).hexdigest() != parts[1]:
                self._send(400, b"{}")
                return
            self._send(200, b"{}")
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in hub.tokens:
            self._send(401, b'{"error": "Invalid username or password."}')
            return
        if parts == ["api", "validate-yaml"]:
            self._send(200, b'{"errors": [], "warnings": []}')
            return
        asked = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        if parts == ["api", "repos", "create"]:
            repo = f"{asked[0]['organization']}/{asked[0]['name']}"
            hub.made.append(asked[0])
            status = 409 if repo in hub.models else 200
            place = hub.models.setdefault(repo, hub.uploads / repo.replace("/", "--"))
            place.mkdir(parents=True, exist_ok=True)
            self._json({"url": f"{hub.endpoint}/{repo}", "id": repo}, status)
        elif "branch" in parts:
            hub.made.append({"branch": parts[-1]})
            self._json({})
        elif "preupload" in parts:
            files = [
                {
                    "path": each["path"], "shouldIgnore": False, "oid": None,
                    "uploadMode": "lfs" if each["size"] >= LARGE_BYTES else "regular",
                }
                for each in asked[0]["files"]
            ]  # fmt: skip
            self._json({"files": files})
        elif parts[-1] == "batch":
            objects = []
            for each in asked[0]["objects"]:
                href = f"http://localhost:{hub.port}/storage/{each['oid']}"
                if hub.refuses_content:
                    objects.append({**each, "error": {"code": 413, "message": "no room left for this file"}})
                    continue
                known = each["oid"] in hub.stored
                objects.append(each if known else {**each, "actions": {"upload": {"href": href}}})
            self._json({"transfer": "basic", "objects": objects})
        elif "commit" in parts:
            self._commit("/".join(parts[2:4]), asked)

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        hub = self.server_hub
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                (hub.models[repo] / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                (hub.models[repo] / value["path"]).write_bytes(hub.stored[value["oid"]])
        self._json({"commitUrl": f"{hub.endpoint}/{repo}/commit/x", "commitOid": hub.commit(repo)})

    def _json(self, data: Any, status: int = 200) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _refused(self, repo: str, *, files: bool = False) -> bool:
        """Answer a request for a model that isn't there, or for files that aren't for everyone; return
        whether it was one."""
        hub = self.server_hub
        if repo not in hub.models:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return True
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if files and repo in hub.gated and token not in hub.tokens:
            self._send(403 if token else 401, b"{}", {"X-Error-Code": "GatedRepo"})
            return True
        return False

    def _model(self, repo: str, rest: list[str]) -> None:
        if self._refused(repo):
            return
        hub = self.server_hub
        commit = hub.commit(repo)
        branches = [made["branch"] for made in hub.made if "branch" in made]
        if len(rest) > 1 and rest[1] not in ("main", commit, *branches):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = [_entry(name, path) for name, path in hub.files(repo).items()]
        if rest[:1] == ["tree"]:
            body: Any = [{"type": "file", "path": name, **entry} for name, entry in files]
        else:
            siblings = [{"rfilename": name, **entry} for name, entry in files]
            body = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, revision: str, name: str, asked_range: str | None) -> None:
        if self._refused(repo, files=True):
            return
        hub = self.server_hub
        path, commit = hub.files(repo).get(name), hub.commit(repo)
        if revision not in ("main", commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Repo-Commit": commit})
            return
        if path is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        size = path.stat().st_size
        etag = f'"{_digest(path, path.stat().st_mtime_ns)}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"}
        if size < LARGE_BYTES:
            self._send_file(path, asked_range, headers)
            return
        headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": etag}
        address = f"http://localhost:{hub.port}/cdn/{repo}/{name}"
        self._send(302, b"", {**headers, "Location": address})

    def _large_file(self, parts: list[str], asked_range: str | None) -> None:
        hub = self.server_hub
        if self.headers.get("Authorization"):
            hub.leaked_tokens.append(self.path)
        self._send_file(hub.models["/".join(parts[:2])] / "/".join(parts[2:]), asked_range, {})

    def _send_file(self, path: Path, asked_range: str | None, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        if asked_range is None or self.server_hub.ignores_ranges:
            self._send(200, path.read_bytes(), headers)
            return
        first, _, last = asked_range.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(size, int(last) + 1 if last else size)
        if start >= size:
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        with open(path, "rb") as file:
            file.seek(start)
            body = file.read(stop - start)
        self._send(206, body, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        body = self.trouble.change(body)
        self.send_response(status)
        told: dict[str, str | None] = {"Content-Length": str(len(body)), **(headers or {})}
        for name, value in (told | dict(self.trouble.headers)).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.trouble.broken_at is not None and self.trouble.broken_at < len(body):
            body = body[: self.trouble.broken_at]
            self.close_connection = True
        with self.server_hub.lock:
            self.server_hub.sent_bytes += len(body)
        self.wfile.write(body)


def _entry(name: str, path: Path) -> tuple[str, dict[str, Any]]:
    """Return what the Hub says of a file."""
    status = path.stat()
    digest = _digest(path, status.st_mtime_ns)
    blob = digest[:40]
    if status.st_size < LARGE_BYTES:
        blob = hashlib.sha1(f"blob {status.st_size}\0".encode() + path.read_bytes()).hexdigest()
    entry: dict[str, Any] = {"size": status.st_size, "oid": blob, "blobId": blob}
    if status.st_size >= LARGE_BYTES:
        entry["lfs"] = {"oid": digest, "sha256": digest, "size": status.st_size, "pointerSize": 134}
    return name, entry


@cache
def _digest(path: Path, mtime_ns: int) -> str:
    """Return the SHA-256 of a file that has not been changed since `mtime_ns`."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
