"""Measure which share of stock files' divergence other files of the same types keep, by class of texts.

    python scripts/measure/share_of_stock.py BASE.gguf --quick mine-Q2_K.gguf=stock-Q2_K.gguf ...

All files go through the suite in one run. The table on stdout is Markdown, with a column for each pair: the
mean divergence of both over all classes, which weigh the same, and the ratio of the means with its 95 %
interval, over all and by class. docs/notes/calibrated-gains.md has tables that it has made.
What --json writes is what `evaluate --json` does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf_tools
from gguf_tools.text import json_text
from imatrix.evaluate.comparison import Comparisons, Interval, compare
from imatrix.evaluate.evaluation import Evaluation
from imatrix.evaluate.figures import ALL


def main() -> None:
    """Run the script."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("pairs", nargs="+", metavar="FILE=STOCK", help="a file, and what it is compared with")
    parser.add_argument("--suite", default="default")
    parser.add_argument("--quick", action="store_true", help="use a tenth of each class")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the base's states for later runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers as one JSON object")
    args = parser.parse_args()
    split = [pair.partition("=") for pair in args.pairs]
    pairs = [(Path(file), Path(stock)) for file, _, stock in split]
    files = list(dict.fromkeys(path for pair in pairs for path in pair))
    suite = gguf_tools.read_suite(args.suite, quick=args.quick)
    found = gguf_tools.evaluate_suite(args.base, suite, files, progress=True, keep=args.keep)
    for line in table(found, pairs):
        print(line)
    if args.json is not None:
        args.json.write_text(json_text(found.to_json()) + "\n", encoding="utf-8")


def table(found: Evaluation, pairs: Sequence[tuple[Path, Path]]) -> Iterator[str]:
    """Yield the lines of the table: a column for each pair."""
    number = {file.path: place for place, file in enumerate(found.models)}
    by_class = {name: [model.tokens for model in each.models] for name, each in found.by_class.items()}
    compared: list[Comparisons] = [
        compare({name: (tokens[number[file]], tokens[number[stock]]) for name, tokens in by_class.items()})
        for file, stock in pairs
    ]
    yield "| | " + " | ".join(file.stem for file, _ in pairs) + " |"
    yield "|---" * (len(pairs) + 1) + "|"
    for title, which in (("KLD, stock", 1), ("KLD", 0)):
        means = [found.figures[number[pair[which]]][ALL].kld.value for pair in pairs]
        yield f"| {title} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |"
    shares = {"share, all classes": [each.overall for each in compared]}
    shares |= {name: [each.by_class[place] for each in compared] for place, name in enumerate(by_class)}
    for title, comparisons in shares.items():
        yield f"| {title} | " + " | ".join(_shown(each.kld_ratio) for each in comparisons) + " |"


def _shown(ratio: Interval) -> str:
    interval = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.value:.2f}{interval}"


if __name__ == "__main__":
    main()
