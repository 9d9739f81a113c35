"""Time `rederive` on a file with the shapes of a model of 7 billion weights, and random ones.

    python scripts/bench/rederive.py [--layers 8] [--threads 2] [--folder DIR] [--json]

A BF16 file of --layers layers, 3.8 GB with 8, is quantized to Q4_K_M. Then 64 rows of each tensor are made
again, and all of them. Kernels are compiled before, by the first command. The source is in the cache of files
if memory suffices.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import BF16, F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from scripts.bench.common import command, parser_of, report, run

HIDDEN, INNER, VOCAB = 4096, 11008, 32000
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}  # fmt: skip
METADATA = {"attention.head_count": 32, "attention.head_count_kv": 32, "embedding_length": HIDDEN}


def write_source(path: Path, n_layers: int) -> None:
    """Write the source: each matrix is a piece of the same random numbers, from another place on."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    infos = [TensorInfo(name, shape, BF16) for name, shape in shapes.items()]
    for layer in range(n_layers):
        infos.append(TensorInfo(f"blk.{layer}.attn_norm.weight", (HIDDEN,), F32))
        infos += [TensorInfo(f"blk.{layer}.{name}.weight", shape, BF16) for name, shape in MATRICES.items()]
    numbers = {f"llama.{key}": Value.u32(value) for key, value in METADATA.items()}
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(n_layers)}
    layout = FileLayout.of(metadata | numbers, infos)
    random = np.random.default_rng(0)
    most = max(info.n_elems for info in infos)
    weights = (0.02 * random.standard_normal(most, np.float32)).astype(ml_dtypes.bfloat16)
    with GGUFWriter(path, layout) as writer:
        for info in infos:
            data = np.roll(weights, int(random.integers(most)))[: info.n_elems]
            data = data.astype(np.float32) if info.type == F32 else data
            writer.write(layout.offset_of(info.name), data.view(np.uint8))
        writer.publish()


def measure(args: argparse.Namespace, folder: Path) -> None:
    source, made = folder / "bf16.gguf", folder / "q4_k_m.gguf"
    write_source(source, args.layers)
    again = command("rederive", made, "--source", source, "-q", "-t", args.threads)
    runs = [
        run("quantize", command("quantize", source, made, "Q4_K_M", args.threads)),
        run("rederive --sample 64", [*again, "--sample", "64", "--seed", "1"]),
        run("rederive", again),
    ]
    report(args, runs, {"size of the file": lambda _: f"{made.stat().st_size / 1e9:.2f} GB"})


def main() -> None:
    args = parser_of(__doc__, {"--layers": 8, "--threads": 2}).parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
