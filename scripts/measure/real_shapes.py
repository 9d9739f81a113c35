"""Print what the steps from a checkpoint to a measured file would take, for models of ordinary sizes.

    python -m scripts.measure.real_shapes [--folder DIR] [--text TEXT] [--threads 2]

The checkpoints have the shapes of published models, and V3's tokenizer. They are sparse: their headers are
real, and their weights are zeros that take no space. Every step is a command with --dry-run, which measures
the speed of this machine for a few seconds; its output is printed. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from scripts.bench.common import ROOT, command, machine
from scripts.bench.memory import make_gguf, write_sparse_shard
from tests.support.published_shapes import Shapes, decoder
from tests.support.tokenizer_files import copy_tokenizer

_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "8B": {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 129280,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    },
    "30B-A3B": {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "use_qk_norm": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Configurations: Llama 3.1 8B and Qwen3-30B-A3B, but for their vocabularies."""


def shapes(config: dict[str, Any]) -> Shapes:
    """Yield names and shapes of a model's tensors."""
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size")
    for name, shape in decoder(config):
        if width is None or ".mlp." not in name:
            yield name, shape
        elif name.endswith(".gate_proj.weight"):
            block = name.removesuffix(".gate_proj.weight")
            yield f"{block}.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield f"{block}.experts.{expert}.gate_proj.weight", (width, hidden)
                yield f"{block}.experts.{expert}.up_proj.weight", (width, hidden)
                yield f"{block}.experts.{expert}.down_proj.weight", (hidden, width)


def make_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint with a hole for its weights; return `folder`."""
    copy_tokenizer("deepseek-v3", folder)
    written = {key: value for key, value in config.items() if key != "use_qk_norm"}  # for `decoder` alone
    (folder / "config.json").write_text(json.dumps(written))
    stored = {name: ("BF16", shape, 2 * prod(shape)) for name, shape in shapes(config)}
    write_sparse_shard(folder / "model.safetensors", stored)
    return folder


def steps(model: Path, text: Path, n_threads: int) -> Iterator[list[str]]:
    """Yield the commands that are tried on a checkpoint, with the GGUF file that it becomes beside it."""
    base = make_gguf(model, model.with_suffix(".gguf"))
    out, threads, cut = model.with_name("out.gguf"), ["-t", n_threads], ["--chunks", 64]
    yield command("convert", model, "--outtype", "bf16", "--outfile", out, "--dry-run", "--summary")
    yield command("imatrix", "-m", base, "-f", text, *cut, "-o", out, "--dry-run", *threads)
    for type_ in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"):
        yield command("quantize", "--dry-run", "--summary", base, out, type_)
    for type_ in ("IQ3_XXS", "Q4_K_M"):
        calibrated = ["--calibrate", text, *cut, *threads]
        yield command("quantize", "--dry-run", "--summary", *calibrated, base, out, type_)
    yield command("evaluate", base, "--suite", "default", "--quick", base, "--dry-run", *threads)


def main() -> None:
    """Run the script."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--folder", type=Path, help="where the sparse files go (removed afterwards)")
    parser.add_argument("--text", type=Path, help="what to calibrate with (default: that of gguf-tools text)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        text = args.text or Path(folder) / "texts"
        if args.text is None:
            subprocess.run(command("text", "-o", text), check=True, cwd=ROOT, capture_output=True)
        for name, config in MODELS.items():
            for words in steps(make_checkpoint(Path(folder) / name, config), text, args.threads):
                print("\n$", *(word.replace(f"{folder}/", "") for word in words[3:]), flush=True)
                done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
                print(done.stdout + done.stderr, end="", flush=True)


if __name__ == "__main__":
    main()
