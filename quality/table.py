"""An evaluation as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gguf_tools.text import MAX_WIDTH, size_text, table
from quality.divergence import Estimate
from quality.drift import LayerDrift
from quality.evaluation import EvaluatedModel, Evaluation

_HEADINGS = ("model", "size", "bpw", "PPL", "ln ratio", "same top")
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
        f"base {evaluation.base_path}: PPL {_estimate(evaluation.base_ppl, 4)}",
        "",
        *table([_HEADINGS, *map(_measures, models)], right=range(1, len(_HEADINGS))),
        "",
        *table([_DIVERGENCE_HEADINGS, *map(_divergences, models)], right=range(1, len(_DIVERGENCE_HEADINGS))),
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


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    return (
        model.path.name,
        size_text(model.n_bytes),
        f"{model.bits_per_weight:.2f}",
        _estimate(found.ppl, 4),
        _estimate(found.ln_ratio, 5),
        f"{found.same_top.value:.2%} +/- {found.same_top.error:.2%}",
    )


def _divergences(model: EvaluatedModel) -> Sequence[str]:
    kld = model.divergence.kld
    return (
        model.path.name,
        _estimate(kld.mean, 6),
        *(f"{kld.percentiles[name]:.5f}" for name in ("median", "p90", "p99", "p99_9", "max")),
        f"{model.divergence.rms_delta_p.value:.3%}",
    )


def _drift_lines(models: Sequence[EvaluatedModel]) -> Iterator[str]:
    """Yield a table with a column for each model; as many tables as the width of a line asks for."""
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


def _estimate(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} +/- {estimate.error:.{digits}f}"
