"""What `gguf-tools hash` prints: SHA-256 of every tensor's data, of each file, and of the content.

The content hash covers each tensor's name, type, shape and data in order of names. It is the same for one
file and for a split set, whatever the metadata and the order of tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import CHUNK_BYTES
from gguf_tools.format.values import bytes_of


@dataclass(frozen=True)
class Hashes:
    """Hexadecimal SHA-256.

    tensors  by tensor name, in file order
    files    by path, in order of shards
    content  of all tensors together
    """

    tensors: dict[str, str]
    files: dict[str, str]
    content: str

    def as_json(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "files": self.files, "content": self.content}


def hash_tensor(source: GGUFSource, name: str) -> str:
    """Return the SHA-256 of a tensor's data, without padding."""
    digest = hashlib.sha256()
    for start in range(0, source.tensors[name].n_bytes, CHUNK_BYTES):
        digest.update(source.read_bytes(name, start, start + CHUNK_BYTES).data)
    return digest.hexdigest()


def hash_source(source: GGUFSource) -> Hashes:
    """Hash all tensors and all files of `source`."""
    tensors = {name: hash_tensor(source, name) for name in source.tensors}
    content = hashlib.sha256()
    for name in sorted(tensors, key=bytes_of):
        info = source.tensors[name]
        content.update(b"%s\0%s\0" % (bytes_of(name), info.type.name.encode()))
        content.update(b"%s\0%s\n" % ("x".join(map(str, info.shape)).encode(), tensors[name].encode()))
    return Hashes(tensors, {str(path): _hash_file(path) for path in source.paths}, content.hexdigest())


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
