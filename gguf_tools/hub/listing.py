"""Which files a model on the Hub has, at which commit, their sizes, and the hashes of their contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from gguf_tools.errors import HubError
from gguf_tools.files.bounded_json import parse_json
from gguf_tools.hub import limits
from gguf_tools.hub.answers import endpoint, is_commit
from gguf_tools.hub.client import call
from gguf_tools.hub.names import HubName, is_file_name
from gguf_tools.text import shown

MAX_FILE_BYTES = 1 << 44
"""Maximum size of a file that is believed; the largest on the Hub are a hundredth of it."""

_HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class ListedFile:
    """What the Hub says of a file.

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
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

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
