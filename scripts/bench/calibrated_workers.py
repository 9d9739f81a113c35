"""Count CPU seconds of `quantize --calibrate` in one thread, and with two Dask workers that are running.

    python scripts/bench/calibrated_workers.py TEXT [--type IQ3_XXS] [--columns 1024] [--chunks 6]

The model is made up: one layer of Qwen 3's kind, four times as wide inside. Runs take turns; the first two,
which load and compile kernels, are not counted. Bytes are those of the messages to and from workers, and of
the files that the command leaves for them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import convert
import gguf_tools
import quantize
from gguf_tools.cluster.scheduler import Farm
from imatrix.calibrate.run import cluster
from imatrix.texts.tokens import Cut
from tests.support.dask_cluster import dask_cluster
from tests.support.decoder_models import decoder_model

RUNS = 3


def watch() -> Counter[str]:
    """Return counts of what goes to workers and comes back from now on."""
    counts, store = Counter[str](), cluster._store

    def stored(path: Path, value: object) -> None:
        store(path, value)
        counts["files"] += 1
        counts["bytes of files"] += path.stat().st_size

    class Watched(Farm[cluster.StripsItem]):
        def __init__(self, dask: Any, job: Any, done: Callable[..., None], *others: Any) -> None:
            def counted(item: cluster.StripsItem, result: cluster.EncodedBatch) -> None:
                counts["batches"] += 1
                counts["bytes to workers"] += len(item.strips)
                arrays = [each for strip in result.strips for each in (strip.data, strip.stock)]
                counts["bytes back"] += sum(0 if each is None else each.nbytes for each in arrays)
                done(item, result)

            super().__init__(dask, job, counted, *others)

    cluster._store, cluster.Farm = stored, Watched  # type: ignore[misc, assignment]
    return counts


def make_model(folder: Path, n_cols: int) -> Path:
    """Make the model, and return its GGUF file."""
    sizes = {"hidden_size": n_cols, "intermediate_size": 4 * n_cols, "head_dim": 128}
    decoder_model("qwen3", folder / "model", num_hidden_layers=1, num_attention_heads=8, **sizes)
    convert.convert(folder / "model", folder / "model.gguf", outtype="bf16")
    return folder / "model.gguf"


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Print what runs took, and whether their files are equal."""
    source, counts, files = make_model(folder, args.columns), watch(), set[bytes]()
    calibration = gguf_tools.Calibration(args.text, Cut(256, n_chunks=args.chunks))
    options = quantize.QuantizeOptions(calibration=calibration)
    print("| run | CPU seconds of the command | of workers and scheduler |\n|---|---|---|")
    with dask_cluster(folder / "dask", 2, "--no-nanny") as processes:
        for number in range(RUNS):
            for what, scheduler in (("alone", None), ("two workers", processes.address)):
                counts.clear()
                here, there = time.process_time(), processes.cpu_seconds()
                output = folder / f"{number}-{what}.gguf"
                quantize.quantize(source, output, args.type, options, n_threads=1, scheduler=scheduler)
                here, there = time.process_time() - here, processes.cpu_seconds() - there
                files.add(output.read_bytes())
                if number:
                    print(f"| {what} | {here:.1f} | {there:.1f} |", flush=True)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))
    print("all files are equal" if len(files) == 1 else "files differ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--type", default="IQ3_XXS")
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where the files go (removed afterwards)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        compare(Path(name), args)


if __name__ == "__main__":
    main()
