"""Small random models of DeepSeek V4, in the published form but for FP8 and FP4, with a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.deepseek4 import V4Config
from tests.convert.architectures.deepseek4_weights import weights_of
from tests.support.checkpoints import Tensors, write_checkpoint

TOKENIZER = Path(__file__).parents[2] / "golden" / "arch" / "models" / "deepseek-v3.2"

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
    "vocab_size": 576, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 16,
    "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "sliding_window": 12, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "compress_rope_theta": 160000, "compress_ratios": [4, 128, 0],
    "max_position_embeddings": 4096, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_hash_layers": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 1.5, "index_n_heads": 16, "index_head_dim": 32,
    "index_topk": 6, "hc_mult": 4, "hc_sinkhorn_iters": 4, "hc_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 556,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "beta_fast": 32,
                     "beta_slow": 1},
}  # fmt: skip
"""A layer that chooses among windows of 4, one with windows of 128, and one that has the last positions
alone; the first one goes by the ids of tokens. With fewer heads some windows would have the same score, 0."""

LIKE_LLAMA: dict[str, Any] = {
    "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128, "index_head_dim": 128, "index_topk": 512,
}  # fmt: skip
"""Sizes that llama.cpp computes: heads as wide as in the published models, and more choices than windows."""


def v4_model(folder: Path, **changes: Any) -> Path:
    """Write a model of CONFIG with some changes; return its folder."""
    raw = CONFIG | changes
    write_checkpoint(folder, raw, random_tensors(V4Config.from_dict(raw)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def random_tensors(config: V4Config) -> Tensors:
    """Return all weights in F32, large enough that every part of the model shows in its predictions."""
    rng, stored = np.random.default_rng(3), Tensors()
    for name, shape in weights_of(config):
        stored[name] = _random(name, shape, config, rng)
    return stored


def _random(name: str, shape: tuple[int, ...], config: V4Config, rng: np.random.Generator) -> np.ndarray:
    if name.endswith("tid2eid"):
        rows = [rng.permutation(config.n_routed_experts)[: shape[1]] for _ in range(shape[0])]
        return np.array(rows, np.int64)
    values = rng.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return values if name.endswith("ape") else values * np.float32(1.3 / np.sqrt(shape[-1]))
    if "norm" in name:
        return 1 + np.float32(0.2) * values
    # A large bias would always choose the same experts.
    return np.float32(0.1 if name.endswith("bias") else 0.7) * values
