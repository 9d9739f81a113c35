"""Record llama-quantize's plans for models of newer families, and for padded ones, at published sizes.

    python scripts/record/any_plan_golden.py LLAMA_QUANTIZE [NAME ...]

Writes tests/golden/plans-any/NAME.json.xz (see the README there). The tensors are those that our converter
makes of a folder with a hole where the weights would be, and llama-quantize plans for a header in front of
another hole, so that neither takes memory or space. Sizes are those of the published models. Padded models
are those whose plans are there already, with zeros behind their inner sizes, or behind the hidden size too.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from convert.options import ConvertOptions  # noqa: E402
from convert.pipeline import plan_run  # noqa: E402
from gguf_tools import GGUFFile, open_gguf  # noqa: E402
from gguf_tools.format.shards import FileLayout  # noqa: E402
from gguf_tools.format.values import Value  # noqa: E402
from quantize.padding.counterparts import whole_padding  # noqa: E402
from quantize.plan.recipes import RECIPES  # noqa: E402
from tests.quantize.plan.odd_models import odd_model  # noqa: E402
from tests.support.published_models import PUBLISHED, write  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "plans-any"
MATRIX = ROOT / "tests" / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"

_NET: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "head_dim": 256, "num_attention_heads": 16, "vocab_size": 248320,
    "layer_types": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "hidden_size": 2048, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {"head_dim": 256, "global_head_dim": 512, "vocab_size": 262144}
_NEMOTRON: dict[str, Any] = {"head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "vocab_size": 131072}
_WINDOWS = [*["sliding_attention"] * 5, "full_attention"]
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-9b": ("qwen3.5", {
        **_NET, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    }),
    "qwen3.5-35b-a3b": ("qwen3.5-moe", {
        **_NET, **_EXPERTS, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    }),
    "qwen3-next-80b-a3b": ("qwen3-next", {
        **_NET, **_EXPERTS, "vocab_size": 151936, "num_hidden_layers": 48, "num_experts": 512,
        "num_experts_per_tok": 10, "intermediate_size": 5632,
    }),
    "gemma-4-31b": ("gemma-4", {
        **_GEMMA4, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
        "layer_types": _WINDOWS * 10,
    }),
    "gemma-4-26b-a4b": ("gemma-4-moe", {
        **_GEMMA4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "layer_types": _WINDOWS * 5, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    }),
    "gemma-4-e4b": ("gemma-4-e", {
        **_GEMMA4, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
        "num_attention_heads": 8, "num_key_value_heads": 2, "layer_types": _WINDOWS * 7,
        "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256, "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    }),
    "ministral-3-8b": ("ministral-3", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": False,
    }),
    "seed-oss-36b": ("seed-oss", {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136,
    }),
    "olmo-3-32b": ("olmo-3", {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 100278, "layer_types": None,
    }),
    "phi-4": ("phi-4", {
        "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 10, "vocab_size": 100352,
    }),
    "smollm3-3b": ("smollm3", {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 128256,
    }),
    "granite-3.3-8b": ("granite-3", {
        "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 49159,
    }),
    "granite-3.1-3b-a800m": ("granite-3-moe", {
        "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 49155, "num_local_experts": 40, "num_experts_per_tok": 8,
    }),
    "granite-4-h-small": ("granite-4-h", {
        "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 100352, "num_local_experts": 72, "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    }),
    "nemotron-3-nano-30b-a3b": ("nemotron-3-nano", {
        **_NEMOTRON, "hidden_size": 2688, "num_hidden_layers": 52, "num_key_value_heads": 2,
        "num_attention_heads": 32, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    }),
    "nemotron-3-super": ("nemotron-3-super", {
        **_NEMOTRON, "hidden_size": 4096, "num_hidden_layers": 88, "num_key_value_heads": 2,
        "num_attention_heads": 32, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_routed_experts": 512,
        "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024, "hybrid_override_pattern": "MEMEMEM*EME" * 8,
    }),
    "nemotron-nano-9b-v2": ("nemotron-h", {
        **_NEMOTRON, "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56,
        "num_attention_heads": 40, "num_key_value_heads": 8, "mamba_num_heads": 128, "mamba_head_dim": 80,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    }),
}  # fmt: skip
"""Name -> the small model that it is a larger one of, and its sizes."""

PADDED: Mapping[str, tuple[str, bool]] = {
    "deepseek-v2-lite-padded": ("v2-lite", False),
    "glm-4.5-air-padded": ("glm-4.5-air", False),
    "gpt-oss-20b-padded": ("gpt-oss-20b", True),
    "qwen2.5-72b-padded": ("qwen2.5-72b", False),
}
"""Name -> the model, and whether its hidden size is padded."""

_LINE = re.compile(r"^\[ *\d+/ *\d+\] (\S+) .*, type = +(\w+), size =[^(\n]*(?:\((\w+)\))?", re.MULTILINE)
_TOTAL = re.compile(r"quant size *= *([\d.]+) MiB \(([\d.]+) BPW\)")


def folder_of(name: str, folder: Path) -> Path:
    """Write the model's folder with a hole for its weights."""
    small, sizes = MODELS[name]
    model = PUBLISHED[small]
    config = {key: value for key, value in {**model.config, **sizes}.items() if value is not None}
    write(small, folder)
    whole = config if model.around is None else {**model.around, "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    header: dict[str, Any] = {}
    end = 0
    for tensor, shape in model.shapes({**model.config, **sizes}):
        stored = model.prefix + tensor
        if model.around is not None and not model.prefix:
            stored = tensor.replace("model.", "model.language_model.")
        start, end = end, end + 2 * prod(shape)
        header[stored] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def record(llama_quantize: str, name: str) -> dict[str, Any]:
    """Plan a model for every file type, with and without importances."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder_of(name, Path(temporary) / "model")
        with plan_run(folder, Path(temporary) / "out.gguf", ConvertOptions(outtype="bf16")) as run:
            layout = run.preparation.outputs[0].layout
        return plans_for(llama_quantize, layout, Path(temporary))


def record_padded(llama_quantize: str, name: str) -> dict[str, Any]:
    """Plan a padded model for every file type, with and without importances."""
    original, hidden = PADDED[name]
    metadata, tensors = odd_model(original)
    padding = whole_padding(metadata, tensors, hidden=hidden)
    no_tokens = {"tokenizer.ggml.model": Value.string("none")}
    layout = FileLayout.of({**padding.metadata(metadata), **no_tokens}, padding.infos(tensors))
    with tempfile.TemporaryDirectory() as temporary:
        return plans_for(llama_quantize, layout, Path(temporary))


def plans_for(llama_quantize: str, layout: FileLayout, folder: Path) -> dict[str, Any]:
    """Plan a file for every file type, with and without importances."""
    header = folder / "header.gguf"
    with open(header, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.total_bytes)
    plans = {}
    command = [llama_quantize, "--dry-run", "--allow-requantize"]
    for recipe in RECIPES:
        for suffix, words in (("", []), ("+imatrix", ["--imatrix", str(MATRIX)])):
            if recipe != "COPY":
                plans[recipe + suffix] = _plan([*command, *words, str(header), recipe])
    with open_gguf(header) as gguf:
        return {**_about(gguf), "plans": plans}


def _about(file: GGUFFile) -> dict[str, Any]:
    """Return the architecture, its keys and the tensors of a file."""
    architecture = file.metadata["general.architecture"].plain
    keys = {key: value.plain for key, value in file.metadata.items() if key.startswith(f"{architecture}.")}
    tensors = [
        {"name": name, "shape": list(info.shape), "type": info.type.name}
        for name, info in file.tensors.items()
    ]
    return {"architecture": architecture, "metadata": keys, "tensors": tensors}


def _plan(command: list[str]) -> dict[str, Any]:
    run = subprocess.run(command, capture_output=True, text=True)
    text = run.stdout + run.stderr
    if run.returncode and "no tensor type fallback is defined" in text:
        return {"refused": "no fallback type is defined"}
    run.check_returncode()
    total = _TOTAL.search(text)
    if total is None:
        raise SystemExit(f"{' '.join(command)}: the dry run tells no size")
    types = {name: (new or old).upper() for name, old, new in _LINE.findall(text)}
    return {"total_mib": float(total[1]), "bpw": float(total[2]), "types": types}


if __name__ == "__main__":
    for each in sys.argv[2:] or (*MODELS, *PADDED):
        content = (record_padded if each in PADDED else record)(sys.argv[1], each)
        (GOLDEN / f"{each}.json.xz").write_bytes(lzma.compress(json.dumps(content).encode()))
