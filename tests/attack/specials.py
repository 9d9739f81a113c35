"""What is attacked otherwise than by a disturbance of one process: lying workers, texts, the Hub."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tests.attack import places
from tests.attack.commands import COMMANDS, FORWARD, Command
from tests.attack.places import Failure
from tests.attack.trials import FAILED, LINE, SAME, Bench, Result, Trial

_WORKED = ("quantize", "convert", "convert-one-pass", "quantize-parts")
_LIAR = Path(__file__).with_name("liar.py")


# ---- workers that lie


def lying_workers(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Give the chunks of a command to a worker that loses what it writes, for each number of `wanted`."""
    for number in wanted:
        rng = random.Random(f"{seed} worker {number}")
        command = {one.name: one for one in COMMANDS}[_WORKED[number % len(_WORKED)]]
        lies = rng.choice(("all", "half", "from:2", f"from:{rng.randint(3, 20)}"))
        yield _with_liar(bench, command, lies, number, seed, rng)


def _with_liar(
    bench: Bench, command: Command, lies: str, number: int, seed: int, rng: random.Random
) -> Result:
    from tests.support.dask_cluster import dask_cluster

    os.environ["LIES"] = lies
    with bench.folder(command) as folder:
        trial = Trial(bench, command, folder, bench.reference(command), rng, n_hits=1)
        try:
            with dask_cluster(folder.parent / "cluster", 1, "--preload", str(_LIAR)) as cluster:
                asked = replace(command, line=f"{command.line} --scheduler {cluster.address}")
                ended = bench.run(asked, folder)
            trial.steps.append(f"a worker that loses {lies} writes -> {ended.code}")
            outcome, why = SAME, ""
            now = trial.check()
            if ended.code:
                places.check_one_line(ended)
                outcome = LINE
            else:
                places.check_same(trial.reference, now)
        except Failure as failure:
            outcome, why = FAILED, f": {failure}"
    return Result("worker", command.name, number, seed, outcome, 1, "; ".join(trial.steps) + why)


# ---- texts of nonsense

END = "<｜end▁of▁sentence｜>"
TEXTS: Mapping[str, bytes] = {
    "one letter": b"a" * 20_000,
    "one word": b"word " * 5_000,
    "newlines": b"\n" * 20_000,
    "spaces": b" " * 20_000,
    "lines of spaces": b" \n" * 10_000,
    "ends of texts": END.encode() * 2_000,
    "two words": b"yes no " * 4_000,
    "one sentence": b"All work and no play makes Jack a dull boy.\n" * 400,
    "zero bytes": bytes(20_000),
    "nothing": b"",
    "not UTF-8": bytes(range(128, 256)) * 100,
    "a mark of byte order": "\N{BYTE ORDER MARK}".encode() * 5_000,
    "one digit": b"7" * 20_000,
    "one emoji": "\N{GRINNING FACE}".encode() * 4_000,
    "dots": b". . . " * 4_000,
}  # fmt: skip
"""Name -> text that nothing can be learnt from."""


def nonsense(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Calibrate with texts of nonsense; each must be refused, unless --force is given."""
    command = {one.name: one for one in COMMANDS}["quantize-calibrate"]
    # What is nonsense shows in as much text as a person would calibrate with; less is told to be thin.
    command = replace(command, line=command.line.replace(FORWARD, "-c 128 --chunks 8"))
    names = list(TEXTS)
    for number in wanted:
        name = names[number % len(names)]
        rng = random.Random(f"{seed} nonsense {number}")
        with bench.folder(command) as folder:
            (folder / "text.txt").write_bytes(TEXTS[name])
            before = places.tree(folder)
            reference = replace(bench.reference(command), before=before)
            trial = Trial(bench, command, folder, reference, rng, n_hits=1)
            try:
                ended = trial.run(step=f"text of {name}")
                places.check_unharmed(command, before, trial.tree(), reference)
                if not ended.code:
                    raise Failure("nonsense was accepted")
                places.check_one_line(ended)
                outcome, why = LINE, ""
                if (folder / "o.gguf").exists():
                    raise Failure("refused, and there is an output")
            except Failure as failure:
                outcome, why = FAILED, f": {failure}"
        yield Result("nonsense", command.name, number, seed, outcome, 1, "; ".join(trial.steps) + why)


# ---- the Hub


def hostile_hub(_bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Ask a hostile Hub, by `campaign(n, seed)` of scripts/attack_hub.py.

    It returns how many answers ended how: "FAILED: why", LINE, or another word for the right bytes.
    """
    if not len(wanted):
        return
    try:
        campaign = importlib.import_module("scripts.attack_hub").campaign
    except ModuleNotFoundError as error:
        what = f"scripts/attack_hub.py is not there ({error}): no answers of a Hub were tried"
        yield Result("hub", "hub", 0, seed, FAILED, 0, what)
        return
    counts: Mapping[str, int] = campaign(len(wanted), seed)
    for outcome, number in counts.items():
        known = {FAILED: FAILED, LINE: LINE}.get(outcome.partition(":")[0], SAME)
        yield Result("hub", "hub", 0, seed, known, number, outcome)


SPECIALS = {"worker": lying_workers, "nonsense": nonsense, "hub": hostile_hub}
