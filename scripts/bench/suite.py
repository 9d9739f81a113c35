"""Time a suite against one plain text of as many tokens, and take the peak memory of both.

    python scripts/bench/suite.py [--layers 4] [--tokens 16384] [--threads 2] [--type Q4_K_M] [--rounds 1]
                                  [--memory GB] [--folder DIR] [--json]

The model is that of evaluate.py: DeepSeek-V3-style with 32 experts a layer, of which 4 are used, and
random weights, about 0.2 billion a layer. The base as BF16 and one file go through

    suite           seven classes at a context of 512, and one at 4096 with a quarter of the tokens
    suite at 512    the same texts, all of them at 512
    plain text      as many chunks of 512, with -f
    plain at 4096   as many tokens at 4096, with -f

Each run is a process of its own. They take turns, and of --rounds rounds the one with the fewest CPU seconds
counts: on a shared machine, these say more than seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.evaluate import make_files, timed
from scripts.bench.imatrix import CONTEXT, write_text

N_SHORT, LONG_CONTEXT = 7, 4096
LONG_SHARE = 0.25
_TOKENS_OF_WORD = 3
"""About as many as a random word has."""


@dataclass(frozen=True)
class Speed:
    """One run; `n_tokens` are those of all its chunks."""

    what: str
    n_tokens: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def write_suites(folder: Path, n_tokens: int) -> dict[str, list[str]]:
    """Write texts of about so many tokens, and the suites of them; return the arguments of every run."""
    text = folder / "plain.txt"
    write_text(text, n_tokens // CONTEXT // _TOKENS_OF_WORD)
    words = text.read_text().split(" ")
    n_long = int(len(words) * LONG_SHARE)
    step = (len(words) - n_long) // N_SHORT
    for number in range(N_SHORT):
        (folder / f"class{number}.txt").write_text(" ".join(words[number * step : (number + 1) * step]))
    (folder / "long.txt").write_text(" ".join(words[-n_long:]))
    classes: dict[str, Any] = {f"class{number}": {} for number in range(N_SHORT)}
    for name, context in (("suite", LONG_CONTEXT), ("short", CONTEXT)):
        given = {"classes": classes | {"long": {"context": context}}}
        (folder / f"{name}.yaml").write_text(json.dumps(given))  # JSON is YAML
    return {
        "suite": ["--suite", str(folder / "suite.yaml")],
        "suite at 512": ["--suite", str(folder / "short.yaml")],
        "plain text": ["-f", str(text), "-c", str(CONTEXT), "--chunks", str(n_tokens // CONTEXT)],
        "plain at 4096": ["-f", str(text), "-c", str(LONG_CONTEXT)],
    }


def n_tokens_of(found: Mapping[str, Any]) -> int:
    """Count the tokens of all chunks, by what --json has."""
    texts = found["suite"]["classes"] if "suite" in found else [found["text"]]
    return sum(each["n_chunks"] * each["chunk_size"] for each in texts)


def measure(folder: Path, args: argparse.Namespace) -> list[Speed]:
    base, files = make_files(folder, SimpleNamespace(layers=args.layers, types=[args.type]))
    best: dict[str, Speed] = {}
    runs = write_suites(folder, args.tokens)
    for _ in range(args.rounds):
        for what, words in runs.items():
            out = folder / "out.json"
            command = [
                sys.executable, "-m", "gguf_tools.commands.evaluate", str(base), *map(str, files), *words,
                "--threads", str(args.threads), "--memory", str(args.memory), "--force", "--json", str(out),
            ]  # fmt: skip
            done = timed(what, 2, 0, command)
            n_tokens = n_tokens_of(json.loads(out.read_text()))
            speed = Speed(what, n_tokens, done.seconds, done.cpu_seconds, done.peak_bytes)
            print(f"{speed}", file=sys.stderr)
            if what not in best or speed.cpu_seconds < best[what].cpu_seconds:
                best[what] = speed
    return list(best.values())


def table(speeds: Sequence[Speed]) -> list[str]:
    plain = next(speed for speed in speeds if speed.what == "plain text")
    lines = [
        "| run | tokens | seconds | CPU seconds | the same a token, over plain text's | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for s in speeds:
        ratio = (s.cpu_seconds / s.n_tokens) / (plain.cpu_seconds / plain.n_tokens)
        lines.append(
            f"| {s.what} | {s.n_tokens} | {s.seconds:.1f} | {s.cpu_seconds:.1f} | {ratio:.3f}"
            f" | {s.peak_bytes / 1e6:.0f} MB |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", type=float, default=4, help="GB of hidden states in memory")
    parser.add_argument("--folder", type=Path, help="where the files go (removed afterwards)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        speeds = measure(Path(name), args)
    if args.json:
        print(json.dumps([asdict(speed) for speed in speeds]))
        return
    print(f"{datetime.date.today()}, {platform.machine()}, {args.threads} threads, {args.layers} layers\n")
    print("\n".join(table(speeds)))


if __name__ == "__main__":
    main()
