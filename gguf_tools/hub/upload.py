"""Files of this machine to a repository on the Hub, one commit for each.

The client does the work: it asks the Hub how each file is to be stored, sends large ones in parts or in
chunks that the storage doesn't have yet, and commits. What an interrupted upload has stored is not sent again
when the same call is made again, and a file that is there already makes no commit. One that is there with
another content is replaced only if that is asked for.

A folder of outputs also has what other runs are working on, notes, and links to elsewhere. So a file of a
folder is taken because its name says what it is; everything else is named and stays. A pattern takes a name
with a leading dot only if it begins with that dot itself, and no pattern takes what may be a secret: that
goes by its whole name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.edit.in_place import undo_path
from gguf_tools.errors import BadRequest, MissingFile, OutputError
from gguf_tools.files.journal import JOURNAL_SUFFIX
from gguf_tools.files.partial_file import PARTIAL_SUFFIX
from gguf_tools.format.shards import open_gguf
from gguf_tools.hub.answers import endpoint
from gguf_tools.hub.client import call, quiet_client
from gguf_tools.hub.downloads import ListedFile, digest, list_files
from gguf_tools.hub.names import HubName

if TYPE_CHECKING:
    from gguf_tools.hub.library import HfApi

PATTERNS = (
    "*.gguf", "*.imatrix", "*.dat", "*.safetensors",
    "README.md", "SHA256SUMS", "attestation.json", "LICENSE*", "NOTICE*", "*.license",
    "*.losses.json", "*.evaluation.json", "*.html", "*.svg", "*.png", "*.csv",
    "config.json", "generation_config.json", "*tokenizer*.json", "*.index.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "*.jinja", "*.model",
)  # fmt: skip
"""Quantized files and what they were made with; what speaks of them; and a checkpoint's own files."""

UNFINISHED = (PARTIAL_SUFFIX, JOURNAL_SUFFIX)
"""Endings of outputs that are being written, which are never taken."""

_SECRETS = (
    ".env", ".env.*", "*.env", "*.env.*", "env", ".envrc", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*.pem", "*.key", "*.ppk", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx",
    ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".htpasswd", ".git-credentials", ".*_history",
    "token", "*[._-]token", "token.txt", "*[._-]token.txt", "token.json", "*[._-]token.json",
    "*api[_-]key*", "*apikey*", "*private[_-]key*", "*secret[_-]key*", "*access[_-]key*", "*[._-]key.json",
    "key.json", "key.txt", "keys.json", "keys.txt", "auth.json",
    "hf_token*", "stored_tokens", "*credentials*", "*accesskeys*.csv", "rootkey.csv", "*client_secret*.json",
    "*service[_-]account*.json", "*password*.txt", "passwd", "secret", "secret.*", "secrets",
    "secrets.*", "kubeconfig*",
)  # fmt: skip
"""Names, in small letters, of files that keep keys, tokens and passwords."""

_SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\A\s*PuTTY-User-Key-File|\A\s*hf_\w{20,}\s*\Z"
    rb"|\b(?:hf_[A-Za-z0-9]{30,}|gh[opsu]_[A-Za-z0-9]{36}|AKIA[0-9A-Z]{16})\b"
)
"""Pattern of private keys and well-known tokens."""

_START_BYTES = 4096


def files_of_a_model(folder: Path, include: str | Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that belong to a model, and the names of the others in it.

    include  a pattern, or several, of names that are taken besides
    raises   BadRequest for a link to what is outside of the folder, and for a file whose header is being
             edited
    """
    taken: list[Path] = []
    left_out: list[str] = []
    patterns = (include,) if isinstance(include, str) else tuple(include)
    for path in sorted(folder.iterdir()):
        if path.is_dir() or path.name.endswith(UNFINISHED) or not _is_chosen(path.name, patterns):
            left_out.append(path.name + "/" * path.is_dir())
            continue
        _check_link(folder, path)
        if not path.is_file() or (path.name not in patterns and _may_be_secret(folder, path)):
            left_out.append(path.name)
            continue
        if undo_path(path).exists():
            raise BadRequest(
                f"{path}: {undo_path(path).name} says that it is being edited; give the command that edits it"
                " again"
            )
        taken.append(path)
    return taken, left_out


def _is_chosen(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern takes a name; one with a leading dot, only if the pattern begins with it, too."""
    return any(
        fnmatchcase(name, pattern) and pattern.startswith(".") >= name.startswith(".")
        for pattern in (*PATTERNS, *patterns)
    )


def _may_be_secret(folder: Path, path: Path) -> bool:
    """Whether a file, or what a link in the folder stands for, may keep a secret by its name or its start."""
    target = Path(os.path.realpath(path)).relative_to(os.path.realpath(folder))
    if path.is_symlink() and any(part.startswith(".") for part in target.parts):
        return True
    names = {path.name.lower(), target.name.lower()}
    if any(fnmatchcase(name, pattern) for name in names for pattern in _SECRETS):
        return True
    with BadRequest.from_os(f"{path}: can't be read"), path.open("rb") as file:
        start = file.read(_START_BYTES)
    return _SECRET.search(start) is not None


def _check_link(folder: Path, path: Path) -> None:
    """Raise BadRequest for a link by which a file from elsewhere would be uploaded."""
    if not path.is_symlink():
        return
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise BadRequest(
            f"{path}: is a link to {target}, outside of the folder; name the file itself to upload it,"
            " or take the link away"
        )


_LAST = ("README.md", "SHA256SUMS", "attestation.json")
"""Files that speak of others, which should be there before them."""


@dataclass(frozen=True)
class Upload:
    """A file to upload, and its name in the repository."""

    path: Path
    name: str
    n_bytes: int


def plan_upload(
    paths: Iterable[Path], include: str | Sequence[str] = ()
) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
    """Return the files to upload, small ones first, and the names in folders that are left out.

    paths    files, parts of split sets, folders
    include  a pattern, or several, of names that are taken from folders besides
    raises   BadRequest for what is not there, is unfinished, leads out of its folder, or has the name of
             another; GGUFError for a split set that is not whole
    """
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in paths:
        if path.is_dir():
            taken, others = files_of_a_model(path, include)
            left_out += others
        else:
            taken = _parts_of(path)
        for each in taken:
            if files.setdefault(each.name, each).absolute() != each.absolute():
                raise BadRequest(f"{each}: {files[each.name]} has the same name, and would be uploaded, too")
    uploads = [Upload(path, name, path.stat().st_size) for name, path in files.items()]
    uploads.sort(key=lambda each: (each.name in _LAST, each.n_bytes, each.name))
    return tuple(uploads), tuple(left_out)


def upload(
    uploads: Sequence[Upload],
    name: HubName,
    *,
    private: bool = False,
    force: bool = False,
    bars: bool = True,
    done: Callable[[Upload, bool], object] = lambda each, is_new: None,
) -> None:
    """Upload files to a repository, which is made if it isn't there, and to a branch, likewise.

    private  a new repository is for its owner alone; one that is there stays as it is
    force    replace files that are there with another content
    done     called with each file, and whether it was not there already
    raises   HubError, after which files that are done stay there, and the same call goes on with the others;
             OutputError, before anything is sent, for a file that exists with other content
    """
    from gguf_tools.hub.library import HfApi

    api = HfApi(endpoint=endpoint())
    with quiet_client(bars=bars):
        call(name.repo, lambda: api.create_repo(name.repo, private=private or None, exist_ok=True))
        if name.revision is not None:
            branch = name.revision
            call(str(name), lambda: api.create_branch(name.repo, branch=branch, exist_ok=True))
        there = {} if force else list_files(name, is_first=False).files
        same = [each for each in uploads if each.name in there and _is_same(each, there[each.name])]
        other = [each.name for each in uploads if each.name in there and each not in same]
        if other:
            more = f" (and {len(other) - 1} other files)" if len(other) > 1 else ""
            raise OutputError(
                f"{name}: {other[0]} exists with other content{more}; --force replaces it, and the"
                " repository's history keeps the old one"
            )
        for each in uploads:
            if each not in same:
                call(str(name), partial(_send, api, each, name))
            done(each, each not in same)


def _is_same(each: Upload, there: ListedFile) -> bool:
    """Whether a file has the content that is there."""
    if each.n_bytes != there.n_bytes:
        return False
    is_large = there.sha256 is not None
    return digest(each.path, is_sha256=is_large) == (there.sha256 if is_large else there.blob_id)


def _send(api: HfApi, each: Upload, name: HubName) -> None:
    api.upload_file(
        path_or_fileobj=str(each.path),
        path_in_repo=each.name,
        repo_id=name.repo,
        revision=name.revision,
        commit_message=f"Upload {each.name}",
    )


def _parts_of(path: Path) -> list[Path]:
    if not path.is_file():
        raise MissingFile(f"{path}: no such file or folder")
    if path.name.endswith(UNFINISHED):
        raise BadRequest(f"{path}: is unfinished; the command that was writing it resumes it")
    if path.suffix == ".gguf":
        with open_gguf(path) as file:
            return list(file.paths)
    return [path]
