"""Train a small model, whose activations have structure, in an hour of a core.

    python scripts/record/small_model.py TOKENIZER_FOLDER OUTPUT_FOLDER [--minutes 50]
    python scripts/record/small_model.py TOKENIZER_FOLDER OUTPUT_FOLDER --kind deepseek-v3 --inner 352 \
        --start examples/tiny-deepseek-v3 --minutes 15

Methods that look at activations can't be judged on random weights, nor on one model. The sample model is a
mixture of experts with latent attention. This makes one of another family: grouped-query attention and dense
blocks, as Llama's, Qwen 3.5's (gated delta nets) or Gemma 3's (windows, norms around parts), or one of the
sample's kind with other inner sizes. It reads the sources of Python's standard
library at most twice, in a fixed order that mixes the files. The tokenizer is copied from a folder, so that
two models can be compared on the same tokens.

With --start, it begins with the weights of a trained model with other inner sizes; new channels are random.

The learning rate rises for 5 % of the training and falls to a tenth along a cosine. Training ends with the
text or with the minutes, whichever is first; the schedule follows the share of both that is used up. Minutes
are those of processors, so other work on the machine changes nothing but the date. Needs transformers.
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
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

N_TOKENS = 2048
"""Tokens of a batch, whatever the length of its chunks."""

PASSES = 2
PEAK_RATE, PEAK_RATE_OF_TRAINED = 3e-3, 1e-3
WARM_UP = 0.05
BIAS_STEP = 1e-3
"""How far the selection bias of an expert moves in a step towards as many tokens as the others have."""
COPIED = ("tokenizer.json", "tokenizer_config.json")
COMMON = {
    "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""What configurations of all kinds share."""


def llama(vocab_size: int, inner: int) -> LlamaForCausalLM:
    """Make a dense model; 7 million weights with 768 inner channels."""
    config = LlamaConfig(
        **COMMON,
        vocab_size=vocab_size,
        intermediate_size=inner,
        num_hidden_layers=6,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def deepseek_v3(vocab_size: int, inner: int) -> DeepseekV3ForCausalLM:
    """Make a mixture of experts like the sample model.

    inner  channels of an expert; the dense block has twice as many
    """
    config = DeepseekV3Config(
        **COMMON,
        vocab_size=vocab_size,
        intermediate_size=2 * inner,
        moe_intermediate_size=inner,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        q_lora_rank=256,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        tie_word_embeddings=False,
    )
    model = DeepseekV3ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, DeepseekV3TopkRouter):
            module.register_forward_hook(_balance)
    return model


def qwen3_5(vocab_size: int, inner: int) -> Qwen3_5ForCausalLM:
    """Make a dense model with three layers of gated delta nets to one of gated attention."""
    config = Qwen3_5TextConfig(
        **COMMON,
        vocab_size=vocab_size,
        intermediate_size=inner,
        num_hidden_layers=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def gemma3(vocab_size: int, inner: int) -> Gemma3ForCausalLM:
    """Make a dense model with norms around its parts, and five layers with a window to one without."""
    config = Gemma3TextConfig(
        **COMMON,
        vocab_size=vocab_size,
        intermediate_size=inner,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=128,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    return Gemma3ForCausalLM(config)


def _balance(router: DeepseekV3TopkRouter, _: object, outputs: tuple[torch.Tensor, ...]) -> None:
    """Move the selection bias towards experts that have few tokens, without a loss of its own."""
    n_tokens = torch.bincount(outputs[2].flatten(), minlength=router.num_experts).float()
    with torch.no_grad():
        router.e_score_correction_bias += BIAS_STEP * torch.sign(n_tokens.mean() - n_tokens)


KINDS = {
    "llama": (llama, 768),
    "deepseek-v3": (deepseek_v3, 256),
    "qwen3.5": (qwen3_5, 768),
    "gemma3": (gemma3, 1024),
}
"""What makes a model of each kind, and its usual number of inner channels."""


def begin_with(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of a model with other inner sizes, those of the channels that both have."""
    trained = type(model).from_pretrained(folder).state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            n_parts = 2 if name.endswith("gate_up_proj") else 1
            axis = max(0, weight.dim() - 2)
            parts = weight.chunk(n_parts, axis), trained[name].chunk(n_parts, axis)
            for new, old in zip(*parts, strict=True):
                both = tuple(slice(min(sizes)) for sizes in zip(new.shape, old.shape, strict=True))
                new[both] = old[both]


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


def batches(tokens: np.ndarray, context: int) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield the share of the text that is used up, and batches (chunks, context) from all over it."""
    batch = N_TOKENS // context
    chunks = tokens[: len(tokens) // context * context].reshape(-1, context)
    random = np.random.default_rng(0)
    order = np.concatenate([random.permutation(len(chunks)) for _ in range(PASSES)])
    for first in range(0, len(order) - batch + 1, batch):
        yield first / len(order), torch.from_numpy(chunks[order[first : first + batch]])


def learning_rate(share: float, peak: float) -> float:
    """Return the rate when this share of the training is over."""
    if share < WARM_UP:
        return peak * share / WARM_UP
    falling = (share - WARM_UP) / (1 - WARM_UP)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * falling)))


def train(
    model: PreTrainedModel, chunks: Iterator[tuple[float, torch.Tensor]], seconds: float, peak: float
) -> None:
    """Train until the text or the time, all threads' together, is used up."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    started, losses = time.process_time(), []
    for number, (share, batch) in enumerate(chunks):
        share = max(share, (time.process_time() - started) / seconds)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share, peak)
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
    parser.add_argument("--minutes", type=float, default=50, help="of all cores together (default: 50)")
    parser.add_argument("--kind", choices=KINDS, default="llama")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="begin with these weights")
    parser.add_argument("--inner", type=int, help="inner channels (default: each kind has its own)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    tokens = read_tokens(tokenizer, sources())
    torch.manual_seed(0)
    make, inner = KINDS[arguments.kind]
    model = make(tokenizer.get_vocab_size(), arguments.inner or inner)
    peak = PEAK_RATE
    if arguments.start is not None:
        peak = PEAK_RATE_OF_TRAINED
        begin_with(model, arguments.start)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights, {len(tokens):,} tokens")
    train(model, batches(tokens, arguments.context), 60 * arguments.minutes, peak)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    for name in COPIED:
        shutil.copy(arguments.tokenizer / name, arguments.output)


if __name__ == "__main__":
    main()
