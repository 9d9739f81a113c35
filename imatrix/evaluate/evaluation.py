"""The result of an evaluation, as values and as JSON.

`evaluation_lines` shows it as tables for the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.dataframes import dataframe
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.text import MAX_WIDTH, html_table, size_text, table
from imatrix.evaluate.against import FileComparison, compare_files, comparison_lines, comparisons_json
from imatrix.evaluate.divergence import Divergence, Estimate, TokenValues
from imatrix.evaluate.drafts import DRAFT_HEADINGS, DRAFTS_ARE, Drafts, draft_rows
from imatrix.evaluate.noise_floor import NoiseFloor, noise_lines
from imatrix.texts.chunks import Chunks

if TYPE_CHECKING:
    import pandas

    from imatrix.evaluate.drift import LayerDrift
    from imatrix.evaluate.worst_layer import WorstLayer
    from imatrix.texts.tokenise import ClassChunks


@dataclass(frozen=True)
class EvaluatedText:
    """The text that models were measured on.

    path, sha256  of the file, and of its bytes; None where only the tokens were given. A class of a suite has
                  a digest of all its texts, and no path
    spelled       the bytes that each token of the vocabulary stands for
    text_class    the class of a suite that it is
    """

    path: Path | None
    sha256: str | None
    chunks: Chunks = field(repr=False, compare=False)
    spelled: tuple[bytes, ...] = field(repr=False, compare=False)
    text_class: ClassChunks | None = field(default=None, repr=False, compare=False)

    @property
    def n_chunks(self) -> int:
        return self.chunks.n_chunks

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk; of the longest where they differ."""
        return self.chunks.longest

    @property
    def n_tokens_measured(self) -> int:
        """Number of tokens whose predictions count, of all chunks."""
        return self.chunks.n_scored


@dataclass(frozen=True)
class TensorSize:
    """Size of a tensor of a file."""

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
    drafts           what its MTP layer predicts; None where it or the base has none
    """

    path: Path
    n_bytes: int
    bits_per_weight: float
    divergence: Divergence
    layers: tuple[LayerDrift, ...]
    worst_layer: WorstLayer | None
    tokens: TokenValues = field(repr=False)
    tensors: tuple[TensorSize, ...] = field(repr=False)
    drafts: Drafts | None = None

    def about_json(self) -> dict[str, Any]:
        """Return as JSON data which file it is."""
        return {"path": str(self.path), "n_bytes": self.n_bytes, "bits_per_weight": self.bits_per_weight}

    def measures_json(self) -> dict[str, Any]:
        """Return as JSON data what was measured: ratios as fractions."""
        found = self.divergence
        return {
            "ppl": found.ppl.value,
            "ppl_error": found.ppl.error,
            "ln_ppl_ratio": found.ln_ratio.value,
            "ln_ppl_ratio_error": found.ln_ratio.error,
            "correlation": found.correlation,
            "kld": {"mean": found.kld.mean.value, "error": found.kld.mean.error, **found.kld.percentiles},
            "same_top": found.same_top.value,
            "same_top_error": found.same_top.error,
            "flips": found.flips.value,
            "flips_error": found.flips.error,
            "flips_of_confident": found.flips_of_confident.value,
            "flips_of_confident_error": found.flips_of_confident.error,
            "delta_p": {
                "mean": found.delta_p.mean.value,
                "error": found.delta_p.mean.error,
                **found.delta_p.percentiles,
            },
            "rms_delta_p": found.rms_delta_p.value,
            "rms_delta_p_error": found.rms_delta_p.error,
            "positions": [
                {"first": each.first, "last": each.last, "kld": each.kld.value, "error": each.kld.error}
                for each in found.by_position
            ],
            "layers": [
                {"layer": layer.layer, "drift": layer.drift, "routing_changed": layer.routing_changed}
                for layer in self.layers
            ],
            "worst_layer": None if self.worst_layer is None else _worst_json(self.worst_layer),
            **({} if self.drafts is None else {"drafts": self.drafts.to_json()}),
        }


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Models against a base, on a text.

    noise  what the base itself loses to rounding; None: not measured
    stock  number of the model that the others are compared with; None: none
    """

    text: EvaluatedText
    base_path: Path
    base_ppl: Estimate
    models: tuple[EvaluatedModel, ...]
    noise: NoiseFloor | None = None
    stock: int | None = None

    def by_size(self) -> Evaluation:
        """Return the same with the smallest file first."""
        order = sorted(range(len(self.models)), key=lambda number: self.models[number].n_bytes)
        stock = None if self.stock is None else order.index(self.stock)
        return replace(self, models=tuple(self.models[number] for number in order), stock=stock)

    @cached_property
    def comparisons(self) -> tuple[FileComparison, ...]:
        """Every other file against the stock one; nothing without one."""
        if self.stock is None:
            return ()
        name = (self.base_path if self.text.path is None else self.text.path).name
        floors = None if self.noise is None else {name: self.noise.kld}
        return compare_files(
            [model.path for model in self.models],
            self.stock,
            {name: [model.tokens for model in self.models]},
            floors,
        )

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

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: ratios as fractions, sizes in bytes, divergences in nats."""
        return [
            {
                "file": model.path.name,
                "n_bytes": model.n_bytes,
                "bits_per_weight": model.bits_per_weight,
                "ppl": found.ppl.value,
                "kld": found.kld.mean.value,
                "kld_error": found.kld.mean.error,
                **{f"kld_{name}": value for name, value in found.kld.percentiles.items()},
                "same_top": found.same_top.value,
                "flips": found.flips.value,
                "rms_delta_p": found.rms_delta_p.value,
                **_draft_row(model.drafts),
            }
            for model in self.models
            for found in (model.divergence,)
        ]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return `rows` as a table of pandas; raises BadRequest where pandas is missing."""
        return dataframe(self.rows())

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
            **({} if self.noise is None else {"noise_floor": self.noise.to_json()}),
            "models": [model.about_json() | model.measures_json() for model in self.models],
            **comparisons_json(self.comparisons),
        }


def _worst_json(worst: WorstLayer) -> dict[str, Any]:
    return {
        "layer": worst.layer,
        "tensors": [
            {"name": tensor.name, "type": tensor.type, "error": tensor.error} for tensor in worst.tensors
        ],
    }


def _draft_row(drafts: Drafts | None) -> dict[str, float]:
    if drafts is None:
        return {}
    return {
        "draft_kld": drafts.kld.mean.value,
        "draft_accepted": drafts.accepted.value,
        "base_draft_accepted": drafts.base_accepted.value,
    }


_HEADINGS = ("model", "size", "bpw", "PPL", "ln ratio", "same top", "flips")
_DIVERGENCE_HEADINGS = ("model", "KLD", "median", "90%", "99%", "99.9%", "max", "RMS dp")

_N_TENSORS = 3
"""Number of tensors that are shown for a layer."""


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Print the measures of every model as lines, and how far each has drifted, layer by layer.

    A line has at most MAX_WIDTH columns as long as the files' names have no more than about 20.
    """
    text, models = evaluation.text, evaluation.models
    name = evaluation.base_path if text.path is None else text.path
    lines = [
        f"{name}: {text.n_chunks} chunks of {text.chunk_size} tokens, {text.n_tokens_measured} measured",
        f"base {evaluation.base_path}: PPL {evaluation.base_ppl.text(4)}",
        "",
        *table([_HEADINGS, *map(_measures, models)], right=range(1, len(_HEADINGS))),
        "",
        *table([_DIVERGENCE_HEADINGS, *map(_divergences, models)], right=range(1, len(_DIVERGENCE_HEADINGS))),
        *_draft_lines(models),
        *_noise_lines(evaluation),
        *comparison_lines(evaluation.comparisons),
    ]
    if not any(model.layers for model in models):
        return lines
    return [
        *lines,
        "",
        "drift of the hidden states by layer (share of expert choices that changed)",
        *_drift_lines(models),
        "",
        "layer that adds most to the drift, and its tensors that are farthest from the base (relative error)",
        *(line for model in models for line in _worst(model)),
    ]


def _draft_lines(models: Sequence[EvaluatedModel]) -> Iterator[str]:
    """Yield a table of those that draft."""
    rows = list(draft_rows((model.path, model.drafts) for model in models))
    if rows:
        yield ""
        yield DRAFTS_ARE
        yield from table([DRAFT_HEADINGS, *rows], right=range(1, len(DRAFT_HEADINGS)))


def _noise_lines(evaluation: Evaluation) -> Iterator[str]:
    if evaluation.noise is not None:
        files = [(model.path.name, model.divergence.kld.mean.value) for model in evaluation.models]
        yield ""
        yield from noise_lines(evaluation.noise, files)


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    return (
        model.path.name,
        size_text(model.n_bytes),
        f"{model.bits_per_weight:.2f}",
        found.ppl.text(4),
        found.ln_ratio.text(5),
        f"{found.same_top.value:.2%}",
        f"{found.flips.value:.2%}",
    )


def _divergences(model: EvaluatedModel) -> Sequence[str]:
    kld = model.divergence.kld
    return (
        model.path.name,
        kld.mean.text(6),
        *(f"{kld.percentiles[name]:.5f}" for name in ("median", "p90", "p99", "p99_9", "max")),
        f"{model.divergence.rms_delta_p.value:.3%}",
    )


def _drift_lines(models: Sequence[EvaluatedModel]) -> Iterator[str]:
    """Yield a table with a column for each model that has drift, in parts as wide as a line."""
    models = [model for model in models if model.layers]
    columns = [(model.path.name, *map(_drift, model.layers)) for model in models]
    layers = ("layer", *(str(layer.layer) for layer in models[0].layers))
    widths = [2 + max(map(len, column)) for column in columns]
    start = 0
    while start < len(columns):
        stop = start + 1
        while stop < len(columns) and len("layer") + sum(widths[start : stop + 1]) <= MAX_WIDTH:
            stop += 1
        rows = list(zip(layers, *columns[start:stop], strict=True))
        yield from table(rows, right=range(stop - start + 1))
        start = stop


def _worst(model: EvaluatedModel) -> Iterator[str]:
    """Yield the layer that a model loses most in, and below it the tensors that it loses by."""
    worst = model.worst_layer
    if worst is None:
        return
    yield f"{model.path.name}: layer {worst.layer}"
    for tensor in worst.tensors[:_N_TENSORS]:
        yield f"  {tensor.name} {tensor.type} ({tensor.error:.5f})"


def _drift(layer: LayerDrift) -> str:
    changed = "" if layer.routing_changed is None else f" ({layer.routing_changed:.2%})"
    return f"{layer.drift:.5f}{changed}"
