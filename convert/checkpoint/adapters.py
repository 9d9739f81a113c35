"""Adapters of PEFT: folders with weights to be added to those of another model."""

from __future__ import annotations

from pathlib import Path

from convert.checkpoint.json_files import read_json_object
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import shown

CONFIG_NAME = "adapter_config.json"

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
    """Raise UnsupportedCheckpoint for the folder of an adapter, which is no model by itself."""
    adapter = adapter_of(folder)
    if adapter is not None:
        raise UnsupportedCheckpoint(
            f"{folder}: {adapter} ({CONFIG_NAME}): merge it into that model first (PEFT: merge_and_unload),"
            " then convert"
        )
