"""Files of the Hub: listed at a commit, brought into the client's cache, and their contents checked there.

The client looks at a file's length and no further. Here the hash that the Hub lists is checked as well, of
large files SHA-256 and of small ones git's. A mark lies beside the cache's folders from before the first byte
is written until the content has been checked, so that a file of an interrupted run is checked by the next.

    models--OWNER--NAME/refs/REVISION               the commit of a branch or tag
    models--OWNER--NAME/snapshots/COMMIT/FILE       a link to its content
    models--OWNER--NAME/blobs/HASH                  contents
    models--OWNER--NAME/.unchecked/HASH             marks, which are ours
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from gguf_tools.errors import HubError
from gguf_tools.files.documents import parse_json
from gguf_tools.files.early_checks import nearest_folder
from gguf_tools.hub import limits
from gguf_tools.hub.answers import Fetched, endpoint, fetching
from gguf_tools.hub.client import call
from gguf_tools.hub.names import HubName, is_commit, is_file_name
from gguf_tools.system.files import free_bytes
from gguf_tools.text import shown

MAX_FILE_BYTES = 1 << 44
"""Maximum size of a file that is believed; the largest on the Hub are a hundredth of it."""

_HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class ListedFile:
    """File as the Hub describes it.

    n_bytes  None: it doesn't say
    sha256   of a large file's content, in hex; None for a small one
    blob_id  git's name of a small file's content: SHA-1 of "blob SIZE", a zero byte, and the content
    """

    name: str
    n_bytes: int | None = None
    sha256: str | None = None
    blob_id: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a model at a commit, by name."""

    commit: str
    files: Mapping[str, ListedFile]


def list_files(name: HubName, *, is_first: bool = True) -> Listing:
    """Return the files of a model.

    is_first  nothing has been asked yet, see `call`
    raises    HubError, for an answer too that is none of the Hub's
    """

    def ask() -> Listing:
        return parse_listing(str(name), _answer(name))

    return call(str(name), ask, is_first=is_first)


def parse_listing(subject: str, data: bytes) -> Listing:
    """Parse an answer of the Hub about a model's files; raises HubError, which names `subject`."""
    try:
        answer = parse_json(data)
    except ValueError as error:
        raise HubError(f"{subject}: the Hub's answer is not JSON ({error})") from None
    if not isinstance(answer, dict):
        raise _unexpected(subject, "a model", answer)
    commit, siblings = answer.get("sha"), answer.get("siblings", [])
    if not isinstance(commit, str) or not is_commit(commit):
        raise _unexpected(subject, "a commit of 40 hex digits", commit)
    if not isinstance(siblings, list):
        raise _unexpected(subject, "a list of files", siblings)
    files = [_file(subject, entry) for entry in siblings]
    return Listing(commit, MappingProxyType({file.name: file for file in files}))


def _answer(name: HubName) -> bytes:
    from gguf_tools.hub.library import build_hf_headers, get_session, hf_raise_for_status

    place = "" if name.revision is None else f"/revision/{quote(name.revision, safe='')}"
    response = get_session().get(
        f"{endpoint()}/api/models/{name.repo}{place}",
        headers=build_hf_headers(),
        params={"blobs": True},
        timeout=limits.answer_seconds(),
    )
    hf_raise_for_status(response)
    content: bytes = response.content
    return content


def _file(subject: str, entry: Any) -> ListedFile:
    if not isinstance(entry, dict):
        raise _unexpected(subject, "a file", entry)
    name, n_bytes, blob_id = entry.get("rfilename"), entry.get("size"), entry.get("blobId")
    if not isinstance(name, str) or not is_file_name(name):
        raise _unexpected(subject, "the name of a file in the model", name)
    if n_bytes is not None and (type(n_bytes) is not int or not 0 <= n_bytes <= MAX_FILE_BYTES):
        raise _unexpected(f"{subject}: {shown(name)}", "a size in bytes", n_bytes)
    if blob_id is not None and not _is_hash(blob_id, 40):
        raise _unexpected(f"{subject}: {shown(name)}", "a blob of 40 hex digits", blob_id)
    lfs = entry.get("lfs")
    if lfs is None:
        return ListedFile(name, n_bytes, None, blob_id)
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else lfs
    if not _is_hash(sha256, 64):
        raise _unexpected(f"{subject}: {shown(name)}", "a SHA-256 of 64 hex digits", sha256)
    return ListedFile(name, n_bytes, sha256)


def _is_hash(value: Any, n_digits: int) -> bool:
    return isinstance(value, str) and len(value) == n_digits and _HEX_DIGITS.issuperset(value)


def _unexpected(subject: str, expected: str, found: Any) -> HubError:
    return HubError(f"{subject}: the Hub's answer has {shown(repr(found))}, expected {expected}")


AT_ONCE = 8
"""How many files are fetched at the same time."""

_BLOCK_BYTES = 1 << 22


def snapshot_folder(repo: str, commit: str) -> Path:
    """Return the folder of the cache in which the files of a model at a commit are."""
    return _cached_model(repo) / "snapshots" / commit


def is_cached(repo: str, commit: str, file: ListedFile) -> bool:
    """Whether a file is in the cache, of its size, and checked."""
    path = snapshot_folder(repo, commit) / file.name
    return not _is_doubtful(path, file, _mark(repo, commit, file.name))


def download(name: HubName, commit: str, files: Iterable[ListedFile]) -> Path:
    """Return the folder in the cache that holds files of a model; fetch and check those that are missing.

    raises  HubError; a file whose content is not what the Hub lists is removed from the cache
    """
    folder = snapshot_folder(name.repo, commit)
    _write_ref(name, commit)
    stop = threading.Event()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for _ in pool.map(partial(_bring, name.repo, commit, stop), files):
            pass
    finally:
        stop.set()  # after an error, or ctrl-C, the others are not waited for
        pool.shutdown(cancel_futures=True)
    return folder


def n_refused(repo: str, commit: str, name: str) -> int:
    """Return how often a file that was read without keeping it has turned out to be another one."""
    path = _refusals(repo, commit, name)
    return path.stat().st_size if path.exists() else 0


def note_refused(repo: str, commit: str, name: str) -> None:
    """Note that a file that was read without keeping it was another one: by a byte, beside the marks."""
    path = _refusals(repo, commit, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(b".")


def _bring(repo: str, commit: str, stop: threading.Event, file: ListedFile) -> None:
    path, mark = snapshot_folder(repo, commit) / file.name, _mark(repo, commit, file.name)
    if not _is_doubtful(path, file, mark):
        return
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    if not path.exists():
        call(f"{repo}: {file.name}", partial(_fetch, repo, commit, stop, file))
    check(f"{repo}: {file.name}", path, file)
    mark.unlink(missing_ok=True)


def _is_doubtful(path: Path, file: ListedFile, mark: Path) -> bool:
    """Whether a file is not there, has another size than the Hub lists, or has not been checked."""
    return (
        not path.exists()
        or mark.exists()
        or (file.n_bytes is not None and path.stat().st_size != file.n_bytes)
    )


def _fetch(repo: str, commit: str, stop: threading.Event, file: ListedFile) -> None:
    from gguf_tools.hub.library import hf_hub_download

    # A file of unknown size may fill the disk, and no more.
    most = file.n_bytes
    if most is None:
        most = free_bytes(nearest_folder(_cached_model(repo)))
    with fetching(Fetched(commit, most, stop)):
        hf_hub_download(repo, file.name, revision=commit, endpoint=endpoint())


def check(subject: str, path: Path, file: ListedFile) -> None:
    """Raise HubError for a file of the cache whose content is not what the Hub lists, after removing it."""
    n_bytes = path.stat().st_size
    kind, expected = ("SHA-256", file.sha256) if file.sha256 is not None else ("git hash", file.blob_id)
    if file.n_bytes is not None and n_bytes != file.n_bytes:
        kind, found, expected = "length", str(n_bytes), str(file.n_bytes)
    elif expected is None:
        return
    else:
        found = digest(path, is_sha256=file.sha256 is not None)
    if found != expected:
        _discard(path)
        raise HubError(
            f"{subject}: the content that came is not the Hub's: its {kind} is {found}, the Hub lists"
            f" {expected}; the file is removed from the cache, so give the command again"
        )


def digest(path: Path, *, is_sha256: bool) -> str:
    """Return the hash of a file as the Hub gives it: SHA-256, or git's name of the content."""
    # SHA-1 is git's; nothing is kept secret by it.
    hashed = (
        hashlib.sha256()
        if is_sha256
        else hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    )
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hashed.update(block)
    return hashed.hexdigest()


def _discard(path: Path) -> None:
    """Remove a file of the cache, and the content that it links to unless that is what its own name says."""
    target = Path(os.path.join(path.parent, os.readlink(path))) if path.is_symlink() else None
    if target is not None and target.parent.name == "blobs":
        is_itself = digest(target, is_sha256=len(target.name) == 64) == target.name
        if not is_itself:
            target.unlink()
    path.unlink()


def _write_ref(name: HubName, commit: str) -> None:
    """Note which commit a branch or tag is at, by which the client finds the files without the Hub."""
    revision = name.revision or "main"
    if revision == commit:
        return
    path = _cached_model(name.repo) / "refs" / revision
    with suppress(OSError):  # a cache that is read only, whose files may be whole all the same
        if not path.exists() or path.read_text() != commit:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial_path = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            partial_path.write_text(commit)
            os.replace(partial_path, path)


def _cached_model(repo: str) -> Path:
    from gguf_tools.hub.library import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _mark(repo: str, commit: str, name: str) -> Path:
    hashed = hashlib.sha256(f"{commit}/{name}".encode()).hexdigest()
    return _cached_model(repo) / ".unchecked" / hashed[:40]


def _refusals(repo: str, commit: str, name: str) -> Path:
    return _mark(repo, commit, name).with_suffix(".refused")
