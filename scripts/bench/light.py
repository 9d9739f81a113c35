"""Time `quantize` to light types beside what the disk and the page cache need for the same bytes.

    python scripts/bench/light.py [--layers 4] [--threads 2] [--types Q8_0 Q4_0 Q6_K] [--folder DIR] [--json]

The model is a BF16 file of about 0.17 billion weights a layer, in the page cache. For each type, two commands
take turns, and the best of five counts:

    cat, cp and sync  read the file, and copy one of the output's size, without sharing its blocks
    quantize          the file to the type, without importances; the kernels are compiled before
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.common import Run, command, parser_of, report, run
from scripts.bench.pipeline import make_model

REPETITIONS = 5


def measure(folder: Path, n_layers: int, n_threads: int, types: Sequence[str]) -> Iterator[Run]:
    """Yield both commands of each type."""
    model, source, out, copy = (folder / name for name in ("model", "bf16.gguf", "out.gguf", "copy.gguf"))
    make_model(model, n_layers)
    run("convert", command("convert", model, "--outtype", "bf16", "--outfile", source))
    for type_ in types:
        words = command("quantize", source, out, type_, n_threads, "--force")
        run(type_, words)
        same = f"cat {source} > /dev/null && cp --reflink=never {out} {copy} && sync {copy} && rm {copy}"
        both = ("cat, cp and sync", ["sh", "-c", same]), ("quantize", words)
        turns = [[run(what, each, {"type": type_}) for what, each in both] for _ in range(REPETITIONS)]
        for runs in zip(*turns, strict=True):
            yield min(runs, key=lambda each: each.seconds)


def main() -> None:
    parser = parser_of(__doc__, {"--layers": 4, "--threads": 2})
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0", "Q6_K"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        report(args, list(measure(Path(name), args.layers, args.threads, args.types)))


if __name__ == "__main__":
    main()
