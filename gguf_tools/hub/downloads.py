"""Files of the Hub brought into the client's cache, and their contents checked there.

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
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from gguf_tools.errors import HubError
from gguf_tools.hub.answers import Fetched, fetching
from gguf_tools.hub.client import call
from gguf_tools.hub.listing import ListedFile
from gguf_tools.hub.names import HubName

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
    from huggingface_hub import hf_hub_download

    # A file of unknown size may fill the disk, and no more.
    most = shutil.disk_usage(_existing(_cached_model(repo))).free if file.n_bytes is None else file.n_bytes
    with fetching(Fetched(commit, most, stop)):
        hf_hub_download(repo, file.name, revision=commit)


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
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _mark(repo: str, commit: str, name: str) -> Path:
    hashed = hashlib.sha256(f"{commit}/{name}".encode()).hexdigest()
    return _cached_model(repo) / ".unchecked" / hashed[:40]


def _refusals(repo: str, commit: str, name: str) -> Path:
    return _mark(repo, commit, name).with_suffix(".refused")


def _existing(path: Path) -> Path:
    """Return the nearest folder that is there."""
    return path if path.exists() else _existing(path.parent)
