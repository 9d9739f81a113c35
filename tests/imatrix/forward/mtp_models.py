"""A small DeepSeek V3 with its MTP layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.checkpoints import Tensors, add_mtp_layer, edit_tensors, transformers_checkpoint


def v3_with_mtp(folder: Path, *, own_ends: bool = True, **changes: Any) -> Path:
    """Write the checkpoint; `own_ends`: the MTP layer has embeddings and an output matrix of its own."""
    add_mtp_layer(transformers_checkpoint(folder, "v3", **changes))

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith((".embed_tokens.weight", ".head.weight"))]:
            if ".layers." in name and not own_ends:
                del tensors[name]

    edit_tensors(folder, drop)
    return folder
