"""Disturb all commands in every way, and count how they end.

    python scripts/attack.py --trials 1200 --jobs 2
    python scripts/attack.py --minutes 20 --seed 7 --json attack.json
    python scripts/attack.py --seed 7 --only kill:imatrix:3
    python scripts/attack.py --table attack.json other.json

Commands are killed at random moments and resumed, calls of the system fail under them, files may be no longer
than so much, inputs change, links and other people's files lie where they write, a second run begins beside
the first, and `clean --remove` runs all the while. Their streams are closed; names would steer a terminal.
Dask workers lie about what they wrote, or are killed. Strangers' manifests, templates and expressions are
hostile, numbers are odd, texts are nonsense, the cache of kernels is damaged, secrets lie beside what is
uploaded, and a Hub is hostile. A trial must end with the same bytes as an undisturbed run, or with one clear
line and nothing lost; what is hostile may also be taken for what it is, without harm. The exit code is 1 if
one did not. A trial depends on its kind, command, number and seed; moments in seconds depend on the machine,
too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.attack import campaign
from tests.attack.children import has_strace
from tests.attack.trials import DONE, FAILED, LINE, NOT_REACHED, SAME, Result

OUTCOMES = (SAME, LINE, DONE, NOT_REACHED, FAILED)


def table(results: list[Result]) -> Iterator[str]:
    """Yield the lines of two Markdown tables: by kind, and by command."""
    for title, key in (("kind", lambda result: result.kind), ("command", lambda result: result.command)):
        rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for result in results:
            # The Hub's campaign counts answers, not trials.
            n_trials = result.n_hits if result.kind == "hub" else 1
            for row in (key(result), "all"):
                rows[row][result.outcome] += n_trials
                rows[row]["hits"] += result.n_hits
        yield f"| {title} | trials | kills, faults, changes | {' | '.join(OUTCOMES)} |"
        yield "|---" * (3 + len(OUTCOMES)) + "|"
        for row in sorted(rows, key=lambda row: (row == "all", row)):
            counts = rows[row]
            numbers = (
                sum(counts[outcome] for outcome in OUTCOMES),
                counts["hits"],
                *map(counts.get, OUTCOMES),
            )
            yield f"| {row} | {' | '.join(f'{number or 0:,}' for number in numbers)} |"
        yield ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=1200, help="of single commands; others in proportion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", default=[], metavar="KIND:COMMAND:NUMBER",
        help="a kind, a command, both, or one trial as it was reported (repeatable)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--minutes", type=float, help="begin no trial after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing; print the tables of earlier --json",
    )
    args = parser.parse_args()
    if args.table:
        print(
            "\n".join(table([Result(**one) for file in args.table for one in json.loads(file.read_text())]))
        )
        return 0
    if unknown := campaign.unknown(args.only):
        parser.error(f"--only {unknown[0]}: no such kind or command")
    if not has_strace():
        print("strace is not there: no call of the system fails, and kills come at moments alone", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and folders go too
    begun = time.monotonic()
    results = []
    plans = campaign.plan(args.trials, args.seed, args.only, args.jobs, args.minutes)
    for result in campaign.run([one for one in plans if one.numbered or one.special]):
        results.append(result)
        if result.outcome == FAILED:
            print(f"FAILED --seed {result.seed} --only {result.name}: {result.what}", flush=True)
    print("\n".join(table(results)))
    print(f"{datetime.date.today()}, seed {args.seed}, {time.monotonic() - begun:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False))
    return 1 if any(result.outcome == FAILED for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
