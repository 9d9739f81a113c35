"""Names of models on the Hub, as people write them, and as the folders of its cache spell them.

    OWNER/NAME              OWNER/NAME@REVISION
    hf://OWNER/NAME         hf://OWNER/NAME@REVISION
    https://huggingface.co/OWNER/NAME       https://huggingface.co/OWNER/NAME/tree/REVISION

The cache keeps a model at `models--OWNER--NAME/snapshots/COMMIT`, so the name of the folder with config.json
is a hash, and the model's own name stands two folders higher.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gguf_tools.errors import BadRequest
from gguf_tools.system.files import absolute

SCHEME = "hf://"
PUBLIC_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
"""Hosts of the public Hub; HF_ENDPOINT may name another one."""

MAX_REPO_CHARS = 96
"""Maximum length of OWNER/NAME on the Hub."""

MAX_FILE_NAME_BYTES = 1024

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REPO = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"(?!.*\.\.)[^\s@:~^?*\\/]+(?:/[^\s@:~^?*\\/]+)*")
_CACHED = re.compile(r"models--(.+?)--(.+)")
_KEPT = re.compile(r"(?:models|datasets|spaces)--.+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A model on the Hub.

    repo      OWNER/NAME
    revision  branch, tag or commit; None: the main branch
    """

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_name(text: str) -> HubName | None:
    """Return the model that `text` names; None for a text that is meant as a path.

    raises  BadRequest for an address that names no model
    """
    if text.startswith(SCHEME):
        name = _with_revision(text.removeprefix(SCHEME))
        if name is None:
            raise BadRequest(f"{text}: names no model, expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
        return name
    if text.startswith(("http://", "https://")):
        return _of_address(text)
    return None if text.endswith(".gguf") else _with_revision(text)


def is_commit(text: object) -> bool:
    """Whether something is a commit as the Hub names them."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def is_file_name(text: object) -> bool:
    """Whether something names a file of a model, relative to the model, and none outside of it."""
    return (
        isinstance(text, str)
        and 0 < len(text.encode("utf-8", "replace")) <= MAX_FILE_NAME_BYTES
        and text.isprintable()
        and "\\" not in text
        and all(part not in ("", ".", "..") for part in text.split("/"))
    )


def cached_repo(folder: str | os.PathLike[str]) -> str | None:
    """Return OWNER/NAME for a folder of the Hub's cache, models--OWNER--NAME/snapshots/COMMIT; else None."""
    path = absolute(folder)
    if len(path.parts) < 3 or path.parent.name != "snapshots" or not is_commit(path.name):
        return None
    match = _CACHED.fullmatch(path.parent.parent.name)
    repo = "" if match is None else f"{match[1]}/{match[2]}"
    return repo if is_repo(repo) else None


def cached_contents(path: str | os.PathLike[str]) -> Path | None:
    """Return where the Hub's cache keeps what files of a snapshot are links to; None for another folder.

    A repository, of a model, a data set or a space, has the contents of all its commits in one folder. A
    link that stands in for it or for one of them leads elsewhere, and is none of the cache's.
    """
    folder = Path(os.path.realpath(path))
    for commit in (folder, *folder.parents):
        snapshots, repo = commit.parent, commit.parent.parent
        if is_commit(commit.name) and snapshots.name == "snapshots" and _KEPT.fullmatch(repo.name):
            return repo / "blobs"
    return None


def cached_name(folder: str | os.PathLike[str]) -> str | None:
    """Return NAME for a folder of the Hub's cache; else None."""
    repo = cached_repo(folder)
    return None if repo is None else repo.partition("/")[2]


def folder_name(folder: str | os.PathLike[str]) -> str:
    """Return the name that a model has by its folder: of a cached one the model's, not the commit's."""
    # absolute: "." has no name, and a link keeps its own
    return cached_name(folder) or absolute(folder).name


def _with_revision(text: str) -> HubName | None:
    repo, at, revision = text.partition("@")
    if not is_repo(repo) or (at and not _REVISION.fullmatch(revision)):
        return None
    return HubName(repo, revision if at else None)


def is_repo(text: str) -> bool:
    """Whether the Hub would accept a text as OWNER/NAME."""
    return (
        _REPO.fullmatch(text) is not None
        and len(text) <= MAX_REPO_CHARS
        and "--" not in text
        and ".." not in text
        and not text.endswith((".", "-", ".git"))
    )


def own_host() -> str:
    """Return host and port in HF_ENDPOINT, "" where it names none; raises BadRequest for no address."""
    return _host_of(os.environ.get("HF_ENDPOINT", ""), "HF_ENDPOINT")


def _host_of(address: str, what: str) -> str:
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises, too
    except ValueError:  # which may quote a password
        raise BadRequest(f"{what}: not an address, expected one like https://{PUBLIC_HOSTS[0]}") from None
    return parts.netloc.rpartition("@")[2]


def _of_address(text: str) -> HubName:
    _host_of(text, text)
    parts, ours = urlsplit(text), own_host()
    if parts.netloc.lower() not in (*PUBLIC_HOSTS, *([ours.lower()] if ours else [])):
        raise BadRequest(
            f"{text}: not an address of the Hub, expected https://{PUBLIC_HOSTS[0]}/OWNER/NAME"
            " (HF_ENDPOINT names another one)"
        )
    owner, _, rest = parts.path.strip("/").partition("/")
    name, _, rest = rest.partition("/")
    revision = unquote(rest.removeprefix("tree/")) if rest.startswith("tree/") else None
    repo = f"{owner}/{name}"
    if not is_repo(repo) or (rest and (revision is None or not _REVISION.fullmatch(revision))):
        raise BadRequest(
            f"{text}: names no model, expected https://{parts.netloc}/OWNER/NAME, or that with /tree/REVISION"
        )
    return HubName(repo, revision)
