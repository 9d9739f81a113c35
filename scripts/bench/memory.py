"""Measure the peak memory of whole commands on models with all the shapes of DeepSeek-V3.

    python scripts/bench/memory.py [--threads 2] [--seconds 90] [--layers 4] [--folder DIR] [--json]

The sources are sparse: their headers are real, and their weights are zeros that take no space. They are

    a checkpoint     61 layers, 256 experts, 671 billion weights in FP8 with scales, 163 files as published
    a GGUF file      the same in BF16, 1.3 TB
    importances      for every matrix and expert, random, 1 GB; in both forms

and the same again with --layers layers, three of them dense. Each command is a process of its own. Commands
on all 61 layers are killed after --seconds: by then they have read and checked the headers, decided, taken
the fingerprint of the run, and reached the middle of the first experts. Commands on --layers layers run to
the end, which takes 8 GB of disk in --folder; their experts have full size, 256 times 2048 x 7168.

The commands that will be killed run with one change: their output takes its space as it grows, because it
would need 400 GB of disk.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import imatrix
from convert.checkpoint.checkpoint import Checkpoint
from convert.options import ConvertOptions
from convert.pipeline import prepare
from gguf_tools import open_gguf
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from scripts.bench.common import Run, parser_of, report, run
from tests.support.checkpoints import STYLES, shapes
from tests.support.tokenizer_files import VOCAB_SIZES, copy_tokenizer

SHARD_BYTES = 4_300_000_000
N_LAYERS = 61
CONFIG: dict[str, Any] = STYLES["v3"] | {
    "vocab_size": VOCAB_SIZES["deepseek-v3"], "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "max_position_embeddings": 163840,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    },
}  # fmt: skip


# ---- models


def make_checkpoint(folder: Path, n_layers: int) -> Path:
    """Write a checkpoint of shards with real headers and holes for the data; return `folder`."""
    config = CONFIG | {"num_hidden_layers": n_layers}
    copy_tokenizer("deepseek-v3", folder)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    n_bytes = 0
    for name, dtype, shape in stored(config):
        size = int(np.prod(shape)) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        if n_bytes + size > SHARD_BYTES:
            shards.append({})
            n_bytes = 0
        shards[-1][name] = dtype, shape, size
        n_bytes += size
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_sparse_shard(folder / name, tensors)
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def stored(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of what DeepSeek stores: projections as FP8, with a scale per block."""
    for name, shape in shapes(config):
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            yield name, "F8_E4M3", shape
            yield f"{name}_scale_inv", "F32", tuple(-(-size // 128) for size in shape)
        else:
            yield name, "F32" if name.endswith("bias") else "BF16", shape


def write_sparse_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    header = {}
    position = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def make_gguf(checkpoint: Path, path: Path) -> Path:
    """Write the GGUF file that the checkpoint becomes, with a real header and a hole for the data."""
    with Checkpoint(checkpoint) as opened:
        preparation, _ = prepare(opened, path, ConvertOptions(outtype="bf16", provenance=False))
    (output,) = preparation.outputs
    with open(path, "wb") as file:
        file.write(output.layout.header)
        file.truncate(output.layout.total_bytes)
    return path


def make_matrix(gguf: Path, path: Path) -> Path:
    """Write importances for every matrix of a model, one row for each matrix of a stack."""
    with open_gguf(gguf) as file:
        matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    infos = [
        TensorInfo(f"{info.name}{suffix}", shape, F32)
        for info in sorted(matrices, key=lambda info: info.name)
        for suffix, shape in ((".in_sum2", (info.n_mats, info.n_cols)), (".counts", (info.n_mats, 1)))
    ]
    metadata = {
        "general.type": Value.string("imatrix"),
        "imatrix.datasets": Value.strings(["random"]),
        "imatrix.chunk_count": Value.u32(1),
        "imatrix.chunk_size": Value.u32(512),
    }
    rng = np.random.default_rng(0)
    layout = FileLayout.of(metadata, infos)
    with GGUFWriter(path, layout) as writer:
        for info in infos:
            numbers = np.ones(info.shape, np.float32)
            if info.name.endswith(".in_sum2"):
                numbers = rng.random(info.shape, np.float32) + np.float32(0.1)
            writer.write(layout.offset_of(info.name), numbers)
        writer.publish()
    return path


# ---- commands


def be_command(how: str, words: Sequence[str]) -> int:
    """Be a command of the toolkit, and return its exit code.

    how  "killed": don't allocate the output's space at the start; "whole": run as usual
    """
    import gguf_tools.files.partial_file

    if how == "killed":
        setattr(gguf_tools.files.partial_file, "_fallocate", lambda fd, n_bytes: False)  # noqa: B010
        status = list(os.statvfs("/"))
        status[4] = 1 << 60  # f_bavail
        os.statvfs = lambda path: os.statvfs_result(status)  # type: ignore[assignment]
    if words[0] == "quantize":
        import gguf_tools.commands.quantize

        return gguf_tools.commands.quantize.main(words[1:])
    import gguf_tools.commands.convert

    return gguf_tools.commands.convert.main(words[1:])


def measure(folder: Path, n_layers: int, n_threads: int, seconds: float) -> Iterator[Run]:
    """Make the models in `folder`, and yield a run of every command on them."""
    for layers, limit in ((N_LAYERS, seconds), (n_layers, None)):
        model = make_checkpoint(folder / f"{layers}", layers)
        gguf = make_gguf(model, folder / f"{layers}.gguf")
        matrix = make_matrix(gguf, folder / f"{layers}.imatrix.gguf")
        dat = folder / f"{layers}.imatrix.dat"
        imatrix.save(dat, imatrix.load(matrix))
        out = folder / "out.gguf"
        convert_ = ["convert", str(model), "--force", "--outfile", str(out)]
        convert_ += ["--threads", str(n_threads), "--outtype"]
        end = [str(gguf), str(out)]
        commands = {
            "checkpoint to Q4_K_M, --dry-run": [*convert_, "Q4_K_M", "--dry-run"],
            "checkpoint to Q4_K_M": [*convert_, "Q4_K_M"],
            "checkpoint to Q4_K_M with importances": [*convert_, "Q4_K_M", "--imatrix", str(matrix)],
            "GGUF to Q4_K_M": ["quantize", *end, "Q4_K_M", str(n_threads)],
            "GGUF to Q4_K_M with importances": [
                "quantize", "--imatrix", str(matrix), *end, "Q4_K_M", str(n_threads),
            ],
            "GGUF to IQ2_XXS with importances as .dat": [
                "quantize", "--imatrix", str(dat), *end, "IQ2_XXS", str(n_threads),
            ],
        }  # fmt: skip
        if limit is None:
            verified = [*commands["checkpoint to Q4_K_M with importances"], "--verify"]
            commands["checkpoint to Q4_K_M with importances, --verify"] = verified
        for what, words in commands.items():
            how = "whole" if limit is None else "killed"
            this = [sys.executable, str(Path(__file__).resolve()), "--command", how]
            yield run(f"{layers} layers: {what}", [*this, *words], limit=limit)
            for path in folder.glob("out.gguf*"):
                path.unlink()


def main() -> None:
    if sys.argv[1:2] == ["--command"]:
        raise SystemExit(be_command(sys.argv[2], sys.argv[3:]))
    args = parser_of(__doc__, {"--threads": 2, "--seconds": 90.0, "--layers": 4}).parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        runs = []
        for one in measure(Path(name), args.layers, args.threads, args.seconds):
            runs.append(one)
            print(f"{one.what}: {one.peak_bytes / 1e6:.0f} MB, {one.seconds:.1f} s", file=sys.stderr)
    report(args, runs)


if __name__ == "__main__":
    main()
