"""Refuses checkpoints whose stored weights alone don't make up the model, in any format.

A rotation of the activations, a scale that is multiplied into a module's inputs at run time, or zeros that
are left out belong to the weights as much as codes and scales do. Reading without them would give a file that
looks good and computes nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from convert.checkpoint.checkpoint import Checkpoint
from convert.weights.base import TYPES
from convert.weights.settings import Settings
from gguf_tools.errors import UnsupportedCheckpoint

TENSORS: Mapping[str, str] = MappingProxyType({
    ".pre_quant_scale": "a scale of the module's inputs",
    ".act.scales": "a scale of the module's inputs",
    ".bitmask": "a sparse matrix",
    ".trellis": "EXL3",
    ".hadamard": "a rotation of the module's inputs",
})  # fmt: skip
"""Suffix of stored tensors -> what makes a checkpoint unreadable that has them."""

ROTATIONS = ("transform_config", "rotation_config")
FINISHED = ("compressed", "frozen")
"""Values of quantization_status of a checkpoint that is ready to be used."""


def refuse(checkpoint: Checkpoint, settings: Settings) -> None:
    """Raise UnsupportedCheckpoint for the first thing that would make the weights mean something else."""
    for key in ROTATIONS:
        if settings.get(key):
            raise UnsupportedCheckpoint(
                f"{settings.where(key)}: the model rotates its activations, which is not read;"
                f" {first_quantized(checkpoint)}"
            )
    sparsity = settings.get("sparsity_config")
    kind = sparsity.get("format") if isinstance(sparsity, dict) else None
    if kind not in (None, "dense"):
        raise UnsupportedCheckpoint(
            f"{settings.where('sparsity_config')}: format {kind!r} is not read; {first_quantized(checkpoint)}"
        )
    status = settings.get("quantization_status")
    if status is not None and status not in FINISHED:
        raise UnsupportedCheckpoint(
            f"{settings.where('quantization_status')} is {status!r}, expected {' or '.join(FINISHED)}: the"
            f" checkpoint was saved half-way; {first_quantized(checkpoint)}"
        )
    for name in checkpoint.names():
        for suffix, meaning in TENSORS.items():
            if name.endswith(suffix):
                path = checkpoint.raw(name).path
                raise UnsupportedCheckpoint(
                    f"{path}: {name}: {meaning}, which is not read ({settings.described})"
                )


def first_quantized(checkpoint: Checkpoint) -> str:
    """Return words that name the first stored tensor that is not plain, for an error."""
    for name in checkpoint.names():
        if checkpoint.raw(name).dtype not in TYPES:
            return f"first such tensor: {name} ({checkpoint.raw(name).dtype})"
    return "no tensor shows it"
