"""A model on the Hub as a folder whose weights stay there: small files are here, shards read by ranges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from convert.checkpoint.remote_safetensors import RemoteSafetensorsFile
from gguf_tools.hub.ranges import RemoteFile

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
    """

    folder: Path
    repo: str
    commit: str
    shards: tuple[RemoteShard, ...]

    def __fspath__(self) -> str:
        return str(self.folder)

    def open_shards(self, opened: ExitStack) -> tuple[RemoteSafetensorsFile, ...]:
        """Open the shards, whose headers are fetched; raises HubError, CheckpointError."""

        def open_shard(shard: RemoteShard) -> RemoteSafetensorsFile:
            remote = RemoteFile(self.repo, self.commit, shard.name, shard.n_bytes)
            return RemoteSafetensorsFile(self.folder / shard.name, remote)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            files = tuple(pool.map(open_shard, self.shards))
        for file in files:
            opened.enter_context(file)
        return files

    def recognised_by(self) -> dict[str, str]:
        """Return what each shard is recognised by: length, and hash or commit."""
        return {shard.name: f"{shard.n_bytes} bytes, {shard.sha256 or self.commit}" for shard in self.shards}
