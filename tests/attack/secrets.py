"""Uploads of folders in which secrets lie: the Hub gets none of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.attack.trials import FAILED, LINE, SAME, Bench, Result

SECRETS = (
    ".env", ".env.local", ".netrc", ".git-credentials", ".gitconfig", ".ssh/id_ed25519", ".aws/credentials",
    ".cache/huggingface/token", ".huggingface/token", ".git/config", ".ipynb_checkpoints/n.ipynb",
    ".cook/record.json", "id_rsa", "server.pem", "server.key", "token", "token.txt", "hf_token",
    "secrets.json", "credentials.json", "lite.gguf.partial", "lite.gguf.journal", "lite.gguf.job",
    "lite.gguf.work/layer.0", ".lite.gguf.swp", "a/.env", "a/.git/config", "README.md~", "#README.md#",
    "core",
    ".DS_Store", "id_ed25519", ".token", "models/.env",
)  # fmt: skip
"""Names that no folder of a model gives away."""

PATTERNS = (
    "*",
    "*.json",
    "*.txt",
    "**",
    "**/*",
    "?env",
    "[.]env",
    "*env",
    "*/*",
    "t*",
    "a/*",
    "*.*",
    "*.pem",
)
"""For --include: none begins with a dot, or names a file."""

_MODELS = ("lite-Q4_K_M.gguf", "config.json", "README.md", "a/tokenizer.json")
_WORD = b"this is nobody's business"
_REPO = "me/lite-GGUF"
_DOTTED = ".gitattributes"


def secrets(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Upload a folder with secrets for each number: nothing of them arrives, whatever the patterns."""
    if not len(wanted):
        return
    place = bench.scratch / f"secrets-{seed}-{wanted.start}"
    place.mkdir()
    pid = os.fork()  # the Hub has threads, and this process must have none
    if not pid:
        try:
            with open(place / "results", "w") as results:
                for number in wanted:
                    results.write(json.dumps(_upload(place / str(number), number, seed)) + "\n")
        except BaseException:
            (place / "error").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    for line in (place / "results").read_text().splitlines():
        number, outcome, what = json.loads(line)
        yield Result("secrets", "upload", number, seed, outcome, 1, what)
    if (place / "error").exists():
        yield Result("secrets", "upload", -1, seed, FAILED, 0, (place / "error").read_text()[-900:])


def _upload(place: Path, number: int, seed: int) -> tuple[int, str, str]:
    """Upload one folder; return its number, the outcome, and what was done and seen."""
    import gguf_tools.commands.main
    from tests.support.hub_server import HubServer

    rng = random.Random(f"{seed} secrets {number}")
    folder = place / "lite"
    hidden = rng.sample(SECRETS, rng.randint(3, 12))
    for name in (*_MODELS, *hidden):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(IsADirectoryError, NotADirectoryError):
            (folder / name).write_bytes(_WORD if name in hidden else b"{}")
    if rng.random() < 0.2:
        outside = place / "outside.txt"
        outside.write_bytes(_WORD)
        (folder / "link.json").symlink_to(outside)
    (folder / _DOTTED).write_bytes(b"*.gguf filter=lfs")
    _write_model(folder / _MODELS[0])
    patterns = rng.sample(PATTERNS, rng.choice((0, 1, 1, 2)))
    asks_for_dotted = rng.random() < 0.5
    include = [*patterns, *([_DOTTED] if asks_for_dotted else [])]
    words = ["upload", str(folder), _REPO, *(word for pattern in include for word in ("--include", pattern))]
    said = io.StringIO()
    with HubServer({}) as hub, hub.client(place / "cache", HF_TOKEN="hf_mine"):
        hub.uploads = place / "uploads"
        hub.tokens.add("hf_mine")
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = gguf_tools.commands.main.main(words)
        got = hub.files(_REPO) if _REPO in hub.models else {}
    what = f"{', '.join(hidden)}; {' '.join(words[3:])} -> {code}"
    if wrong := _wrong(got, {name for name in hidden if patterns}, asks_for_dotted):
        return number, FAILED, f"{what}: {wrong}"
    if code:
        errors = said.getvalue().count("error: ")
        return number, LINE if errors == 1 else FAILED, f"{what}: {said.getvalue()[-500:]}"
    if _MODELS[0] not in got or (asks_for_dotted and _DOTTED not in got):
        return number, FAILED, f"{what}: sent only {', '.join(got)}"
    return number, SAME, what


def _wrong(got: dict[str, Path], asked_for: set[str], asks_for_dotted: bool) -> str:
    """Return what the Hub should not have got, or ''; `asked_for` are names that a pattern may have meant."""
    for name, path in got.items():
        is_dotted = any(part.startswith(".") for part in name.split("/"))
        if name == _DOTTED and asks_for_dotted:
            continue
        if is_dotted or name in _KEYS or (path.read_bytes() == _WORD and name not in asked_for):
            return f"leaked {name}"
    return ""


_KEYS = {"id_rsa", "id_ed25519", "server.pem", "server.key", "token", "hf_token", "token.txt"}
"""What goes only if it is named, not by a pattern."""


def _write_model(path: Path) -> None:
    from tests.gguf_tools.sample_files import write_file

    write_file(path)
