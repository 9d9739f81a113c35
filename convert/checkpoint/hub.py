"""The files of a model on the Hub that a conversion reads, brought to the client's cache.

A model's page often has its weights twice or three times: as safetensors, as pickles, in Mistral's own
files, for ONNX. What is fetched is what `Checkpoint` would open of all of them, and the small files beside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from convert.checkpoint.adapted_folder import CONFIG_NAME, WEIGHTS_NAME
from convert.checkpoint.checkpoint import (
    INDEX_NAME,
    PICKLE_NAMES,
    SINGLE_NAME,
    WEIGHT_NAMES,
    is_pickle_of_weights,
    read_index,
    refuse_adapter,
)
from convert.checkpoint.streamed import RemoteShard, StreamedFolder
from gguf_tools.errors import CheckpointError, HubError, UnsupportedCheckpoint
from gguf_tools.findings import remark
from gguf_tools.hub.answers import endpoint
from gguf_tools.hub.client import is_passing, is_unknown, quiet_client
from gguf_tools.hub.downloads import ListedFile, Listing, download, is_cached, list_files
from gguf_tools.hub.names import SCHEME, HubName, parse_hub_name
from gguf_tools.text import has_terminal, size_text

SMALL_NAMES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "README.md")
"""Patterns of config.json, the tokenizer's files, the index and the model card. No code is among them."""

SMALL_FOLDERS = ("additional_chat_templates/*.jinja", "[0-9]_*/config.json", "[0-9]_Dense/model.safetensors")
"""Patterns of those in folders: named chat templates, and the modules of sentence-transformers."""

MAX_SMALL_BYTES = 256 << 20
"""Maximum size of such a file; the largest tokenizer.json are a tenth of it."""


def hub_name(text: str) -> HubName | None:
    """Read the name of a model on the Hub; None for a path.

    What exists on this machine is meant, whatever it looks like. OWNER/NAME is a name on the Hub unless
    there is a folder OWNER here: then it is a path, rightly or wrongly typed.

    raises  BadRequest for an address that names no model
    """
    if os.path.exists(text):
        return None
    name = parse_hub_name(text)
    return None if _is_plain(text) and Path(text).parent.is_dir() else name


@contextmanager
def here_neither(text: str) -> Iterator[None]:
    """Let an error of the Hub say that `text`, which may be a mistyped path, is no path either."""
    try:
        yield
    except HubError as error:
        if _is_plain(text) and is_unknown(error):
            error.add_note(f"nor is there a file or folder {text} on this machine")
        raise


def _is_plain(text: str) -> bool:
    return not text.startswith((SCHEME, "http://", "https://"))


def adapter_folder(folder: str | os.PathLike[str]) -> Path:
    """Find the folder of an adapter; one on the Hub, OWNER/NAME, is fetched into its cache first.

    raises  HubError; UnsupportedCheckpoint for what has no weights in safetensors
    """
    text = os.fspath(folder)
    name = hub_name(text)
    if name is None:
        return Path(folder)
    with here_neither(text), quiet_client(bars=has_terminal()):
        try:
            listing = list_files(name)
        except HubError as error:
            return _cached(name, error)
        files = [listing.files[each] for each in (CONFIG_NAME, WEIGHTS_NAME) if each in listing.files]
        if len(files) < 2:
            raise UnsupportedCheckpoint(
                f"{name}: no adapter among its {len(listing.files)} files, expected {CONFIG_NAME} and"
                f" {WEIGHTS_NAME}"
            )
        return download(name, listing.commit, files)


def fetch(name: HubName, *, weights: bool = True, allow_pickle: bool = False, quiet: bool = False) -> Path:
    """Return the folder in the cache that holds what is wanted of a model, after fetching what is missing.

    A fetch that was interrupted goes on where it stopped. When the Hub can't be reached, or must not be
    (HF_HUB_OFFLINE), the folder is what earlier fetches have left.

    weights       False: only config.json and the tokenizer
    allow_pickle  .bin and .pt files, where there are no safetensors
    raises  HubError, UnsupportedCheckpoint for a model with pickles alone, CheckpointError for one without
            weights or for a disk that is too small
    """
    bars = not quiet and has_terminal()
    with quiet_client(bars=bars):
        try:
            listing = list_files(name)
        except HubError as error:
            cached = _cached(name, error)
            if not quiet and not is_offline():
                remark(f"{name}: {endpoint()} can't be reached; using what is in the cache")
            return cached
        folder = _fetch_small(name, listing)
        if not weights:
            return folder
        names = weight_files(name, folder, listing.files, allow_pickle=allow_pickle)
        files = [listing.files[file] for file in names]
        missing = [file for file in files if not is_cached(name.repo, listing.commit, file)]
        if missing:
            n_bytes = sum(file.n_bytes or 0 for file in missing)
            _check_space(name, folder, n_bytes)
            if not quiet:
                plural = "s" * (len(missing) != 1)
                remark(f"{name}: fetching {len(missing)} file{plural}, {size_text(n_bytes)}")
        return download(name, listing.commit, files)


def stream(name: HubName, *, quiet: bool = False) -> StreamedFolder:
    """Return a model whose small files are fetched, and whose weights are read from the Hub as they are used.

    raises  HubError, CheckpointError; UnsupportedCheckpoint for a model with pickles alone
    """
    with quiet_client(bars=not quiet and has_terminal()):
        listing = list_files(name)
        folder = _fetch_small(name, listing)
        shards = []
        for file in weight_files(name, folder, listing.files):
            n_bytes = listing.files[file].n_bytes
            if n_bytes is None:
                raise HubError(f"{name}: {file}: the Hub doesn't say how large it is; leave --stream out")
            shards.append(RemoteShard(file, n_bytes, listing.files[file].sha256))
        return StreamedFolder(folder, name.repo, listing.commit, tuple(shards), quiet)


def _fetch_small(name: HubName, listing: Listing) -> Path:
    """Bring a model's small files into the cache, and return their folder. There are no bars for them."""
    files = [file for file in listing.files.values() if _is_small(file)]
    if not files:
        raise HubError(f"{name}: none of its {len(listing.files)} files is of a model that can be converted")
    with quiet_client(bars=False):
        return download(name, listing.commit, files)


def weight_files(
    name: HubName, folder: Path, files: Iterable[str], *, allow_pickle: bool = False
) -> tuple[str, ...]:
    """Return the files with weights that `Checkpoint` would read if all of them were in the folder.

    folder  with the model's small files
    files   all files that the model has
    raises  CheckpointError, UnsupportedCheckpoint
    """
    places = read_index(folder / INDEX_NAME)
    files = [file for file in files if "/" not in file]
    if places is not None:
        shards = sorted(set(places.values()))
        missing = [shard for shard in shards if shard not in files]
        if missing == shards and SINGLE_NAME in files:
            return (SINGLE_NAME,)
        if missing:
            raise CheckpointError(f"{name}: {INDEX_NAME} names {missing[0]}, which is not on the Hub")
        return tuple(shards)
    for pattern in WEIGHT_NAMES:
        if matching := sorted(file for file in files if fnmatch(file, pattern)):
            return tuple(matching)
    pickles = sorted(filter(is_pickle_of_weights, files))
    if pickles and allow_pickle:
        return tuple(pickles)
    if not pickles:
        refuse_adapter(folder)
    if pickles:
        raise UnsupportedCheckpoint(
            f"{name}: its weights are pickles ({pickles[0]} ...), and reading one can run any code;"
            " --allow-pickle fetches and reads them"
        )
    raise CheckpointError(f"{name}: no weights among its {len(files)} files; expected model.safetensors")


def _is_small(file: ListedFile) -> bool:
    patterns = SMALL_FOLDERS if "/" in file.name else SMALL_NAMES
    is_wanted = any(fnmatch(file.name, pattern) for pattern in patterns)
    return is_wanted and file.name.count("/") <= 1 and (file.n_bytes or 0) <= MAX_SMALL_BYTES


def is_offline() -> bool:
    """Return whether the Hub must not be asked."""
    from gguf_tools.hub.library import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cached(name: HubName, error: HubError) -> Path:
    """Return the folder that an earlier fetch has left; raise `error` when there is none, or if the Hub has
    answered."""
    from gguf_tools.hub.library import errors, snapshot_download

    if not is_offline() and (error.__cause__ is None or not is_passing(error.__cause__)):
        raise error
    try:
        patterns = [*SMALL_NAMES, *WEIGHT_NAMES, *PICKLE_NAMES]
        return Path(
            snapshot_download(
                name.repo, revision=name.revision, local_files_only=True, allow_patterns=patterns
            )
        )
    except errors.LocalEntryNotFoundError as incomplete:
        # A client that knows of files that were never wanted calls the folder incomplete; `Checkpoint` knows
        # better what is missing.
        partial = getattr(incomplete, "snapshot_path", None)
        if partial is None:
            raise error from error.__cause__
        return Path(partial)


def _check_space(name: HubName, folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        cache = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
        raise CheckpointError(
            f"{name}: fetching it takes {size_text(n_bytes)}, and the disk of {cache} has {size_text(free)}"
            " left; --stream reads it without keeping it, and HF_HOME names another place"
        )
