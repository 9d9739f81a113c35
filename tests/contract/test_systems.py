"""What not every system has is called in one place, so that the rest runs everywhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.contract.import_graph import PACKAGES, ROOT, files_of

_HOME = Path("gguf_tools", "system")
_HAS_A_FALLBACK = {
    "gguf_tools/edit/rewrite.py": {"copy_file_range"},
    "gguf_tools/files/partial_file.py": {"posix_fadvise"},
    "quantize/simd/kernel.py": {"geteuid"},
}
_NOT_EVERYWHERE = re.compile(
    r"\bos\.(p(?:read|write)v?|fdatasync|copy_file_range|posix_\w+|sched_\w+|statvfs|fchmod|fork\w*|gete?uid"
    r"|O_(?:NONBLOCK|CLOEXEC|DIRECTORY))\b|^\s*(?:import|from) (fcntl|resource|msvcrt|pwd|termios)\b",
    re.MULTILINE,
)


def test_what_not_every_system_has_is_in_one_place() -> None:
    used = {}
    for path in (path for package in PACKAGES for path in files_of(package)):
        names = {first or second for first, second in _NOT_EVERYWHERE.findall((ROOT / path).read_text())}
        others = names - _HAS_A_FALLBACK.get(str(path), set())
        if others and not path.is_relative_to(_HOME):
            used[str(path)] = others
    assert used == {}


def test_such_names_are_found() -> None:
    text = "import fcntl\nos.pread(fd, 1, 0)\nos.O_CLOEXEC\nos.open(path)"
    assert [first or second for first, second in _NOT_EVERYWHERE.findall(text)] == [
        "fcntl", "pread", "O_CLOEXEC",
    ]  # fmt: skip
