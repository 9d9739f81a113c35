"""Which code a process runs, and on which machine: a worker must have the code of who sends it work."""

from __future__ import annotations

import socket
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("gguf_tools", "quantize", "convert", "forward", "imatrix", "quality")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def code_version() -> str:
    """Return the version of the toolkit and a digest of its modules: "0.1.0 (1f0c2a9b)"."""
    digest = blake2b(digest_size=4)
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        number = version("gguf-tools")
    except PackageNotFoundError:
        number = "?"
    return f"{number} ({digest.hexdigest()})"


@cache
def this_machine() -> str:
    """Return a name for the running kernel: what a process of its own writes, its others see at once."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
