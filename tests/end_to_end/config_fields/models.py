"""A small model of each family, whose weights follow from their names and shapes alone.

So a model of a changed configuration has the same weights, as far as names and shapes are the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tests.support.decoder_models import GOLDEN, MODELS, OUR_MODELS, SHALLOW_GEMMA3N, sample_deviation
from tests.support.published_mixtures import MIXTURES

N_VOCAB = 576
CONTEXT = 128
"""max_position_embeddings: less than there are tokens."""

TOKENS = [int(token) for token in np.random.RandomState(7).randint(3, N_VOCAB - 10, 144)]
"""Longer than every window and context that a mutation gives a model."""

SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_EXPERTS, "rms_norm_eps": 1e-6, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_INDEXED: dict[str, Any] = {**_LATENT, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 32}
_V4: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"}, **_EXPERTS,
    "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 64,
    "index_topk": 512, "sliding_window": 128, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 4, 128], "num_hash_layers": 1,
    "rope_theta": 10000, "compress_rope_theta": 160000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "swiglu_limit": 10.0, "model_type": "deepseek_v4",
    "attention_bias": False,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32,
                     "beta_slow": 1},
}  # fmt: skip
"""As published: llama.cpp wants such wide heads, and the class in transformers writes other fields."""

_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 14, "image_size": 56,
}  # fmt: skip
_QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 16, "num_position_embeddings": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A model that fields are changed in.

    architecture  its class in transformers, as config.json names it
    config        arguments of the class of its configuration
    wrapped       whether config.json has the text part's fields in text_config
    as_is         whether config.json is `config`, and not what transformers writes of it
    """

    architecture: str
    config: Mapping[str, Any]
    wrapped: bool = False
    as_is: bool = False


_STATED = {"mixtral": {"head_dim": 16}}
"""What transformers needs for some rotations: it multiplies head_dim, be it null."""


_UNSTRETCHED = {"rope_type": "default", "rope_theta": 1e4}
"""The rotation of Phi-3.5-MoE: of longrope, transformers takes the factors for short texts at any length."""


def _recorded(name: str) -> dict[str, Any]:
    return {
        **SIZES,
        **{**MODELS, **OUR_MODELS}[name][1],
        **_STATED.get(name, {}),
        "max_position_embeddings": CONTEXT,
    }


def _beside(name: str, **others: Any) -> Base:
    """Return a model whose class has a vision part."""
    kind, vision = MODELS[name][0], {"vision_config": MODELS[name][1]["vision_config"]}
    text = {key: value for key, value in _recorded(name).items() if key != "vision_config"}
    return Base(f"{kind}ForConditionalGeneration", {"text_config": text, **vision, **others}, wrapped=True)


def _published_step() -> dict[str, Any]:
    """Return config.json of a Step 3.7 as it is published; transformers has as many keys in all layers."""
    model = MIXTURES["step-3.7"]
    other = {**model.config["attention_other_setting"]}
    del other["num_attention_groups"]
    text = {**model.config, "attention_other_setting": other, "max_position_embeddings": CONTEXT}
    return {
        **(model.around or {}),
        "text_config": text,
        "vision_config": MODELS["step3.7"][1]["vision_config"],
    }


def _text(name: str, model_type: str, **others: Any) -> dict[str, Any]:
    return {"text_config": {**_recorded(name), "model_type": model_type}, **others}


_RECORDED = (
    "smollm3", "mistral", "mixtral", "qwen2-tied", "qwen3", "qwen3moe", "glm4moe-normed", "gpt-oss",
    "minimax-m2", "seed-oss", "olmo2", "olmo3", "granite", "granitemoe", "granitemoeshared", "granite4",
    "granite4-h", "nemotron-h", "nemotron-3", "phi4", "ministral3", "gemma3", "gemma4", "gemma4-experts",
    "gemma4-small", "qwen3next", "qwen35", "qwen35moe", "qwen2moe", "olmoe", "hunyuan", "hunyuanmoe",
    "hy-v3", "solar-open", "glm4", "exaone4", "ernie4.5", "ernie4.5-moe", "gemma2", "laguna", "mimo-v2-flash",
    "cohere2", "cohere2moe", "lfm2", "lfm2moe", "falcon-h1", "falcon-h1-normed",
    "kimi-linear", "ling3-groups", "minimax-m3", "starcoder2", "qwen4exp", "exaone-moe", "apertus",
    "llama4", "nemotron-3-super",
)  # fmt: skip
"""Models of tests/support/decoder_models.py that are bases: one of each way to be built."""

BASES: Mapping[str, Base] = {
    **{name: Base(f"{MODELS[name][0]}ForCausalLM", _recorded(name)) for name in _RECORDED},
    "llama": Base("LlamaForCausalLM", SIZES),
    "deepseek2": Base("DeepseekV2ForCausalLM", {**SIZES, **_LATENT, "first_k_dense_replace": 1}),
    "deepseek3": Base("DeepseekV3ForCausalLM", {**SIZES, **_LATENT, "first_k_dense_replace": 1}),
    "youtu": Base("YoutuForCausalLM", {**SIZES, **_LATENT}),
    "deepseek32": Base("DeepseekV32ForCausalLM", {**SIZES, **_INDEXED, "first_k_dense_replace": 1}),
    "glm-dsa": Base("GlmMoeDsaForCausalLM", {**SIZES, **_INDEXED, "first_k_dense_replace": 1}),
    "glm4-lite": Base(
        "Glm4MoeLiteForCausalLM", {**SIZES, **_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    ),
    "deepseek4": Base("DeepseekV4ForCausalLM", _V4, as_is=True),
    "gemma3-wrapped": Base(
        "Gemma3ForConditionalGeneration",
        _text("gemma3", "gemma3_text", vision_config=_VISION, mm_tokens_per_image=4, image_token_index=570,
              boi_token_index=571, eoi_token_index=572),
        wrapped=True,
    ),
    "gemma3n": Base("Gemma3nForCausalLM", {**_recorded("gemma3n"), **SHALLOW_GEMMA3N}),
    "gemma4-wrapped": Base(
        "Gemma4ForConditionalGeneration",
        _text("gemma4", "gemma4_text", vision_config=None, audio_config=None, image_token_id=570,
              boi_token_id=571, eoi_token_id=572, audio_token_id=573),
        wrapped=True,
    ),
    "gemma4-unified": Base(
        "Gemma4UnifiedForConditionalGeneration",
        _text("gemma4", "gemma4_unified_text", vision_config=None, audio_config=None, image_token_id=570,
              boi_token_id=571, eoi_token_id=572, audio_token_id=573),
        wrapped=True,
    ),
    "qwen35-wrapped": Base(
        "Qwen3_5ForConditionalGeneration",
        _text("qwen35", "qwen3_5_text", vision_config=_QWEN_VISION, tie_word_embeddings=False),
        wrapped=True,
    ),
    "qwen35moe-wrapped": Base(
        "Qwen3_5MoeForConditionalGeneration",
        _text("qwen35moe", "qwen3_5_moe_text", vision_config=_QWEN_VISION, tie_word_embeddings=False),
        wrapped=True,
    ),
    **{
        name: _beside(name, tie_word_embeddings=False)
        for name in ("qwen2vl", "qwen2.5vl", "qwen3vl", "qwen3vlmoe", "glm4v", "glm5-next", "step3.7")
    },
    "step3.7-published": Base(
        "Step3p7ForConditionalGeneration", _published_step(), wrapped=True, as_is=True
    ),
    "qwen4exp-wrapped": Base(
        "Qwen4ExpForConditionalGeneration",
        _text("qwen4exp", "qwen4_exp_text", vision_config=_QWEN_VISION, tie_word_embeddings=False),
        wrapped=True,
    ),
    "phimoe": Base("PhimoeForCausalLM", {**_recorded("phimoe"), "rope_parameters": _UNSTRETCHED}),
    "muse-glimmer": _beside("muse-glimmer", out_hidden_size=32, projector_hidden_size=32),
    "mistral3-wrapped": Base(
        "Mistral3ForConditionalGeneration",
        _text("ministral3", "ministral3", tie_word_embeddings=False,
              vision_config={**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 28}),
        wrapped=True,
    ),
}  # fmt: skip
"""Name -> the model. Every family that has a class in transformers is here at least once."""


def model_class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)


def config_of(base: Base) -> dict[str, Any]:
    """Return config.json of a base, as transformers writes it where the class keeps to the fields."""
    if base.as_is:
        return {**base.config, "architectures": [base.architecture]}
    config = model_class(base.architecture).config_class(**json.loads(json.dumps(dict(base.config))))
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [base.architecture]}


def model_of(architecture: str, folder: Path) -> Any:
    """Return the model that transformers makes of config.json, in float32; raises whatever it raises."""
    import torch

    kind = model_class(architecture)
    config = kind.config_class.from_pretrained(folder)
    config._attn_implementation = "eager"
    if n_parameters(kind, config) > 5_000_000:
        raise ValueError("too large to try")
    model = kind(config).float().eval()
    if architecture == "PhimoeForCausalLM":
        _as_llama_has_phimoe(model)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
            fill(name, tensor)
    return model


def _as_llama_has_phimoe(model: Any) -> None:
    """Have a Phi-3.5-MoE compute what llama.cpp does: norms take no mean, and weights add up to one."""
    import torch
    from torch.nn import functional

    def norm(module: Any, x: Any) -> Any:
        return functional.rms_norm(x, module.normalized_shape, module.weight, module.eps) + module.bias

    def route(module: Any, x: Any) -> Any:
        logits = functional.linear(x, module.weight)
        best, which = logits.softmax(-1).topk(module.top_k)
        return logits, best / best.sum(-1, keepdim=True), which

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.forward = partial(norm, module)
        elif type(module).__name__ == "PhimoeTopKRouter":
            module.forward = partial(route, module)


def n_parameters(kind: Any, config: Any) -> int:
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(config).parameters())


def persistent_buffers(model: Any) -> list[tuple[str, Any]]:
    stored = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def fill(name: str, tensor: Any) -> None:
    """Give a weight the values that follow from its name and shape."""
    import torch

    draw = torch.Generator().manual_seed(crc32(name.encode()))
    if not tensor.is_floating_point():
        if name.endswith("tid2eid"):
            tensor.random_(0, 8, generator=draw)
    elif "bias" in name:
        tensor.normal_(0, 0.3, generator=draw)
    elif name.endswith("A_log"):
        tensor.uniform_(-1, 0.5, generator=draw)
    elif tensor.dim() > 1 or "sinks" in name:
        tensor.normal_(0, 0.12, generator=draw)
    else:
        tensor.copy_(tensor.mean() + 0.2 * torch.randn(tensor.shape, generator=draw))


def logits_of(model: Any) -> np.ndarray:
    """Return transformers' logits of TOKENS, float32 (n_tokens, n_vocab)."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([TOKENS]), use_cache=False).logits[0].float().numpy()


def write_config(folder: Path, raw: Mapping[str, Any]) -> None:
    """Write config.json, and a tokenizer beside it."""
    (folder / "config.json").write_text(json.dumps(raw))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "gpt-oss" / file, folder / file)


def write_weights(folder: Path, model: Any) -> None:
    """Save a model's weights beside the config.json that is there."""
    config = (folder / "config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(config)


@contextmanager
def as_in_llama_cpp() -> Iterator[None]:
    """Have torch look GELU up as llama.cpp does, in a table of float16, and take its deviations."""
    import torch

    exact, deviation = torch.nn.functional.gelu, torch.std
    torch.nn.functional.gelu = lambda x, **how: exact(x.half().float(), **how).half().float()
    torch.std = sample_deviation
    try:
        yield
    finally:
        torch.nn.functional.gelu, torch.std = exact, deviation
