"""What each tensor of a file costs at its type, and what more bytes for it would save: from a losses file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import by_name
from quality.evaluation import TensorSize
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity

MIB = 1 << 20


@dataclass(frozen=True)
class Price:
    """What a tensor costs.

    damage   predicted for stock encoding, nats per token
    larger   the larger type that would save most for each byte; None where no larger one saves anything
    per_mib  what it would save for each MiB that it takes more, nats per token; 0 with no larger one
    """

    damage: float
    larger: str | None
    per_mib: float


def prices_of(tensors: Sequence[TensorSize], losses: Sensitivities) -> dict[str, Price]:
    """Price the tensors of a file that the losses know at their types.

    raises  BadRequest for losses of another model
    """
    here = {tensor.name for tensor in tensors}
    for name in losses.tensors:
        if name not in here:
            raise BadRequest(f"{name}: has losses and is not in the file; losses of another model?")
    return {
        tensor.name: _price(tensor, measured)
        for tensor in tensors
        if (measured := losses.tensors.get(tensor.name)) is not None and tensor.type.name in measured.by_type
    }


def _price(tensor: TensorSize, measured: TensorSensitivity) -> Price:
    expected = tensor.type.tensor_bytes(measured.shape)
    if tensor.n_bytes != expected:
        raise BadRequest(
            f"{tensor.name}: {tensor.n_bytes:,} bytes as {tensor.type}, and the losses have a shape of"
            f" {expected:,}; losses of another model?"
        )
    damage, best = measured.by_type[tensor.type.name], (0.0, "")
    for name, less in measured.by_type.items():
        more_bytes = by_name(name).tensor_bytes(measured.shape) - tensor.n_bytes
        if more_bytes > 0 and less < damage:
            best = max(best, ((damage - less) / more_bytes * MIB, name))
    return Price(damage, best[1] or None, best[0])
