"""Small DeepSeek checkpoints, in Hugging Face folders for tests to convert.

Weights come from two sources:

    micro_checkpoint         a formula on integers: the same bits everywhere, and no torch. The golden files
                             in tests/golden/convert were recorded from these checkpoints.
    transformers_checkpoint  random numbers, written by transformers' save_pretrained, for comparing with what
                             transformers computes

`shard`, `to_fp8`, `to_older_spelling`, `add_mtp_layer` and `edit_config` change a folder. All of these
functions return the folder. STYLES holds the configurations; keyword arguments override single keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]

DTYPE_NAMES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "uint32": "U32", "int8": "I8", "int16": "I16", "int32": "I32",
    "int64": "I64",
}  # fmt: skip
NUMPY_DTYPES: dict[str, Any] = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32,
    "I64": np.int64, "U32": np.uint32, "F64": np.float64,
}  # fmt: skip

_SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip

STYLES: dict[str, dict[str, Any]] = {
    "v3": _SIZES | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 56,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "v2": _SIZES | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 56,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0,
        "rope_parameters": _YARN, "max_position_embeddings": 2560,
    },
    "v2-lite": _SIZES | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "num_hidden_layers": 27, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN,
        "max_position_embeddings": 2560,
    },
}  # fmt: skip
"""Configurations by style: V3; V2 with q_lora; V2-Lite (no q_lora, as deep as llama.cpp wants it)."""

_INDEXER = {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 16}
INDEXED_STYLES: Mapping[str, dict[str, Any]] = {
    "v3.2": STYLES["v3"] | _INDEXER | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    },
    "glm-5": STYLES["v3"] | _INDEXER | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
"""Styles with an indexer, which transformers alone makes checkpoints of."""


# ---- folders


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write `tensors` as the format's specification says, with the data in the order of `tensors`."""
    header, parts, position = {}, [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [position, position + len(data)]
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        parts.append(data)
        position += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return path


def read_safetensors(path: Path) -> Tensors:
    """Return the tensors of one file, read in the obvious way: everything at once."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
                            NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }  # fmt: skip


def read_tensors(folder: Path) -> Tensors:
    """Return all stored tensors of a folder."""
    return {
        n: t for path in sorted(folder.glob("model*.safetensors")) for n, t in read_safetensors(path).items()
    }


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a folder with one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _remove_weights(folder)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any] | None = None, **changes: Any) -> Path:
    """Apply `edit` to the configuration, then set `changes`."""
    config = read_config(folder)
    if edit is not None:
        edit(config)
    (folder / "config.json").write_text(json.dumps(config | changes, indent=1))
    return folder


def edit_tensors(folder: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Apply `edit` to the tensors; the folder has one file afterwards."""
    tensors = read_tensors(folder)
    edit(tensors)
    return write_checkpoint(folder, read_config(folder), tensors)


def _remove_weights(folder: Path) -> None:
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


# ---- sources


def micro_checkpoint(folder: Path, style: str, *, dtype: Any = ml_dtypes.bfloat16, **overrides: Any) -> Path:
    """Write a checkpoint of `style` whose weights come from `formula`."""
    config = STYLES[style] | overrides
    tensors = {
        name: formula(shape, index).astype(np.float32 if name.endswith("e_score_correction_bias") else dtype)
        for index, (name, shape) in enumerate(shapes(config))
    }
    return write_checkpoint(folder, config, tensors)


def formula(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return float32 values in [-0.25, 0.25), plus 1 for a vector, computed from integers alone."""
    count = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed * 1_000_003)
    # Knuth's multiplicative hash, twice, on 32 bits.
    for _ in range(2):
        count = (count ^ (count >> np.uint64(15))) * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)
    values = (count >> np.uint64(8)).astype(np.float32) / np.float32(2**25) - np.float32(0.25)
    return (values + np.float32(len(shape) == 1)).reshape(shape)


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that a plain checkpoint of `config` holds."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from layer_shapes(config, layer)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def layer_shapes(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    prefix = f"model.layers.{layer}"
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    if config["q_lora_rank"] is None:
        yield f"{prefix}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield f"{prefix}.self_attn.q_a_proj.weight", (config["q_lora_rank"], hidden)
        yield f"{prefix}.self_attn.q_a_layernorm.weight", (config["q_lora_rank"],)
        yield f"{prefix}.self_attn.q_b_proj.weight", (heads * (nope + rope), config["q_lora_rank"])
    yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", (latent,)
    yield f"{prefix}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * value)
    if layer < config["first_k_dense_replace"]:
        yield from _mlp_shapes(f"{prefix}.mlp", config["intermediate_size"], hidden)
        return
    width, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    yield f"{prefix}.mlp.gate.weight", (experts, hidden)
    if config["model_type"] == "deepseek_v3":
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", width, hidden)
    yield from _mlp_shapes(f"{prefix}.mlp.shared_experts", width * config["n_shared_experts"], hidden)


def _mlp_shapes(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def transformers_checkpoint(
    folder: Path, style: str, *, seed: int = 0, dtype: str = "bfloat16", **overrides: Any
) -> Path:
    """Write a checkpoint of `style` as transformers saves it, all weights random (norms and biases too)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict({**STYLES, **INDEXED_STYLES}[style] | overrides)
    model_type = config.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # transformers drops what its configuration class doesn't know; V2's class doesn't know scoring_func.
    return edit_config(folder, lambda saved: [saved.setdefault(key, value) for key, value in config.items()])


def load_transformers(folder: Path) -> Any:
    """Return the model in `folder`, run by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# ---- what can be done to a folder


def shard(folder: Path, n_shards: int = 3) -> Path:
    """Deal the tensors out to `n_shards` files, like cards, and write an index."""
    tensors = read_tensors(folder)
    _remove_weights(folder)
    weight_map: dict[str, str] = {}
    for index in range(n_shards):
        name = f"model-{index + 1:05d}-of-{n_shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[index::n_shards]}
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    (folder / "model.safetensors.index.json").write_text(index_text)
    return folder


def to_older_spelling(folder: Path) -> Path:
    """Rewrite the configuration as before transformers 5, with rope_theta, and a rope_scaling with `type`."""

    def edit(config: dict[str, Any]) -> None:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        config.pop("head_dim", None)
        config.pop("qk_head_dim", None)

    return edit_config(folder, edit)


def to_fp8(folder: Path, block: tuple[int, int] = (128, 128)) -> Path:
    """Store every projection as DeepSeek's FP8; last blocks are ragged where `block` doesn't divide."""

    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
            tensors[name], tensors[name + "_scale_inv"] = quantize_fp8(
                tensors[name].astype(np.float32), block
            )

    edit_tensors(folder, edit)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block),
                    "activation_scheme": "dynamic"}  # fmt: skip
    return edit_config(folder, quantization_config=quantization)


def quantize_fp8(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return e4m3fn codes (n_rows, n_cols) and float32 scales, one per block, of a float32 matrix."""
    rows, cols = weight.shape
    codes = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty((-(-rows // block[0]), -(-cols // block[1])), np.float32)
    for i, j in np.ndindex(scales.shape):
        place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        scales[i, j] = np.abs(weight[place]).max() / np.float32(448)
        codes[place] = (weight[place] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales


def dequantize_fp8(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the float32 matrix, in the obvious way: the scales are blown up to the size of the codes."""
    grid = np.repeat(np.repeat(scales.astype(np.float32), block[0], axis=0), block[1], axis=1)
    return codes.astype(np.float32) * grid[: codes.shape[0], : codes.shape[1]]


def add_mtp_layer(folder: Path) -> Path:
    """Append a multi-token-prediction layer as DeepSeek-V3 stores it."""
    config = read_config(folder)
    layer, hidden, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    prefix = f"model.layers.{layer}"
    extra = [
        *layer_shapes(config, layer),
        (f"{prefix}.embed_tokens.weight", (vocab, hidden)),
        (f"{prefix}.enorm.weight", (hidden,)),
        (f"{prefix}.hnorm.weight", (hidden,)),
        (f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)),
        (f"{prefix}.shared_head.norm.weight", (hidden,)),
        (f"{prefix}.shared_head.head.weight", (vocab, hidden)),
    ]

    def edit(tensors: Tensors) -> None:
        dtype = tensors["model.embed_tokens.weight"].dtype
        for index, (name, shape) in enumerate(extra):
            tensors[name] = formula(shape, 7000 + index).astype(
                np.float32 if name.endswith("bias") else dtype
            )

    edit_tensors(folder, edit)
    return edit_config(folder, num_nextn_predict_layers=1)
