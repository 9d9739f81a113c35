"""A model on the Hub as a folder whose weights stay there: small files are here, shards read by ranges."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from convert.checkpoint.remote_safetensors import RemoteSafetensorsFile
from gguf_tools.errors import HubError
from gguf_tools.hub.downloads import n_refused, note_refused
from gguf_tools.hub.ranges import Budget, InOrder, RemoteFile

_AT_ONCE = 8
"""How many headers are fetched at the same time."""


@dataclass(frozen=True)
class RemoteShard:
    """A safetensors file of a model.

    sha256  of its content, as the Hub knows it; None for a small file
    """

    name: str
    n_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class StreamedFolder:
    """A folder with a model's small files, whose shards are on the Hub. It can be pickled.

    folder   in the cache
    commit   that all files are of
    shards   in reading order
    quiet    don't say which shards were checked
    """

    folder: Path
    repo: str
    commit: str
    shards: tuple[RemoteShard, ...]
    quiet: bool = field(default=False, compare=False)

    def __fspath__(self) -> str:
        return str(self.folder)

    def open_shards(self, opened: ExitStack) -> tuple[RemoteSafetensorsFile, ...]:
        """Open the shards, whose headers are fetched; raises HubError, CheckpointError."""
        budget = Budget()
        digests = [
            None
            if shard.sha256 is None
            else InOrder(shard.n_bytes, shard.sha256, budget, partial(self._refuse, shard))
            for shard in self.shards
        ]

        def open_shard(shard: RemoteShard, digest: InOrder | None) -> RemoteSafetensorsFile:
            remote = RemoteFile(self.repo, self.commit, shard.name, shard.n_bytes, digest)
            return RemoteSafetensorsFile(self.folder / shard.name, remote)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            files = tuple(pool.map(open_shard, self.shards, digests))
        for file in files:
            opened.enter_context(file)
        opened.callback(self._say_what_was_checked, digests)
        return files

    def recognised_by(self) -> dict[str, str]:
        """Return the identity of each shard: length, hash or commit, and how often it was refused.

        What was made of bytes that turned out to be others is not gone on with.
        """
        told = {}
        for shard in self.shards:
            known = f"{shard.n_bytes} bytes, {shard.sha256 or self.commit}"
            times = n_refused(self.repo, self.commit, shard.name)
            told[shard.name] = f"{known}, refused {times} times" if times else known
        return told

    def _refuse(self, shard: RemoteShard, found: str) -> None:
        note_refused(self.repo, self.commit, shard.name)
        raise HubError(
            f"{self.repo}: {shard.name}: the content that came is not the Hub's: its SHA-256 is {found}, the"
            f" Hub lists {shard.sha256}; what this run has made of it is of no use, so begin again with"
            " --restart"
        )

    def _say_what_was_checked(self, digests: list[InOrder | None]) -> None:
        """Say so when weights were read whose hash was not checked."""
        read = [each for each in digests if each is not None and 2 * each.n_seen >= each.n_bytes]
        n_checked = sum(each.is_checked for each in read)
        # A worker reads a part of each shard, and has nothing to say.
        if self.quiet or n_checked == len(read) or multiprocessing.parent_process() is not None:
            return
        print(
            f"{self.repo}: SHA-256 checked of {n_checked} of {len(read)} shards; the others did not come as a"
            " whole, or not in order",
            file=sys.stderr,
        )
