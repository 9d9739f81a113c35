"""Time evaluating a base and three files of it, beside four runs of llama.cpp over the same chunks.

    python scripts/bench/evaluate.py [--layers 10] [--chunks 16] [--llama-chunks 2] [--threads 2]
                                     [--dtype bfloat16 float32] [--types Q2_K Q4_K_M Q8_0] [--repack]
                                     [--folder DIR] [--json]

The model is DeepSeek-V3-style with 32 experts a layer, of which 4 are used, and random weights: about 2
billion in 10 layers. Each run is a process of its own, on the same files, chunks of 512 tokens:

    evaluate    the base as BF16 and its three files in one run, with all that it measures
    llama.cpp   one run per file, which decodes the chunks one by one and has all logits of the second half:
                the part of llama-perplexity --kl-divergence that takes time (needs the xllamacpp wheel). With
                --repack it rearranges weights for faster kernels while loading, where it can

A chunk takes llama.cpp as long as any other, so --llama-chunks may be fewer; its seconds are then those of a
whole run, by what a chunk more takes. Loading is part of them.

On a shared machine, CPU seconds say more than seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.imatrix import CONTEXT, cpu_seconds, write_text
from scripts.bench.pipeline import make_model, run


@dataclass(frozen=True)
class Speed:
    """One run, or several of the same kind: times are added up, and memory is the largest."""

    what: str
    n_models: int
    n_chunks: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def llama(gguf: str, n_chunks: str, n_threads: str, repack: str) -> None:
    """Decode random tokens a chunk at a time, and take a softmax of the second half's logits."""
    from tests.support import oracle

    with oracle.Model(gguf, plain=repack == "plain") as model:
        for chunk in range(int(n_chunks)):
            tokens = np.random.default_rng(chunk).integers(0, model.n_vocab, CONTEXT).tolist()
            logits = model.logits(tokens, n_threads=int(n_threads))[CONTEXT // 2 :]
            np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)


def timed(what: str, n_models: int, n_chunks: int, words: Sequence[str]) -> Speed:
    before = cpu_seconds()
    done = run(what, words)
    return Speed(what, n_models, n_chunks, done.seconds, cpu_seconds() - before, done.peak_bytes)


def make_files(folder: Path, args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """Make the model in `folder`; return its BF16 file, and those that are made of it."""
    make_model(folder / "model", args.layers)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    base = folder / "base.gguf"
    to_gguf = ["--outfile", str(base), "--outtype", "bf16", "--force"]
    run("convert", [sys.executable, "-m", "gguf_tools.commands.convert", str(folder / "model"), *to_gguf])
    files = [folder / f"{file_type}.gguf" for file_type in args.types]
    for path, file_type in zip(files, args.types, strict=True):
        run(
            "quantize",
            [sys.executable, "-m", "gguf_tools.commands.quantize", str(base), str(path), file_type],
        )
    return base, files


def measure(folder: Path, args: argparse.Namespace) -> list[Speed]:
    """Make the files in `folder`, and time every run on them."""
    base, files = make_files(folder, args)
    text, threads = folder / "text.txt", str(args.threads)
    write_text(text, args.chunks)
    speeds = []
    for dtype in args.dtype:
        words = [
            sys.executable, "-m", "gguf_tools.commands.evaluate", str(base), *map(str, files),
            "-f", str(text),
            "--chunks", str(args.chunks), "--threads", threads, "--dtype", dtype,
            "--force", "--json", str(folder / f"{dtype}.json"),
        ]  # fmt: skip
        speeds.append(timed(f"evaluate, {dtype}", 1 + len(files), args.chunks, words))
    if args.llama_chunks:
        speeds.append(four_runs([base, *files], args))
    return speeds


def four_runs(files: Sequence[Path], args: argparse.Namespace) -> Speed:
    """Return the time of a run of llama.cpp for each file, over all chunks."""
    kind = "repack" if args.repack else "plain"
    seconds = used = 0.0
    peak = 0
    for path in files:
        few, more = (
            timed("llama.cpp", 1, n_chunks, [
                sys.executable, str(Path(__file__).resolve()), "--llama", str(path), str(n_chunks),
                str(args.threads), kind,
            ])
            for n_chunks in (1, 1 + args.llama_chunks)
        )  # fmt: skip
        rest = (args.chunks - 1) / args.llama_chunks
        seconds += few.seconds + rest * (more.seconds - few.seconds)
        used += few.cpu_seconds + rest * (more.cpu_seconds - few.cpu_seconds)
        peak = max(peak, more.peak_bytes)
    return Speed(f"llama.cpp, {kind}", len(files), args.chunks, seconds, used, peak)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--llama-chunks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--types", nargs="+", default=["Q2_K", "Q4_K_M", "Q8_0"])
    parser.add_argument("--repack", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the files go (removed afterwards)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--llama", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.llama:
        llama(*args.llama)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        speeds = measure(Path(name), args)
    if args.json:
        print(json.dumps([asdict(speed) for speed in speeds]))
        return
    print(f"{datetime.date.today()}, {platform.machine()}, {args.threads} threads, {args.layers} layers\n")
    print("| run | models | chunks of 512 | seconds | CPU seconds | peak memory |")
    print("|---|---|---|---|---|---|")
    for s in speeds:
        print(
            f"| {s.what} | {s.n_models} | {s.n_chunks} | {s.seconds:.1f} | {s.cpu_seconds:.1f}"
            f" | {s.peak_bytes / 1e6:.0f} MB |"
        )


if __name__ == "__main__":
    main()
