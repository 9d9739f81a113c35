"""Lists the weights of a checkpoint and how they are stored, for `gguf-tools checkpoint`."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from convert.weights.model_weights import ModelWeights
from gguf_tools.text import bytes_text, printable, table


def describe(model: ModelWeights) -> dict[str, Any]:
    """Return the weights as plain data (name, shape, stored_as, bits_per_weight), and what was dropped.

    raises  CheckpointError for the first weight whose stored tensors don't fit each other
    """
    tensors, n_weights, n_bytes = [], 0, 0
    for name in model.names():
        weight, stored = model.weight(name), model.stored_bytes(name)
        tensors.append({
            "name": name,
            "shape": list(weight.shape),
            "stored_as": weight.stored_as,
            "bits_per_weight": _bits_per_weight(stored, prod(weight.shape)),
        })  # fmt: skip
        n_weights += prod(weight.shape)
        n_bytes += stored
    return {
        "folder": str(model.checkpoint.folder),
        "quant_method": model.settings.method,
        "weights": n_weights,
        "bytes": n_bytes,
        "bits_per_weight": _bits_per_weight(n_bytes, n_weights),
        "tensors": tensors,
        "dropped": dict(model.dropped),
    }


def checkpoint_text(model: ModelWeights) -> list[str]:
    """Return `describe` as lines: one per weight, then totals and what was dropped."""
    listing = describe(model)
    rows = [
        (
            printable(tensor["name"]),
            " x ".join(map(str, tensor["shape"])),
            f"{tensor['bits_per_weight']:.2f}",
            tensor["stored_as"],
        )
        for tensor in listing["tensors"]
    ]
    lines = table([("name", "shape", "bits", "stored as"), *rows], right=(1, 2))
    lines.append("")
    lines.append(
        f"{len(rows)} tensors, {listing['weights']:,} weights, {bytes_text(listing['bytes'])},"
        f" {listing['bits_per_weight']:.2f} bits per weight"
    )
    reasons = Counter(listing["dropped"].values())
    lines += [f"{count} more dropped: {reason}" for reason, count in reasons.items()]
    return lines


def _bits_per_weight(n_bytes: int, n_weights: int) -> float:
    return round(8 * n_bytes / n_weights, 4) if n_weights else 0.0
