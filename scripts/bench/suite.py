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
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.common import Run, command, parser_of, report, run
from scripts.bench.evaluate import make_files
from scripts.bench.imatrix import CONTEXT, write_text

N_SHORT, LONG_CONTEXT = 7, 4096
LONG_SHARE = 0.25
_TOKENS_OF_WORD = 3
"""About as many as a random word has."""


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


def measure(folder: Path, args: argparse.Namespace) -> list[Run]:
    base, files = make_files(folder, args.layers, [args.type])
    best: dict[str, Run] = {}
    suites = write_suites(folder, args.tokens)
    for _ in range(args.rounds):
        for what, words in suites.items():
            out = folder / "out.json"
            done = run(what, command(
                "evaluate", base, *files, *words, "--threads", args.threads, "--memory", args.memory,
                "--force", "--json", out,
            ))  # fmt: skip
            done = replace(done, of={"tokens": n_tokens_of(json.loads(out.read_text()))})
            print(f"{done}", file=sys.stderr)
            if what not in best or done.cpu_seconds < best[what].cpu_seconds:
                best[what] = done
    return list(best.values())


def main() -> None:
    parser = parser_of(__doc__, {"--layers": 4, "--tokens": 16384, "--threads": 2, "--rounds": 1})
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--memory", type=float, default=4, help="GB of hidden states in memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        runs = measure(Path(name), args)
    plain = next(each.cpu_seconds / each.of["tokens"] for each in runs if each.what == "plain text")
    title = "CPU seconds a token, over plain text's"
    report(args, runs, {title: lambda one: f"{one.cpu_seconds / one.of['tokens'] / plain:.3f}"})


if __name__ == "__main__":
    main()
