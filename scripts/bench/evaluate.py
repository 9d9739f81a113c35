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
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.common import Run, command, parser_of, report, run
from scripts.bench.imatrix import CHUNKS, CONTEXT, write_text
from scripts.bench.pipeline import make_model


def llama(gguf: str, n_chunks: str, n_threads: str, repack: str) -> None:
    """Decode random tokens a chunk at a time, and take a softmax of the second half's logits."""
    from tests.support import oracle

    with oracle.Model(gguf, plain=repack == "plain") as model:
        for chunk in range(int(n_chunks)):
            tokens = np.random.default_rng(chunk).integers(0, model.n_vocab, CONTEXT).tolist()
            logits = model.logits(tokens, n_threads=int(n_threads))[CONTEXT // 2 :]
            np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)


def make_files(folder: Path, n_layers: int, types: Sequence[str]) -> tuple[Path, list[Path]]:
    """Make the model in `folder`; return its BF16 file, and those that are made of it."""
    model, base = folder / "model", folder / "base.gguf"
    make_model(model, n_layers)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    run("convert", command("convert", model, "--outfile", base, "--outtype", "bf16", "--force"))
    files = [folder / f"{file_type}.gguf" for file_type in types]
    for path, file_type in zip(files, types, strict=True):
        run("quantize", command("quantize", base, path, file_type))
    return base, files


def measure(folder: Path, args: argparse.Namespace) -> list[Run]:
    """Make the files in `folder`, and time every run on them."""
    base, files = make_files(folder, args.layers, args.types)
    text = folder / "text.txt"
    write_text(text, args.chunks)
    runs = []
    for dtype in args.dtype:
        words = command(
            "evaluate", base, *files, "-f", text, "--chunks", args.chunks, "--threads", args.threads,
            "--dtype", dtype, "--force", "--json", folder / f"{dtype}.json",
        )  # fmt: skip
        runs.append(run(f"evaluate, {dtype}", words, {"models": 1 + len(files), CHUNKS: args.chunks}))
    if args.llama_chunks:
        runs.append(four_runs([base, *files], args))
    return runs


def four_runs(files: Sequence[Path], args: argparse.Namespace) -> Run:
    """Return the time of a run of llama.cpp for each file, over all chunks."""
    kind = "repack" if args.repack else "plain"
    seconds = used = 0.0
    peak = 0
    for path in files:
        this = [sys.executable, str(Path(__file__).resolve()), "--llama", str(path)]
        few, more = (
            run("llama.cpp", [*this, str(n_chunks), str(args.threads), kind])
            for n_chunks in (1, 1 + args.llama_chunks)
        )
        rest = (args.chunks - 1) / args.llama_chunks
        seconds += few.seconds + rest * (more.seconds - few.seconds)
        used += few.cpu_seconds + rest * (more.cpu_seconds - few.cpu_seconds)
        peak = max(peak, more.peak_bytes)
    return Run(f"llama.cpp, {kind}", seconds, used, peak, {"models": len(files), CHUNKS: args.chunks})


def main() -> None:
    parser = parser_of(__doc__, {"--layers": 10, "--chunks": 16, "--llama-chunks": 2, "--threads": 2})
    parser.add_argument(
        "--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--types", nargs="+", default=["Q2_K", "Q4_K_M", "Q8_0"])
    parser.add_argument("--repack", action="store_true")
    parser.add_argument("--llama", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.llama:
        llama(*args.llama)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        runs = measure(Path(name), args)
    report(args, runs)


if __name__ == "__main__":
    main()
