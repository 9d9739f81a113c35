"""The ways in which programs save a model: each makes of a small model another folder with the same model.

The numbers of a model are few bits long, so that types of floats and sums with one keep them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.end_to_end.config_fields.models import (
    BASES,
    config_of,
    model_of,
    persistent_buffers,
    write_config,
    write_weights,
)

Tensors = dict[str, Any]
"""Name -> tensor of torch."""

SHARD_BYTES = 150_000
STEP = 128
"""Inverse of the step of all numbers."""


@dataclass(frozen=True)
class Saved:
    """A model in its published layout.

    folder  with its files
    model   transformers' own, in float32
    """

    folder: Path
    model: Any

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def tensors(self) -> Tensors:
        from safetensors.torch import load_file

        return dict(load_file(self.folder / "model.safetensors"))


def saved(name: str, folder: Path) -> Saved:
    """Save the model `name` of BASES in a new folder."""
    import torch

    folder.mkdir(parents=True)
    base = BASES[name]
    write_config(folder, config_of(base))
    model = model_of(base.architecture, folder)
    with torch.no_grad():
        for _, tensor in (*model.named_parameters(), *persistent_buffers(model)):
            if tensor.is_floating_point():
                tensor.copy_((tensor * STEP).round().clamp(-2 * STEP, 2 * STEP) / STEP)
    write_weights(folder, model)
    return Saved(folder, model)


def write(folder: Path, tensors: Tensors, config: Mapping[str, Any], format_: str = "pt") -> None:
    """Write a folder with these tensors and this config.json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": format_})
    write_config(folder, config)


# ---- transformers


def _by_transformers(part: Callable[[Any], Any], **how: Any) -> Callable[[Saved, Path], None]:
    def make(model: Saved, folder: Path) -> None:
        part(model.model).save_pretrained(folder, **how)
        written = json.loads((folder / "config.json").read_text())
        write_config(folder, {**model.config, "architectures": written["architectures"]})

    return make


def _whole(model: Any) -> Any:
    return model


def _base(model: Any) -> Any:
    return model.base_model


def _renamed(rename: Callable[[str], str]) -> Callable[[Saved, Path], None]:
    def make(model: Saved, folder: Path) -> None:
        write(folder, {rename(name): tensor for name, tensor in model.tensors.items()}, model.config)

    return make


def _cast(dtype: str) -> Callable[[Saved, Path], None]:
    def make(model: Saved, folder: Path) -> None:
        import torch

        cast = {
            name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            for name, tensor in model.tensors.items()
        }
        write(folder, cast, model.config)

    return make


def _without_prefix(name: str) -> str:
    return name.removeprefix("model.").removeprefix("backbone.")


def _compiled_layers(name: str) -> str:
    return re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name)


# ---- files beside


def _copied(edit: Callable[[Path, Saved], None]) -> Callable[[Saved, Path], None]:
    def make(model: Saved, folder: Path) -> None:
        shutil.copytree(model.folder, folder)
        edit(folder, model)

    return make


def write_index(folder: Path, places: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(places)}))


def _stale_index(folder: Path, model: Saved) -> None:
    write_index(folder, dict.fromkeys(model.tensors, "model-00001-of-00001.safetensors"))


def _own_index(folder: Path, model: Saved) -> None:
    write_index(folder, dict.fromkeys(model.tensors, "model.safetensors"))


def _index_with_more(folder: Path, model: Saved) -> None:
    write_index(folder, dict.fromkeys([*model.tensors, "model.new.weight"], "model.safetensors"))


def _index_with_less(folder: Path, model: Saved) -> None:
    write_index(folder, dict.fromkeys(list(model.tensors)[1:], "model.safetensors"))


def _twice(folder: Path, model: Saved) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    _stale_index(folder, model)


def add_adapter(folder: Path, model: Saved | None = None) -> None:
    """Add the files of a LoRA adapter to a folder."""
    import torch
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/base", "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(2, 4)}, folder / "adapter_model.safetensors")


def _adapter_alone(folder: Path, model: Saved) -> None:
    add_adapter(folder)
    (folder / "model.safetensors").unlink()


def _adapter_without_config(folder: Path, model: Saved) -> None:
    _adapter_alone(folder, model)
    (folder / "config.json").unlink()


def _adapter_inside(model: Saved, folder: Path) -> None:
    import torch

    added = {"model.layers.0.self_attn.o_proj.lora_A.default.weight": torch.zeros(2, 4)}
    write(folder, {**model.tensors, **added}, model.config)


def _rotated(model: Saved, folder: Path) -> None:
    settings = {"quant_method": "auto-round", "bits": 4, "hadamard_config": {"block_size": 32}}
    write(folder, model.tensors, {**model.config, "quantization_config": settings})


# ---- MLX

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_PLUS_ONE = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
_VISION = ("vision", "visual", "projector", "audio")


def _stack_experts(tensors: Tensors) -> Tensors:
    import torch

    stacks: dict[str, dict[int, Any]] = {}
    made: Tensors = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            made[name] = tensor
            continue
        part = _PARTS.get(match[3], match[3])
        if ".mixer." in name:
            part = {"up_proj": "fc1", "down_proj": "fc2"}[part]
        stacks.setdefault(f"{match[1]}.switch_mlp.{part}.weight", {})[int(match[2])] = tensor
    return made | {
        name: torch.stack([stack[number] for number in sorted(stack)]) for name, stack in stacks.items()
    }


_STACKS = (
    (".input_linear.weight", ".output_linear.weight", "switch_mlp"),
    (".experts.gate_up_proj", ".experts.down_proj", "experts.switch_glu"),
)
"""Stacks of Granite and of Gemma 4 -> where MLX has them."""


def _split_stacks(name: str, tensor: Any) -> Tensors:
    """Return what becomes of gate and up that are stored as one."""
    if tensor.dim() != 3:
        return {name: tensor}
    for both, down, place in _STACKS:
        if name.endswith(both):
            stem = f"{name.removesuffix(both)}.{place}"
            gate, up = tensor.chunk(2, 1)
            return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        if name.endswith(down):
            return {f"{name.removesuffix(down)}.{place}.down_proj.weight": tensor}
    return {name: tensor}


def _split_shared(name: str, tensor: Any) -> Tensors:
    if name.endswith(".shared_mlp.input_linear.weight"):
        stem = name.removesuffix("shared_mlp.input_linear.weight")
        parts = zip(("gate", "up"), tensor.chunk(2, 0), strict=True)
        return {f"{stem}mlp.{part}_proj.weight": half for part, half in parts}
    return {name.replace(".shared_mlp.output_linear.", ".mlp.down_proj."): tensor}


def _split_heads(name: str, tensor: Any, config: Mapping[str, Any]) -> Tensors:
    if not name.endswith(".kv_b_proj.weight"):
        return {name: tensor}
    stem, n_keys = name.removesuffix("kv_b_proj.weight"), config["qk_nope_head_dim"]
    heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[-1])
    return {f"{stem}embed_q.weight": heads[:, :n_keys].mT, f"{stem}unembed_out.weight": heads[:, n_keys:]}


def mlx_tensors(model: Saved) -> Tensors:
    """Return a model's tensors as mlx-lm 0.32 has them after its own `sanitize`."""
    config = model.config
    text = {**config, **(config.get("text_config") or {})}
    architecture = config["architectures"][0]
    tensors = _stack_experts(
        {name: tensor for name, tensor in model.tensors.items() if not any(part in name for part in _VISION)}
    )
    adds_one = architecture.startswith(("Qwen3Next", "Qwen3_5"))
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.movedim(2, 1)
        elif adds_one and name.endswith(_PLUS_ONE):
            tensor = tensor + 1
        parts = _split_stacks(name, tensor)
        if architecture.startswith("GraniteMoeHybrid") and not text.get("num_local_experts"):
            parts = _split_shared(name, tensor)
        if "q_lora_rank" in text and not architecture.startswith("DeepseekV2"):
            parts = _split_heads(name, tensor, text)
        made |= parts
    if "text_config" in config:
        made = {name.replace("model.language_model.", "language_model.model."): t for name, t in made.items()}
        made = {re.sub(r"^lm_head\.", "language_model.lm_head.", name): t for name, t in made.items()}
    return made


def _mlx(model: Saved, folder: Path) -> None:
    write(folder, mlx_tensors(model), model.config, "mlx")


def mlx_quantized(weight: Any, bits: int, group_size: int) -> tuple[Tensors, Any]:
    """Quantize a matrix, or a stack, as MLX's mode affine: what is stored by suffix, and what it means."""
    import torch

    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    low = groups.amin(-1, keepdim=True).half()
    scales = ((groups.amax(-1, keepdim=True) - low.float()) / (2**bits - 1)).clamp_min(2**-10).half()
    codes = ((groups - low.float()) / scales.float()).round().clamp(0, 2**bits - 1)
    meaning = (codes * scales.float() + low.float()).reshape(weight.shape)
    flat = codes.reshape(-1, weight.shape[-1]).to(torch.uint8).numpy()
    stream = np.unpackbits(flat[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    words = np.packbits(stream.reshape(len(flat), -1), axis=1, bitorder="little").view(np.uint32)
    packed = torch.from_numpy(words.view(np.int32).copy()).view(torch.uint32)
    packed = packed.reshape(*weight.shape[:-1], -1)
    return {".weight": packed, ".scales": scales[..., 0], ".biases": low[..., 0]}, meaning


def mlx_pair(model: Saved, folder: Path, decoded: Path, bits: int, group_size: int) -> None:
    """Write a model as MLX quantizes it, and what its weights mean in `decoded`.

    Every third matrix has 8 bits in groups of 32 instead.
    """
    stored: Tensors = {}
    plain: Tensors = {}
    settings: dict[str, Any] = {"bits": bits, "group_size": group_size, "mode": "affine"}
    for number, (name, tensor) in enumerate(mlx_tensors(model).items()):
        module = name.removesuffix(".weight")
        own = {"bits": 8, "group_size": 32} if number % 3 == 0 else settings
        is_matrix = module != name and tensor.dim() > 1 and "conv1d" not in name
        if not is_matrix or tensor.shape[-1] % own["group_size"]:
            stored[name] = plain[name] = tensor
            continue
        parts, plain[name] = mlx_quantized(tensor, own["bits"], own["group_size"])
        stored |= {module + suffix: part for suffix, part in parts.items()}
        if own is not settings:
            settings[module] = own
    said = {"quantization": settings, "quantization_config": settings}
    write(folder, stored, {**model.config, **said}, "mlx")
    write(decoded, plain, model.config, "mlx")


# ---- Unsloth


def _unsloth(model: Saved, folder: Path) -> None:
    made: Tensors = {}
    for name, tensor in model.tensors.items():
        head, _, last = name.rpartition(".")
        if not head.endswith(".experts"):
            made[name.replace(".router.", ".router.linear.")] = tensor
            continue
        part, end = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
        for number, own in enumerate(tensor):
            made[f"{head}.{part}s.{number}.{end}"] = own if end == "bias" else own.T
    write(folder, made, model.config)


@dataclass(frozen=True)
class Layout:
    """A way to save a model.

    make     saves it
    says     what a refusal or a note has to say; "" where there has to be none
    refused  whether it can't be converted
    headless whether the output matrix may be missing
    only     beginning of the architectures that are saved so, "" for all
    """

    make: Callable[[Saved, Path], None]
    says: str = ""
    refused: bool = False
    headless: bool = False
    only: tuple[str, ...] = ("",)


_NO_HEAD = "no lm_head.weight"
_MLX_HAS = (
    "Deepseek", "Glm", "Gemma", "Granite", "Llama", "Mi", "Nemotron", "Olmo", "Phi", "Qwen", "SeedOss",
    "SmolLM",
)  # fmt: skip

LAYOUTS: Mapping[str, Layout] = {
    "float16": Layout(_cast("float16")),
    "bfloat16": Layout(_cast("bfloat16")),
    "float64": Layout(_cast("float64")),
    "transformers 5": Layout(_by_transformers(_whole, save_original_format=False)),
    "shards": Layout(_by_transformers(_whole, max_shard_size=SHARD_BYTES)),
    "shards, transformers 5": Layout(
        _by_transformers(_whole, max_shard_size=SHARD_BYTES, save_original_format=False)
    ),
    "base class": Layout(_by_transformers(_base), headless=True, says=_NO_HEAD),
    "base class, transformers 5": Layout(
        _by_transformers(_base, save_original_format=False), headless=True, says=_NO_HEAD
    ),
    "without prefix": Layout(_renamed(_without_prefix)),
    "PEFT": Layout(_renamed(lambda name: f"base_model.model.{name}")),
    "PEFT, merged in place": Layout(
        _renamed(lambda name: f"base_model.model.{name.replace('o_proj.', 'o_proj.base_layer.')}")
    ),
    "DDP": Layout(_renamed(lambda name: f"module.{name}")),
    "compiled": Layout(_renamed(lambda name: f"_orig_mod.{name}")),
    "compiled layers": Layout(_renamed(_compiled_layers)),
    "FSDP, compiled": Layout(_renamed(lambda name: f"_orig_mod._fsdp_wrapped_module.{name}")),
    "Lightning": Layout(_renamed(lambda name: f"model.{name}")),
    "MLX": Layout(_mlx, only=_MLX_HAS),
    "Unsloth": Layout(_unsloth, only=("GptOss",)),
    "own index": Layout(_copied(_own_index)),
    "stale index": Layout(_copied(_stale_index), says="names none of the files"),
    "index with more": Layout(_copied(_index_with_more), says=r"new\.weight: not in this", refused=True),
    "index with less": Layout(_copied(_index_with_less), says=r"not in model\.safetensors\.in", refused=True),
    "stored twice": Layout(_copied(_twice), says="remove one of them", refused=True),
    "adapter beside": Layout(_copied(add_adapter), says="adapter is not used"),
    "adapter alone": Layout(_copied(_adapter_alone), says="LoRA adapter of someone/base", refused=True),
    "adapter without config": Layout(
        _copied(_adapter_without_config), says="LoRA adapter of someone/base", refused=True
    ),
    "adapter inside": Layout(_adapter_inside, says="part of an adapter", refused=True),
    "rotation": Layout(_rotated, says="rotates", refused=True),
}  # fmt: skip


def layouts_of(name: str) -> dict[str, Layout]:
    """Return the layouts that the model `name` of BASES is saved in."""
    architecture = BASES[name].architecture
    return {
        layout: each
        for layout, each in LAYOUTS.items()
        if architecture.startswith(each.only) and (architecture, layout) not in _NOT_SAVED
    }


_NOT_SAVED = {
    ("DeepseekV4ForCausalLM", layout) for layout in ("MLX", "base class", "base class, transformers 5")
}
"""transformers' base class of V4 lacks the output matrix, which llama.cpp demands; MLX has no such class."""
