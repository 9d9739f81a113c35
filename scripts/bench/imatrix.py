"""Time collecting importances beside a plain loop over chunks: tokens per second and peak memory.

    python scripts/bench/imatrix.py [--layers 10] [--chunks 64] [--plain-chunks 2] [--llama-chunks 0]
                                    [--observed-chunks 0] [--threads 2] [--dtype both] [--family deepseek]
                                    [--folder DIR] [--json]

The model is DeepSeek-V3-style with 32 experts a layer, of which 4 are used, and random BF16 weights: about
2 billion in 10 layers. With --family llama, qwen2 or qwen3 it is a dense one with 4 heads to a key, of 0.45
billion weights in 10 layers, and 1 billion in 22; with qwen3.5 it has gated delta nets, and 1 billion in 17.
Each run is a process of its own, on the same files, with chunks of 512 tokens:

    layer by layer   what `imatrix -m -f` does: a layer's weights are read once for all chunks
    plain loop       the same arithmetic a chunk at a time, as in a program whose memory holds only one layer:
                     every weight is read for every chunk
    llama.cpp        decodes a chunk at a time in BF16 and collects nothing (needs the xllamacpp wheel)
    llama.cpp, observed  the same, with the callback that llama-imatrix has: it is shown what each matrix
                     multiplies, and adds up the squares

The first two run in both dtypes, unless --dtype names one.

On a shared machine, tokens per second of CPU time say more than tokens per second. With --threads 1 they
include no waiting of one thread for another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.common import ROOT, Run, command, parser_of, report, run
from scripts.bench.pipeline import make_model, write_random
from tests.support.published_models import delta_net, write

CONTEXT = 512
CHUNKS = f"chunks of {CONTEXT}"
"""Title of a column."""

GOLDEN = ROOT / "tests" / "golden" / "arch" / "models"
DENSE = {"llama": "llama-r1-distill", "qwen2": "qwen2-r1-distill", "qwen3": "qwen3-r1-0528"}
"""Dense family -> the recorded small model whose configuration and tokenizer are scaled up."""

DENSE_SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


DELTA_NET = "qwen3.5"
DELTA_NET_SIZES = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
"""Those of Qwen3.5-2B."""


def write_text(path: Path, n_chunks: int) -> None:
    """Write a text of at least `n_chunks` chunks. Random words will do, as the weights are random too."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    words = (
        "".join(letters[rng.integers(0, 12, rng.integers(2, 8))]) for _ in range((n_chunks + 1) * CONTEXT)
    )
    path.write_text(" ".join(words))


def make_dense(folder: Path, family: str, n_layers: int) -> None:
    """Write a BF16 checkpoint of a dense family."""
    small = GOLDEN / DENSE[family]
    config = json.loads((small / "config.json").read_text()) | DENSE_SIZES | {"num_hidden_layers": n_layers}
    config |= {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    write_random(folder, config, dense_shapes(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / name, folder / name)


def make_delta_net(folder: Path, n_layers: int) -> None:
    """Write a BF16 checkpoint of a dense Qwen 3.5 without its vision part."""
    small_folder = write(DELTA_NET, folder.with_name("small"))
    small = json.loads((small_folder / "config.json").read_text())["text_config"]
    names = {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 0}
    config = {**small, **DELTA_NET_SIZES, **names, "num_hidden_layers": n_layers}
    shapes = (pair for pair in delta_net(config) if not pair[0].startswith("mtp."))
    write_random(folder, config, shapes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_folder / name, folder / name)


def dense_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a dense decoder; Qwen 2 has biases, Qwen 3 norms of queries and keys."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_rows = config["head_dim"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for part, rows in (("q", hidden), ("k", kv_rows), ("v", kv_rows)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (rows, hidden)
            if config["model_type"] == "qwen2":
                yield f"{prefix}.self_attn.{part}_proj.bias", (rows,)
        if config["model_type"] == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (config["head_dim"],)
            yield f"{prefix}.self_attn.k_norm.weight", (config["head_dim"],)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def plain_loop(model: str, path: str, n_chunks: str, n_threads: str, dtype: str) -> None:
    """Compute the same sums a chunk at a time."""
    import torch

    from imatrix.forward.hidden_states import MemoryStates
    from imatrix.forward.observe import Accumulator
    from imatrix.forward.open import open_model
    from imatrix.forward.run import embed
    from imatrix.forward.sweep import Execution, LayerBuffers, Sweep, run_layer
    from imatrix.texts.mixture import read_text
    from imatrix.texts.tokens import Cut, Text

    torch.set_num_threads(int(n_threads))
    with open_model(model) as source:
        network, cut = source.network, Cut(CONTEXT, n_chunks=int(n_chunks))
        text = read_text(Path(path), source.vocab(), network.vocab_size, cut)
        load = source.loader(torch.device("cpu"), getattr(torch, dtype))
        rotate = network.rope.rotation(CONTEXT, load.device)
        for chunk in range(text.n_chunks):
            here, there = (MemoryStates(CONTEXT, network.hidden_size) for _ in range(2))
            one = slice(chunk, chunk + 1)
            chunks = Text(text.tokens[one], text.inputs[one]).chunks
            sweep = Sweep(
                build=lambda number: network.build(load, number, rotate),
                device=load.device,
                dtype=load.dtype,
                chunks=chunks,
                all_experts=False,
            )
            embed(load, chunks, here, network)
            for layer in range(network.n_layers):
                run_layer(sweep, Execution(), layer, LayerBuffers(here, here, there), Accumulator())
                here, there = there, here


def llama(gguf: str, n_chunks: str, n_threads: str, observes: str) -> None:
    """Decode random tokens a chunk at a time, as llama.cpp does without any option."""
    from tests.support import oracle
    from tests.support.oracle.activations import observed

    with oracle.Model(gguf, plain=False) as model:
        for chunk in range(int(n_chunks)):
            tokens = np.random.default_rng(chunk).integers(0, model.n_vocab, CONTEXT).tolist()
            if observes == "observed":
                observed(model, tokens, n_threads=int(n_threads), as_shipped=True)
            else:
                model.logits(tokens, n_threads=int(n_threads), as_shipped=True)


def measure(folder: Path, args: argparse.Namespace) -> list[Run]:
    """Make the model in `folder`, and time every run on it."""
    model, text = args.model or folder / "model", folder / "text.txt"
    if args.model is None and args.family == DELTA_NET:
        make_delta_net(model, args.layers)
    elif args.model is None and args.family in DENSE:
        make_dense(model, args.family, args.layers)
    elif args.model is None:
        make_model(model, args.layers)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    write_text(text, max(args.chunks, args.plain_chunks))
    threads, gguf = str(args.threads), folder / "model.gguf"
    this = [sys.executable, str(Path(__file__).resolve())]
    runs: list[tuple[str, str, int, list[str]]] = []
    for dtype in ("bfloat16", "float32") if args.dtype == "both" else (args.dtype,):
        ours = command(
            "imatrix", "-m", model, "-f", text, "-o", folder / f"{dtype}.gguf", "--chunks", args.chunks,
            "--threads", threads, "--dtype", dtype, "--no-ppl", "--force",
        )  # fmt: skip
        loop = [*this, "--plain", str(model), str(text), str(args.plain_chunks), threads, dtype]
        runs += [("layer by layer", dtype, args.chunks, ours), ("plain loop", dtype, args.plain_chunks, loop)]
    if args.llama_chunks or args.observed_chunks:
        run("convert", command("convert", model, "--outfile", gguf, "--outtype", "bf16", "--force"))
        for n_chunks, observes in ((args.llama_chunks, ""), (args.observed_chunks, "observed")):
            decode = [*this, "--llama", str(gguf), str(n_chunks), threads, observes]
            runs.append((", ".join(filter(None, ("llama.cpp", observes))), "bfloat16", n_chunks, decode))
    return [
        run(what, words, {"dtype": dtype, CHUNKS: n_chunks})
        for what, dtype, n_chunks, words in runs
        if n_chunks
    ]


def main() -> None:
    parser = parser_of(__doc__, {
        "--layers": 10, "--chunks": 64, "--plain-chunks": 2, "--llama-chunks": 0, "--observed-chunks": 0,
        "--threads": 2,
    })  # fmt: skip
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--family", choices=["deepseek", *DENSE, DELTA_NET], default="deepseek")
    parser.add_argument("--model", type=Path, help="an existing model to use")
    parser.add_argument("--plain", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--llama", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        plain_loop(*args.plain)
        return
    if args.llama:
        llama(*args.llama)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        speeds = measure(Path(name), args)
    report(args, speeds, {
        "tokens/s": lambda one: f"{one.of[CHUNKS] * CONTEXT / one.seconds:.0f}",
        "tokens per CPU second": lambda one: f"{one.of[CHUNKS] * CONTEXT / one.cpu_seconds:.0f}",
    })  # fmt: skip


if __name__ == "__main__":
    main()
