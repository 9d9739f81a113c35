"""Train a small dense model of Llama's kind, whose activations have structure, within an hour on two cores.

    python scripts/train_small_model.py TOKENIZER_FOLDER OUTPUT_FOLDER [--minutes 50]

Methods that look at activations can't be judged on random weights, nor on one model. The sample model is a
mixture of experts with latent attention; this makes a second one of another family: grouped-query attention
and dense blocks. It reads the sources of Python's standard library at most twice, in a fixed order that mixes
the files. The tokenizer is copied from a folder, so that two models can be compared on the same tokens.

The learning rate rises for 5 % of the training and falls to a tenth along a cosine. Training ends with the
text or with the minutes, whichever is first; the schedule follows the share of both that is used up. Needs
transformers.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512
BATCH = 4
PASSES = 2
PEAK_RATE = 3e-3
WARM_UP = 0.05
COPIED = ("tokenizer.json", "tokenizer_config.json")


def config(vocab_size: int) -> LlamaConfig:
    """Return a model of 7 million weights, with rows of whole blocks of 256."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def sources() -> list[Path]:
    """Return the standard library's modules without its tests, mixed by a hash of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    modules = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    return sorted(modules, key=lambda path: zlib.crc32(str(path.relative_to(root)).encode()))


def read_tokens(tokenizer: Tokenizer, paths: list[Path]) -> np.ndarray:
    """Return the tokens of all files, int64, each file behind a beginning-of-text token."""
    ids: list[int] = []
    for path in paths:
        ids += [0, *tokenizer.encode(path.read_text(errors="replace"), add_special_tokens=False).ids]
    return np.array(ids, np.int64)


def batches(tokens: np.ndarray) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield the share of the text that is used up, and chunks (BATCH, CONTEXT) from all over it."""
    chunks = tokens[: len(tokens) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    random = np.random.default_rng(0)
    order = np.concatenate([random.permutation(len(chunks)) for _ in range(PASSES)])
    for first in range(0, len(order) - BATCH + 1, BATCH):
        yield first / len(order), torch.from_numpy(chunks[order[first : first + BATCH]])


def learning_rate(share: float) -> float:
    """Return the rate when this share of the training is over."""
    if share < WARM_UP:
        return PEAK_RATE * share / WARM_UP
    falling = (share - WARM_UP) / (1 - WARM_UP)
    return PEAK_RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * falling)))


def train(model: LlamaForCausalLM, tokens: np.ndarray, seconds: float) -> None:
    """Train until the text or the time is used up."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    started, losses = time.monotonic(), []
    for number, (share, batch) in enumerate(batches(tokens)):
        share = max(share, (time.monotonic() - started) / seconds)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if number % 20 == 19:
            print(f"{100 * share:5.1f} %   loss {sum(losses[-20:]) / 20:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER_FOLDER")
    parser.add_argument("output", type=Path, metavar="OUTPUT_FOLDER")
    parser.add_argument("--minutes", type=float, default=50)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    tokens = read_tokens(tokenizer, sources())
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tokenizer.get_vocab_size()))
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights, {len(tokens):,} tokens")
    train(model, tokens, 60 * arguments.minutes)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    for name in COPIED:
        shutil.copy(arguments.tokenizer / name, arguments.output)


if __name__ == "__main__":
    main()
