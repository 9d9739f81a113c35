"""Names of options in messages: a flag in a command, an argument in Python.

Messages of the library are written with flags. A command prints them as they are. Everywhere else an error or
a finding says `force=True` for --force, and n_chunks for --chunks. A whole command line, such as
`gguf-tools card --force`, is one in Python, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCHES = {
    flag: f"{flag.strip('-').replace('-', '_')}=True"
    for flag in (
        "--allow-pickle", "--allow-requantize", "--dry-run", "--force", "--keep-grid", "--keep-split",
        "--mmproj", "--mtp", "--noise-floor", "--pad-hidden", "--process-output", "--pure", "--restart",
        "--stream", "--undo",
    )
} | {"--leave-output-tensor": "leave_output=True", "--no-mtp": "mtp=False"}  # fmt: skip

_NAMES = {
    "-c": "chunk_size", "--calibrate": "calibration", "--chunks": "n_chunks", "--curve": "a curve",
    "--device": "device", "--exclude-weights": "exclude", "--fallback": "fallbacks",
    "--from-chunk": "from_chunk", "--html": "a page", "--imatrix": "importances",
    "--include-weights": "include", "--json": "a report",
    "--like": "like", "--memory": "memory_bytes", "--metadata": "metadata_file", "--mla": "mla",
    "--model-name": "model_name", "--only": "only", "--outfile": "outfile",
    "--output-tensor-type": "output_type", "--outtype": "outtype", "--override-kv": "kv_overrides",
    "--pad": "pad", "--plot": "a plot", "--pre-tokenizer": "pre_tokenizer",
    "--prune-layers": "prune_layers", "--ram": "ram", "--scheduler": "scheduler",
    "--tensor-type": "overrides", "--timeout": "the longest wait", "--to": "to",
    "--token-embedding-type": "embedding_type", "--vram": "vram", "--work": "work",
}  # fmt: skip

FLAGS = frozenset({*_SWITCHES, *_NAMES})
"""Flags that messages of the library name."""

_COMMAND = r"(?:gguf-tools|quantize|evaluate|imatrix|convert-hf-to-gguf|sensitivity|hf|llama-\w+)"
_SPOKEN = re.compile(
    rf"\b{_COMMAND}(?: [\w-]+)? --?[a-z][\w-]*"
    r"|(?<![\w./-])(?P<flag>--?[a-z][a-z-]*)(?P<number> [0-9]+\b)?(?![\w-])"
)

_in_command = False


@contextmanager
def speaking_flags() -> Iterator[None]:
    """Have messages name flags: what runs in this block is a command."""
    global _in_command
    before, _in_command = _in_command, True
    try:
        yield
    finally:
        _in_command = before


def spoken(text: str) -> str:
    """Return a message of the library as it is said here.

    >>> spoken("x.gguf: exists already; --force replaces it")
    'x.gguf: exists already; force=True replaces it'
    """
    return text if _in_command else _SPOKEN.sub(_in_python, text)


def _in_python(match: re.Match[str]) -> str:
    flag, number = match["flag"], match["number"] or ""
    if flag in _SWITCHES:
        return _SWITCHES[flag] + number
    if flag in _NAMES:
        return _NAMES[flag] + number.replace(" ", "=")
    return match[0]
