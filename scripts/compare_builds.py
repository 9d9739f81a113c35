"""Run the same command lines with two installed builds, and say whether they behave alike.

    python scripts/compare_builds.py OLD/bin NEW/bin
    python scripts/compare_builds.py record OLD/bin RECORDING --jobs 2
    python scripts/compare_builds.py compare RECORDING NEW/bin --expected wanted.txt
    python scripts/compare_builds.py compare RECORDING NEW/bin --only 'type-IQ*' --leave

A build is the folder of an environment's commands. Exit codes, standard output, standard error, and every
byte of every file that a command writes or leaves must be the same. The command lines are those of
scripts/builds: all commands and options, families and file types, and what people do wrong. The inputs are
made once, by the build that is recorded, and are part of a recording. Both builds work on copies, in a
folder of the same name. A chain of commands has a folder of its own, no network, and one thread.

Times, speeds and the version are set aside; scripts/builds/normal.py says exactly what, and where. A
traceback differs from everything: it is a fault, though the other build has it, too.

A pattern of --only or of an --expected file is that of a shell, for "CHAIN: COMMAND LINE" or for CHAIN alone.
A line of an expected file is `PATTERN -> REASON`. The exit code is 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.builds.cases import all_chains
from scripts.builds.chains import Chain
from scripts.builds.material import provide
from scripts.builds.normal import Difference, differences
from scripts.builds.outcomes import Build, Outcome, load, run_chains, save

_TRACEBACK = "Traceback (most recent call last)"
WORK = Path(tempfile.gettempdir()) / "compare-builds"


def record(bin_: Path, chains: Sequence[Chain], recording: Path, args: argparse.Namespace) -> None:
    """Make the inputs that a recording lacks, run the chains, and note what they did."""
    work = args.work or WORK
    n_done = 0

    def done(chain: Chain, outcomes: list[Outcome]) -> None:
        nonlocal n_done
        n_done += 1
        save(recording / "outcomes", chain, outcomes)
        _tell(f"{n_done}/{len(chains)} {chain.name}")

    with _only_user_of(work, leave=args.leave):
        build = Build(bin_, work)
        provide(chains, build, recording / "inputs")
        (recording / "about.json").write_text(json.dumps({"work": str(work)}))
        run_chains(build, chains, recording / "inputs", args.jobs, done, leave=args.leave)


def compare(
    bin_: Path, chains: Sequence[Chain], recording: Path, args: argparse.Namespace
) -> tuple[int, list[Difference]]:
    """Run the chains; return how many command lines there were, and what differs from a recording."""
    work = args.work or Path(json.loads((recording / "about.json").read_text())["work"])
    recorded, found = load(recording / "outcomes"), list[Difference]()
    n_cases = n_done = 0

    def done(chain: Chain, outcomes: list[Outcome]) -> None:
        nonlocal n_cases, n_done
        n_done += 1
        n_cases += len(outcomes)
        found.extend(_compare_chain(recorded.get(chain.name, []), outcomes))
        _tell(f"{n_done}/{len(chains)} {chain.name}")

    with _only_user_of(work, leave=args.leave):
        run_chains(Build(bin_, work), chains, recording / "inputs", args.jobs, done, leave=args.leave)
    return n_cases, found


def _compare_chain(recorded: Sequence[Outcome], found: Sequence[Outcome]) -> Iterator[Difference]:
    old, new = ({one.case: one for one in outcomes} for outcomes in (recorded, found))
    for case in {**old, **new}:
        if case in old and case in new:
            yield from differences(old[case], new[case])
        else:
            there = [str(case in one) for one in (old, new)]
            yield Difference(case, "is recorded, and is a case now", *there)
        if case in new and _TRACEBACK in new[case].err:
            yield Difference(case, "ends in a traceback", "a line", new[case].err.splitlines()[-1])


def select(chains: Sequence[Chain], patterns: Sequence[str]) -> list[Chain]:
    """Return the chains that a pattern matches, or one of whose lines it matches; all without a pattern."""
    return [
        chain
        for chain in chains
        if not patterns or any(matches(f"{chain.name}: {line}", patterns) for line in chain.lines)
    ]


def matches(case: str, patterns: Sequence[str]) -> bool:
    names = (case, case.partition(":")[0])
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def read_expected(path: Path | None) -> Mapping[str, str]:
    """Return pattern -> reason of the differences that are wanted; raises ValueError for another line."""
    expected: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines() if path else [], 1):
        if line.strip() and not line.startswith("#"):
            pattern, arrow, reason = line.partition("->")
            if not arrow or not reason.strip():
                raise ValueError(f"{path}: line {number} is {line!r}, expected PATTERN -> REASON")
            expected[pattern.strip()] = reason.strip()
    return expected


def report(n_cases: int, found: Sequence[Difference], expected: Mapping[str, str]) -> int:
    """Print what differs, and a total; return the exit code."""
    wanted = [one for one in found if matches(one.case, list(expected))]
    for pattern, reason in expected.items():
        n_hits = len({one.case for one in wanted if matches(one.case, [pattern])})
        print(f"expected: {pattern}: {n_hits} command lines: {reason}")
    others = [one for one in found if one not in wanted]
    for one in others:
        print(one)
    n_wanted, n_differ = (len({one.case for one in some}) for some in (wanted, others))
    also = f", {n_wanted} differ as expected" if expected else ""
    print(f"{n_cases} command lines, {n_cases - n_wanted - n_differ} alike, {n_differ} differ{also}")
    return 1 if others else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _only_user_of(work: Path, *, leave: bool = False) -> Iterator[None]:
    """Empty the work folder, before and after, and keep others from it meanwhile."""
    work.parent.mkdir(parents=True, exist_ok=True)
    with work.with_name(f"{work.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"{work}: another comparison works there; see --work") from None
        shutil.rmtree(work, ignore_errors=True)
        try:
            yield
        finally:
            if not leave:
                shutil.rmtree(work, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="compare_builds.py [options] OLD/bin NEW/bin | record BIN FOLDER | compare FOLDER BIN",
    )
    parser.add_argument("words", nargs="+", metavar="WORD", help="as above")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="chains that match")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="chains that run at a time")
    parser.add_argument("--expected", type=Path, metavar="FILE", help="differences that are wanted")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help=f"where chains run (default: {WORK})")
    parser.add_argument(
        "--leave", action="store_true", help="leave the last build's files in the work folder"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    verb, *places = args.words if args.words[0] in ("record", "compare") else ("both", *args.words)
    chains = select(list(all_chains()), args.only)
    expected = read_expected(args.expected)
    if len(places) != 2:
        parser.error("expected two folders")
    if not chains:
        parser.error(f"no chain matches --only {' '.join(args.only)}")
    first, second = (Path(place).resolve() for place in places)
    begun = time.monotonic()
    code = 0
    if verb == "record":
        if not args.only:
            shutil.rmtree(second / "outcomes", ignore_errors=True)
        record(first, chains, second, args)
        print(f"recorded {sum(len(chain.lines) for chain in chains)} command lines in {second}")
    elif verb == "compare":
        code = report(*compare(second, chains, first, args), expected)
    else:
        with tempfile.TemporaryDirectory(prefix="compare-builds-") as made:
            record(first, chains, Path(made), args)
            code = report(*compare(second, chains, Path(made), args), expected)
    _tell(f"{time.monotonic() - begun:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
