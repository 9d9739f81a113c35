"""The result of an evaluation, as values and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.text import html_table, size_text
from quality.divergence import Divergence, Estimate, TokenValues

if TYPE_CHECKING:
    from quality.drift import LayerDrift
    from quality.worst_layer import WorstLayer


@dataclass(frozen=True)
class EvaluatedText:
    """The text that models were measured on.

    path, sha256       of the file, and of its bytes; None where only the tokens were given
    n_tokens_measured  tokens whose predictions count, of all chunks
    tokens             of all chunks, int64 (n_chunks, chunk_size)
    spelled            the bytes that each token of the vocabulary stands for
    first              position of the first token of a chunk whose prediction of the next one is measured
    """

    path: Path | None
    sha256: str | None
    n_chunks: int
    chunk_size: int
    n_tokens_measured: int
    tokens: npt.NDArray[np.int64] = field(repr=False, compare=False)
    spelled: tuple[bytes, ...] = field(repr=False, compare=False)
    first: int


@dataclass(frozen=True)
class TensorSize:
    """What a tensor of a file takes."""

    name: str
    type: GGMLType
    n_bytes: int


Check = Callable[[EvaluatedText, Sequence[tuple[TensorSize, ...]]], None]
"""Given the text and the tensors of each file, raises BadRequest for what can't be done with their result."""


@dataclass(frozen=True)
class EvaluatedModel:
    """One model against the base.

    n_bytes          size of its file or files
    bits_per_weight  of its tensors
    layers           how far it has moved from the base after each layer; empty where only the base's logits
                     are known
    worst_layer      the layer that adds most to the drift, and the errors of its tensors; None without layers
    tokens           what was measured of each token
    tensors          all that the file has, in its order
    """

    path: Path
    n_bytes: int
    bits_per_weight: float
    divergence: Divergence
    layers: tuple[LayerDrift, ...]
    worst_layer: WorstLayer | None
    tokens: TokenValues = field(repr=False)
    tensors: tuple[TensorSize, ...] = field(repr=False)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Models against a base, on a text."""

    text: EvaluatedText
    base_path: Path
    base_ppl: Estimate
    models: tuple[EvaluatedModel, ...]

    def __repr__(self) -> str:
        models = ", ".join(
            f"{model.path.name}: KLD {model.divergence.kld.mean.value:.6f}" for model in self.models
        )
        return f"<Evaluation of {self.base_path.name} on {self.text.n_tokens_measured} tokens: {models}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                model.path.name,
                size_text(model.n_bytes),
                f"{model.bits_per_weight:.2f}",
                f"{model.divergence.ppl.value:.4f}",
                f"{model.divergence.kld.mean.value:.6f}",
                f"{model.divergence.same_top.value:.2%}",
            )
            for model in self.models
        ]
        return html_table(repr(self), ("model", "size", "bpw", "PPL", "KLD", "same top"), rows)

    def to_json(self) -> dict[str, Any]:
        """Return all but the values of single tokens as JSON data: ratios as fractions, sizes in bytes."""
        text = self.text
        return {
            "text": {
                "path": None if text.path is None else str(text.path),
                "sha256": text.sha256,
                "n_chunks": text.n_chunks,
                "chunk_size": text.chunk_size,
                "n_tokens_measured": text.n_tokens_measured,
            },
            "base": {
                "path": str(self.base_path),
                "ppl": self.base_ppl.value,
                "ppl_error": self.base_ppl.error,
            },
            "models": [_model_json(model) for model in self.models],
        }


def _model_json(model: EvaluatedModel) -> dict[str, Any]:
    found = model.divergence
    return {
        "path": str(model.path),
        "n_bytes": model.n_bytes,
        "bits_per_weight": model.bits_per_weight,
        "ppl": found.ppl.value,
        "ppl_error": found.ppl.error,
        "ln_ppl_ratio": found.ln_ratio.value,
        "ln_ppl_ratio_error": found.ln_ratio.error,
        "correlation": found.correlation,
        "kld": {"mean": found.kld.mean.value, "error": found.kld.mean.error, **found.kld.percentiles},
        "same_top": found.same_top.value,
        "same_top_error": found.same_top.error,
        "delta_p": {
            "mean": found.delta_p.mean.value,
            "error": found.delta_p.mean.error,
            **found.delta_p.percentiles,
        },
        "rms_delta_p": found.rms_delta_p.value,
        "rms_delta_p_error": found.rms_delta_p.error,
        "positions": [
            {"first": bucket.first, "last": bucket.last, "kld": bucket.kld.value, "error": bucket.kld.error}
            for bucket in found.by_position
        ],
        "layers": [
            {"layer": layer.layer, "drift": layer.drift, "routing_changed": layer.routing_changed}
            for layer in model.layers
        ],
        "worst_layer": None if model.worst_layer is None else _worst_json(model.worst_layer),
    }


def _worst_json(worst: WorstLayer) -> dict[str, Any]:
    return {
        "layer": worst.layer,
        "tensors": [
            {"name": tensor.name, "type": tensor.type, "error": tensor.error} for tensor in worst.tensors
        ],
    }
