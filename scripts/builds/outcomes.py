"""Run chains with a build, and note what each command line did."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.builds.chains import Chain, Command

SECONDS = 300
"""A command that takes longer is ended, and its outcome says so."""

LONGEST_TEXT = 1_000_000
"""Bytes of a written text that is kept whole; of other files, a digest is kept."""


@dataclass(frozen=True)
class Build:
    """An installed build, and where it works.

    bin   folder of its commands
    work  folder in which every chain gets a folder of its own; the same for all builds that are compared,
          because messages and files name paths
    """

    bin: Path
    work: Path

    def environment(self, chain: str) -> dict[str, str]:
        """The whole environment of a command: one thread, no network, no colours, a home that is empty.

        The home is the build's, not the chain's, so that kernels compile once where they can't be kept
        beside their sources.
        """
        nowhere = "http://127.0.0.1:9"
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.work / "home"),
            "TMPDIR": str(self.work / "tmp" / chain),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "COLUMNS": "80",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
        }

    def run(self, command: Command, folder: Path) -> tuple[int | None, str, str]:
        """Run a command in `folder`; return exit code (None after SECONDS), output and errors."""
        program, *words = command.words
        process = subprocess.Popen(
            [self.bin / program, *words],
            cwd=folder,
            env={**self.environment(folder.name), **command.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=SECONDS)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = None
        return code, out.decode(errors="backslashreplace"), err.decode(errors="backslashreplace")


@dataclass(frozen=True)
class Outcome:
    """What a command line did.

    case   chain and command line, with a number if the chain has the line more than once
    code   exit code; None: it took too long
    out    standard output, as it was
    err    standard error, as it was
    files  name -> what has become of each file that was written, changed or removed: text, or a digest
    """

    case: str
    code: int | None
    out: str
    err: str
    files: Mapping[str, str] = field(default_factory=dict)


def run_chain(build: Build, chain: Chain, inputs: Path) -> list[Outcome]:
    """Run a chain in a new folder, with copies of the inputs that its lines mention."""
    folder = build.work / chain.name
    for made in (folder, build.work / "home", build.work / "tmp" / chain.name):
        made.mkdir(parents=True, exist_ok=True)
    names = sorted({path.name for path in inputs.iterdir()} & chain.mentions())
    if names:
        subprocess.run(["cp", "-a", "--reflink=auto", *(inputs / name for name in names), folder], check=True)
    outcomes: list[Outcome] = []
    digests: dict[tuple[str, int, int, int], str] = {}
    before = _snapshot(folder, digests)
    for number, command in enumerate(chain.commands):
        again = sum(line == command.line for line in chain.lines[:number])
        code, out, err = build.run(command, folder)
        after = _snapshot(folder, digests)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        files = {name: _content(folder / name, after.get(name, "removed")) for name in sorted(changed)}
        case = f"{chain.name}: {command.line}" + (f" (#{again + 1})" if again else "")
        outcomes.append(Outcome(case, code, out, err, files))
        if chain.apart:
            _remove(folder / name for name in after.keys() - before.keys())
            after = _snapshot(folder, digests)
        before = after
    return outcomes


def _remove(paths: Iterable[Path]) -> None:
    """Remove files and folders; some may lie in others."""
    for path in sorted(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def run_chains(
    build: Build,
    chains: Iterable[Chain],
    inputs: Path,
    n_jobs: int,
    done: Callable[[Chain, list[Outcome]], None],
    leave: bool = False,
) -> None:
    """Run chains, `n_jobs` at a time, and hand over what each did; `leave` their folders there."""

    def run(chain: Chain) -> tuple[Chain, list[Outcome]]:
        outcomes = run_chain(build, chain, inputs)
        if not leave:
            shutil.rmtree(build.work / chain.name)
        return chain, outcomes

    with ThreadPoolExecutor(n_jobs) as pool:
        for chain, outcomes in pool.map(run, chains):
            done(chain, outcomes)


def _snapshot(folder: Path, digests: dict[tuple[str, int, int, int], str]) -> dict[str, str]:
    """Return what lies in a folder: relative name -> kind, or digest. What was not touched is not read.

    Python's own caches are left out.
    """
    found: dict[str, str] = {}
    for path in (path for path in folder.rglob("*") if "__pycache__" not in path.parts):
        name, status = str(path.relative_to(folder)), path.lstat()
        if stat.S_ISLNK(status.st_mode):
            found[name] = f"link to {path.readlink()}"
        elif stat.S_ISREG(status.st_mode):
            key = (name, status.st_ino, status.st_size, status.st_mtime_ns)
            if key not in digests:
                digests[key] = _digest(path)
            found[name] = digests[key]
        else:
            found[name] = "folder" if path.is_dir() else "no file"
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}, {path.stat().st_size:,} bytes"


def _content(path: Path, seen: str) -> str:
    """Return a file's text, if it is one and not too long, else what `_snapshot` has seen."""
    if not seen.startswith("sha256") or path.stat().st_size > LONGEST_TEXT:
        return seen
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return seen
    return seen if "\0" in text else text


# ---- recordings


def save(folder: Path, chain: Chain, outcomes: list[Outcome]) -> None:
    """Write what a chain did into a recording."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False)
    (folder / f"{chain.name}.json").write_text(text, encoding="utf-8")


def load(folder: Path) -> dict[str, list[Outcome]]:
    """Return what a recording holds: name of a chain -> outcomes."""
    return {
        path.stem: [Outcome(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
        for path in sorted(folder.glob("*.json"))
    }


def cases_of(chains: Iterable[Chain]) -> Iterator[str]:
    """Yield all command lines with the names of their chains."""
    for chain in chains:
        for line in chain.lines:
            yield f"{chain.name}: {line}"
