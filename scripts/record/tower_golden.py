"""Record what llama.cpp's own converter makes of the vision towers of small models, with its --mmproj.

    python scripts/record/tower_golden.py LLAMA_CPP_SOURCE [NAME ...]

For each model below, or those named, tests/golden/towers/NAME.json, whose form is described in
tests/support/towers.py. Names and shapes of weights are those that transformers' class saves, config.json is
its own. Needs torch and transformers.

The source is a checkout of llama.cpp, or vendor/llama.cpp of the source distribution of llama-cpp-python.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTTYPES = {
    "auto": "GUESSED", "f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0",
}  # fmt: skip

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
}  # fmt: skip
GEMMA4_TEXT = {
    **TEXT, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0,
}  # fmt: skip
# Rows of 80 are no multiple of Q8_0's 32.
QWEN = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 80, "num_heads": 4, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 16, "patch_size": 16,
    "position_embedding_size": 32, "pooling_kernel_size": 3,
}  # fmt: skip
# llama.cpp computes 128 bands, which the first convolution has as many channels as.
AUDIO = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 32,
    "subsampling_conv_channels": [128, 4],
}  # fmt: skip

_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
QWEN_FILES = {"preprocessor_config.json": {**_HALF, "patch_size": 16, "merge_size": 2}}
# The file of the processor wins over that of the image processor.
GEMMA4_FILES = {
    "preprocessor_config.json": _HALF,
    "processor_config.json": {
        "image_processor": {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]},
    },
}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", {"text_config": {**TEXT, "rms_norm_eps": 1e-5}, "vision_config": {
        **QWEN, "deepstack_visual_indexes": [2, 0]}}, QWEN_FILES),
    "qwen3-vl-moe": ("Qwen3VLMoe", {"text_config": {**TEXT, **EXPERTS}, "vision_config": {
        **QWEN, "deepstack_visual_indexes": [1]}}, QWEN_FILES),
    "qwen3.5": ("Qwen3_5", {"text_config": {**TEXT, **DELTA_NET}, "vision_config": QWEN}, QWEN_FILES),
    "qwen3.5-moe": ("Qwen3_5Moe", {"text_config": {
        **TEXT, **DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32,
    }, "vision_config": QWEN}, QWEN_FILES),
    "qwen4-exp": ("Qwen4Exp", {"text_config": {
        **TEXT, **DELTA_NET, **EXPERTS, **QWEN4, "shared_expert_intermediate_size": 32,
    }, "vision_config": QWEN}, QWEN_FILES),
    "gemma-3": ("Gemma3", {"text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 4}, {
        "preprocessor_config.json": {**_HALF, "image_seq_length": 4}}),
    "gemma-4": ("Gemma4", {"text_config": GEMMA4_TEXT, "vision_config": {
        **GEMMA4, "standardize": True}, "audio_config": None}, GEMMA4_FILES),
    "gemma-4-e": ("Gemma4", {"text_config": GEMMA4_TEXT, "vision_config": {
        **GEMMA4, "use_clipped_linears": True}, "audio_config": AUDIO}, GEMMA4_FILES),
    "gemma-4-12b": ("Gemma4Unified", {"text_config": GEMMA4_TEXT, "vision_config": {
        "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 64, "mm_posemb_size": 6,
        "output_proj_dims": 64,
    }, "audio_config": {"audio_embed_dim": 640}}, GEMMA4_FILES),
}  # fmt: skip
"""Name -> class of transformers, its configuration, and the other files of the folder."""

KEPT_OF_TEXT = ("lm_head.weight", "embed_tokens.weight", "model.norm.weight")
"""Ends of names of weights of the text part that the checkpoints keep, for a converter to leave out."""


def checkpoint(name: str) -> dict[str, Any]:
    """Make the model in transformers; return its config.json, and names and shapes of its weights."""
    import transformers
    from safetensors import safe_open

    class_, settings, beside = MODELS[name]
    config = getattr(transformers, f"{class_}Config")(**settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        getattr(transformers, f"{class_}ForConditionalGeneration")(config).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", "numpy") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    del written["transformers_version"]
    weights = {
        # As published: transformers 5 leaves `vision_model` out, which llama.cpp's converter asks for.
        key.replace("vision_tower.", "vision_tower.vision_model.") if name == "gemma-3" else key: shape
        for key, shape in shapes.items()
        if not _is_text(key) or key.endswith(KEPT_OF_TEXT)
    }
    return {"config": written, "beside": beside, "weights": weights}


def _is_text(key: str) -> bool:
    return "language_model." in key or key.startswith(("lm_head.", "mtp."))


def convert(folder: Path, outfile: Path, outtype: str) -> None:
    """Run the converter on `folder` in this process."""
    import gguf
    import torch
    from conversion import get_model_class

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    with torch.inference_mode():
        get_model_class(name, mmproj=True)(folder, getattr(gguf.LlamaFileType, outtype), outfile).write()


def facts(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what is recorded of a file in F16."""
    import gguf

    reader = gguf.GGUFReader(path)
    yield (
        "keys",
        [
            [name, " ".join(kind.name for kind in field.types), field.contents()]
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        ],
    )
    yield "tensors", [
        [tensor.name, tensor.tensor_type.name, [int(n) for n in reversed(tensor.shape)],
         hashlib.sha256(tensor.data.tobytes()).hexdigest()[:12]]
        for tensor in reader.tensors
    ]  # fmt: skip
    yield (
        "softplus",
        {
            tensor.name: tensor.data.tolist()
            for tensor in reader.tensors
            if tensor.name.endswith("per_dim_scale.weight")
        },
    )


def record(name: str) -> dict[str, Any]:
    """Return all that is recorded of a model."""
    from tests.support.towers import write

    entry = checkpoint(name)
    sums = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write(entry, Path(temporary) / name)
        for outtype, number in OUTTYPES.items():
            outfile = Path(temporary) / f"{outtype}.gguf"
            convert(folder, outfile, number)
            sums[outtype] = hashlib.sha256(outfile.read_bytes()).hexdigest()
        entry |= dict(facts(Path(temporary) / "f16.gguf"))
    return {**entry, "sha256": sums}


def main() -> None:
    source, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    # The source has a package "tests" too, so ours is imported before the source is on the path.
    sys.path.insert(0, str(ROOT))
    from tests.support.towers import GOLDEN

    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        entry = record(name)
        parts = (f"{json.dumps(key)}: {_lines(value)}" for key, value in entry.items())
        (GOLDEN / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        print(f"{name}: {len(entry['tensors'])} tensors")


def _lines(value: Any) -> str:
    """Write an object or list with a line for each entry."""
    if isinstance(value, dict):
        entries = (f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
        return "{\n" + ",\n".join(entries) + "\n}"
    return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"


if __name__ == "__main__":
    main()
