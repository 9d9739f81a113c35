"""Have a Hub that means harm answer very many times, and count what comes of it.

    python scripts/check/hub_answers.py --answers 10000 --seed 1

The Hub is on the loopback (127.0.0.1), and so is every other server that it sends the client to. In each run
a small model is fetched into an empty cache, or read without being kept, and some answers are hostile: bits
are flipped, lengths and ranges are wrong, bodies have no end, redirects lead elsewhere, ETags are paths. A
run may end with the right bytes or with one clear line. Anything else is a failure: other bytes, a traceback,
a token that leaves, a file outside of the cache, a wait that nobody allowed, a run that takes long. After
each run, an honest Hub has to bring the right bytes into what the hostile one has left of the cache.

Failures are printed as they come. It stops by itself, after the answers or the time. What a run does depends
on the seed and its number; threads of the client may change the order in which requests come. The exit code
is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from safetensors.numpy import save_file

from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.hub import fetch, stream
from gguf_tools.commands.command import one_line
from gguf_tools.errors import ToolkitError
from gguf_tools.hub import limits
from gguf_tools.hub.names import HubName
from tests.support import hub_server
from tests.support.hostile_answers import hostile_answer
from tests.support.hub_server import HubServer, Trouble

NAME = HubName("owner/small")
PATIENCE_SECONDS = 0.5
"""What the user allows a server to wait; the shorter, the more answers a minute."""

LONG_SECONDS = 30.0
"""Seconds after which a run has taken too long: a few tries, each of a few times the patience."""

RIGHT, LINE = "right bytes", "one clear line"

MEMORY_BYTES = 400 << 20
MAX_FAILURES = 50


@dataclass
class Outcome:
    """What the runs came to.

    counts    runs by what became of them, and hostile answers
    lines     the first words of the lines that runs ended with, and how often
    failures  what went wrong in which run, and what was answered in it
    """

    counts: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class HostileHub(HubServer):
    """A Hub whose answers to some requests are hostile.

    aim         what the path of a request has in it for the answer to be hostile; None: all are honest
    chance      of an answer to such a request
    n_hostile   how many were
    told        what they were, since the run began
    """

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(models)
        self.aim: str | None = None
        self.chance = 1.0
        self.n_hostile = 0
        self.told: list[str] = []
        self.rng = random.Random(0)
        self.elsewhere = ""

    def trouble(self, request: str) -> Trouble | None:
        """Return a hostile answer, or none."""
        with self.lock:
            is_listing = "/api/" in request
            if self.aim is None or is_listing != (self.aim == "list") or self.rng.random() >= self.chance:
                return None
            self.n_hostile += 1
            what, trouble = hostile_answer(self.rng, request, self.endpoint, self.elsewhere)
            self.told.append(f"{request}: {what}")
            return trouble


def campaign(n: int, seed: int, *, seconds: float = 3600.0) -> dict[str, int]:
    """Return how many hostile answers were in runs that ended in each way; "FAILED: ..." is each failure."""
    outcome = attack(n, seed, seconds=seconds)
    counts = {what: outcome.counts[f"answers, {what}"] for what in (RIGHT, LINE)}
    return counts | {f"FAILED: {failure}": 1 for failure in outcome.failures}


def attack(n: int, seed: int, *, seconds: float = 3600.0) -> Outcome:
    """Return what became of runs with `n` hostile answers together, or as many as there was time for."""
    outcome = Outcome()
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-hub-")))
        # A file of the large storage is one that takes a while, and there are some ranges in it.
        stack.enter_context(mock.patch.object(hub_server, "LARGE_BYTES", 1 << 16))
        waits: list[float] = []
        stack.enter_context(mock.patch("time.sleep", waits.append))
        stack.callback(limits.allow, limits.allowed())
        limits.allow(PATIENCE_SECONDS)
        model = _make_model(place / "model")
        hub, elsewhere = HostileHub({NAME.repo: model}), HostileHub({NAME.repo: model})
        stack.enter_context(hub)
        stack.enter_context(elsewhere)
        hub.elsewhere = elsewhere.endpoint
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        number = 0
        while hub.n_hostile < n and time.monotonic() - begun < seconds:
            waits.clear()
            _run(outcome, hub, elsewhere, place, model, random.Random(f"{seed}/{number}"))
            # Where nothing is asked for, waits double from a second.
            if max(waits, default=0) > max(PATIENCE_SECONDS, 16) + 1:
                _fail(outcome, number, hub, f"waited {max(waits)} s")
            number += 1
            if len(outcome.failures) >= MAX_FAILURES:
                break
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
        if grown > MEMORY_BYTES:
            outcome.failures.append(f"{grown >> 20} MiB of memory more than at the start")
        outcome.counts["hostile answers"] = hub.n_hostile
        outcome.counts["failures"] = len(outcome.failures)
    return outcome


def _run(
    outcome: Outcome, hub: HostileHub, elsewhere: HostileHub, place: Path, model: Path, rng: random.Random
) -> None:
    """Fetch or read the model once from a hostile Hub, and count what comes of it."""
    number = outcome.counts["runs"]
    outcome.counts["runs"] += 1
    cache = place / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    before = _outside(place)
    hub.told.clear()
    for server in (hub, elsewhere):
        server.requests.clear()
        server.leaked_tokens.clear()
        server.authorized.clear()
    hub.rng, hub.chance = rng, rng.choice([0.1, 0.3, 0.6, 1.0])
    # A list that lies and contents that fit the lie are the Hub's word, and nobody can tell.
    hub.aim = rng.choice(["list", "files", "files", "files"])
    is_stream = rng.random() < 0.4
    begun = time.monotonic()
    with hub.client(cache, HF_TOKEN="hf_secret"), contextlib.redirect_stderr(io.StringIO()):
        _attempt(outcome, number, hub, model, is_stream=is_stream)
        took = time.monotonic() - begun
        hub.aim = None
        _honestly(outcome, number, hub, model)
    if took > LONG_SECONDS:
        _fail(outcome, number, hub, f"took {took:.0f} s")
    if hub.leaked_tokens or elsewhere.authorized:
        _fail(outcome, number, hub, f"the token went to {hub.leaked_tokens or elsewhere.authorized}")
    if _outside(place) != before:
        _fail(outcome, number, hub, f"files outside of the cache: {_outside(place) - before}")


def _attempt(outcome: Outcome, number: int, hub: HostileHub, model: Path, *, is_stream: bool) -> None:
    try:
        is_right = _read_right(model) if is_stream else _fetched_right(model)
    except ToolkitError as error:
        line = one_line(error)
        text = str(error)
        _count(outcome, LINE, hub)
        outcome.lines[" ".join(line.partition(": ")[2].split()[:6])] += 1
        if "\n" in text or len(text) > 1500 or "Traceback" in text:
            _fail(outcome, number, hub, f"not one clear line: {text[:300]!r}")
    except Exception:
        _fail(outcome, number, hub, traceback.format_exc()[-1500:])
    else:
        if is_right:
            _count(outcome, RIGHT, hub)
        else:
            _fail(outcome, number, hub, "other bytes, without a word")


def _honestly(outcome: Outcome, number: int, hub: HostileHub, model: Path) -> None:
    """Check that an honest Hub brings the right bytes, after one look at most at what is left."""
    for is_last in (False, True):
        try:
            if not _fetched_right(model, whole=True):
                _fail(outcome, number, hub, "other bytes from an honest Hub")
            return
        except ToolkitError as error:
            # A file that an interrupted fetch has left may have to be removed first.
            if is_last or "removed from the cache" not in str(error):
                _fail(outcome, number, hub, f"an honest Hub is refused: {error}")
                return


def _fetched_right(model: Path, *, whole: bool = False) -> bool:
    """Whether a fetch brings the model's files; a list may have left some out, unless `whole`."""
    folder = fetch(NAME, quiet=True)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    expected = {path.name: path.read_bytes() for path in model.iterdir()}
    return (not whole or found.keys() == expected.keys()) and found.items() <= expected.items()


def _read_right(model: Path) -> bool:
    """Whether reading without keeping brings the model's tensors; all of a shard is read first."""
    with Checkpoint(stream(NAME, quiet=True)) as checkpoint:
        found = {name: checkpoint.raw(name).read() for name in checkpoint.names()}
    with Checkpoint(model) as expected:
        return found.keys() == set(expected.names()) and all(
            np.array_equal(array, expected.raw(name).read()) for name, array in found.items()
        )


def _count(outcome: Outcome, what: str, hub: HostileHub) -> None:
    outcome.counts[what] += 1
    outcome.counts[f"answers, {what}"] += len(hub.told)


def _fail(outcome: Outcome, number: int, hub: HostileHub, text: str) -> None:
    failure = f"run {number}: {text}\n    after {'; '.join(hub.told[-4:])}"
    outcome.failures.append(failure)
    print(failure, file=sys.__stderr__, flush=True)


def _outside(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if path.relative_to(place).parts[0] != "cache"}


def _make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["X"], "model_type": "x"}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n" + "A small model.\n" * 100)
    rng = np.random.default_rng(0)
    save_file(
        {f"w{number}": rng.standard_normal((96, 256), np.float32) for number in range(4)},
        folder / "model.safetensors",
    )
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--answers", type=int, default=10_000, metavar="N", help="hostile answers (default: 10000)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long (default: an hour)")
    args = parser.parse_args()
    begun = time.monotonic()
    outcome = attack(args.answers, args.seed, seconds=args.seconds)
    print(f"seed {args.seed}, {time.monotonic() - begun:.0f} s")
    for what in ("hostile answers", "runs", RIGHT, LINE, "failures"):
        answers = f" ({outcome.counts[f'answers, {what}']:,} answers)" if what in (RIGHT, LINE) else ""
        print(f"{outcome.counts[what]:>8,}  {what}{answers}")
    for line, n_times in outcome.lines.most_common(40):
        print(f"{n_times:>8,}  {line}")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
