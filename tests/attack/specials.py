"""What is attacked otherwise than by a disturbance of one process: workers, texts, the Hub, and others."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tests.attack import kernel_cache, odd_numbers, places, secrets, strangers, workers
from tests.attack.commands import FORWARD, find
from tests.attack.places import Failure
from tests.attack.trials import FAILED, LINE, SAME, Bench, Result, Trial

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
    command = find("quantize-calibrate")
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
            yield trial.judged("nonsense", number, seed, lambda trial, name=name: _refuse(trial, name))


def _refuse(trial: Trial, name: str) -> str:
    ended = trial.run(step=f"text of {name}")
    places.check_unharmed(trial.command, trial.reference.before, trial.tree(), trial.reference)
    if not ended.code:
        raise Failure("nonsense was accepted")
    places.check_one_line(ended)
    if (trial.folder / "o.gguf").exists():
        raise Failure("refused, and there is an output")
    return LINE


# ---- the Hub


def hostile_hub(_bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Ask a hostile Hub, by `campaign(n, seed)` of scripts/check/hub_answers.py.

    It returns how many answers ended how: "FAILED: why", LINE, or another word for the right bytes.
    """
    if not len(wanted):
        return
    try:
        campaign = importlib.import_module("scripts.check.hub_answers").campaign
    except ModuleNotFoundError as error:
        what = f"scripts/check/hub_answers.py is not there ({error}): no answers of a Hub were tried"
        yield Result("hub", "hub", 0, seed, FAILED, 0, what)
        return
    counts: Mapping[str, int] = campaign(len(wanted), seed)
    for outcome, number in counts.items():
        known = {FAILED: FAILED, LINE: LINE}.get(outcome.partition(":")[0], SAME)
        yield Result("hub", "hub", 0, seed, known, number, outcome)


SPECIALS = {
    "worker": workers.lying,
    "killed-worker": workers.killed,
    "nonsense": nonsense,
    "hostile": strangers.hostile,
    "numbers": odd_numbers.odd_numbers,
    "cache": kernel_cache.kernel_cache,
    "secrets": secrets.secrets,
    "hub": hostile_hub,
}
