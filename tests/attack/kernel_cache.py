"""The cache of compiled kernels: damaged in every way, or with no place to be."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.attack import places
from tests.attack.children import Ended
from tests.attack.commands import Command, find
from tests.attack.places import Failure
from tests.attack.trials import LINE, SAME, Bench, Result, Trial
from tests.support.dask_cluster import REPOSITORY

_PATIENCE_SECONDS = 300.0
"""A process may have to compile all kernels that it needs."""

_NO_PLACES = (
    "a file",
    "a device",
    "a missing folder",
    "a full disk",
    "no home",
    "a link to nowhere",
    "a long name",
)
_COMMAND = "quantize-parts"


def kernel_cache(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Damage the cache of a fresh process, or leave it no place: the same bytes."""
    if not len(wanted):
        return
    command = find(_COMMAND)
    reference = bench.reference(command)
    good = bench.scratch / f"kernels-{seed}-{wanted.start}"
    with bench.folder(command) as folder:
        _fresh(command, folder, {"NUMBA_CACHE_DIR": str(good)})
    for number in wanted:
        rng = random.Random(f"{seed} cache {number}")
        with bench.folder(command) as folder:
            trial = Trial(bench, command, folder, reference, rng)
            yield trial.judged("cache", number, seed, lambda trial: _disturb(trial, good))


def _disturb(trial: Trial, good: Path) -> str:
    own = trial.folder.parent / "kernels"
    n_bytes = 0
    environment = {"NUMBA_CACHE_DIR": str(own)}
    if trial.rng.random() < 0.6:
        shutil.copytree(good, own)
        what = _damage(own, trial.rng)
    else:
        what = trial.rng.choice(_NO_PLACES)
        if what == "a file":
            own.write_text("mine")
        elif what == "a device":
            environment["NUMBA_CACHE_DIR"] = "/dev/null/kernels"
        elif what == "a missing folder":
            environment["NUMBA_CACHE_DIR"] = "/proc/nowhere/kernels"
        elif what == "a link to nowhere":
            own.symlink_to("/proc/nowhere")
        elif what == "a long name":
            environment["NUMBA_CACHE_DIR"] = str(own / ("x" * 300))
        elif what == "no home":
            environment = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": ""}
        else:
            n_bytes = 64
    trial.n_hits += 1
    ended = _fresh(trial.command, trial.folder, environment, n_bytes)
    trial.steps.append(f"{what} -> {ended.code}")
    if n_bytes and ended.code:  # the output has no room, either
        places.check_one_line(ended)
        trial.check()
        return LINE
    if ended.code or "Traceback" in ended.said:
        raise Failure(f"ended with {ended.code} and {ended.said[-700:]!r}")
    if len(ended.said.splitlines()) > 1:
        raise Failure(f"says more than a note: {ended.said[-700:]!r}")
    places.check_same(trial.reference, trial.tree())
    return SAME


def _damage(cache: Path, rng: random.Random) -> str:
    """Damage some files of a cache; return how."""
    files = sorted(path for path in cache.rglob("*.nb?"))
    how = rng.choice(sorted(_DAMAGES))
    for path in rng.sample(files, min(len(files), rng.choice((1, 2, len(files))))):
        _DAMAGES[how](path, rng)
    return how


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(8):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _as_folder(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


_DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "emptied": lambda path, _: os.truncate(path, 0),
    "cut": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    "zeroed": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "random": lambda path, rng: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "flipped": _flip,
    "removed": lambda path, _: path.unlink(),
    "a folder": _as_folder,
    "a link": lambda path, _: (path.unlink(), path.symlink_to("/dev/zero")),
}  # fmt: skip


def _fresh(command: Command, folder: Path, environment: dict[str, str], n_bytes: int = 0) -> Ended:
    """Run a command in an interpreter of its own; `n_bytes` is the largest file that it may write, 0: any."""
    program = {"quantize": "gguf_tools.commands.quantize"}[command.program]
    code = f"import sys, {program} as program; sys.exit(program.main(sys.argv[1:]))"
    known = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = known | {"PYTHONPATH": str(REPOSITORY)} | environment
    environment = {name: value for name, value in environment.items() if value}

    def limit() -> None:
        if n_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))

    try:
        ended = subprocess.run(
            [sys.executable, "-c", code, *command.words], cwd=folder, env=environment, capture_output=True,
            timeout=_PATIENCE_SECONDS, preexec_fn=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ended(1, "", _PATIENCE_SECONDS, {}, hung=True)
    return Ended(ended.returncode, ended.stderr.decode(errors="replace"), 0.0, {})
