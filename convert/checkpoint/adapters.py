"""Adapters of PEFT: folders with weights to be added to those of another model."""

from __future__ import annotations

from pathlib import Path

from convert.checkpoint.json_files import read_json_object
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import shown

CONFIG_NAME = "adapter_config.json"

_FILES = (CONFIG_NAME, "adapter_model.safetensors", "adapter_model.bin")

NOT_USED = (
    f"{CONFIG_NAME} is here, but the adapter is not used: the file holds the model without it (PEFT's"
    " merge_and_unload makes one model of both)"
)

TENSORS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_magnitude_vector", ".modules_to_save.")
"""Parts of the names of weights that an adapter adds to a model, and merging takes away."""


def adapter_of(folder: Path) -> str | None:
    """Return words for the adapter in a folder, None if there is none; BadConfig for no JSON object."""
    path = folder / CONFIG_NAME
    if not path.exists():
        return None
    content = read_json_object(path)
    kind, base = content.get("peft_type"), content.get("base_model_name_or_path")
    name = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({shown(str(kind))})"
    return f"{name} of {shown(str(base)) if base else 'a model that it does not name'}"


def refuse_adapter(folder: Path) -> None:
    """Raise UnsupportedCheckpoint for a folder that has an adapter, itself or one folder below: no model."""
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        file = next((name for name in _FILES if (place / name).exists()), None)
        if file is not None:
            adapter = adapter_of(place) or "an adapter (LoRA or another) of a model that nothing names"
            raise UnsupportedCheckpoint(
                f"{place}: {adapter} ({file}): merge it into that model first (PEFT: merge_and_unload), then"
                " convert"
            )
