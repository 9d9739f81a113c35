"""An evaluation as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from gguf_tools.text import size_text, table
from quality.divergence import Estimate
from quality.drift import LayerDrift
from quality.evaluation import EvaluatedModel, Evaluation

_HEADINGS = (
    "model", "size", "bpw", "PPL", "ln ratio", "KLD", "median", "90%", "99%", "99.9%", "max", "same top",
    "RMS dp",
)  # fmt: skip


_N_TENSORS = 3
"""Number of tensors that are shown for a layer."""


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Return the measures of every model, one per line, and how far each has drifted, layer by layer."""
    text = evaluation.text
    name = evaluation.base_path if text.path is None else text.path
    lines = [
        f"{name}: {text.n_chunks} chunks of {text.chunk_size} tokens, {text.n_tokens_measured} measured",
        f"base {evaluation.base_path}: PPL {_estimate(evaluation.base_ppl, 4)}",
        "",
        *table([_HEADINGS, *map(_measures, evaluation.models)], right=range(1, len(_HEADINGS))),
    ]
    if not any(model.layers for model in evaluation.models):
        return lines
    return [
        *lines,
        "",
        "drift of the hidden states by layer (share of expert choices that changed)",
        *table(_drift_rows(evaluation.models), right=range(len(evaluation.models) + 1)),
        "",
        "layer that adds most to the drift, and its tensors that are farthest from the base (relative error)",
        *table([_worst(model) for model in evaluation.models]),
    ]


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    kld = found.kld.percentiles
    return (
        str(model.path),
        size_text(model.n_bytes),
        f"{model.bits_per_weight:.2f}",
        _estimate(found.ppl, 4),
        _estimate(found.ln_ratio, 5),
        _estimate(found.kld.mean, 6),
        *(f"{kld[name]:.5f}" for name in ("median", "p90", "p99", "p99_9", "max")),
        f"{found.same_top.value:.2%} +/- {found.same_top.error:.2%}",
        f"{found.rms_delta_p.value:.3%}",
    )


def _drift_rows(models: Sequence[EvaluatedModel]) -> list[Sequence[str]]:
    heading = ("layer", *(model.path.name for model in models))
    rows = [
        (str(layers[0].layer), *map(_drift, layers))
        for layers in zip(*(model.layers for model in models), strict=True)
    ]
    return [heading, *rows]


def _worst(model: EvaluatedModel) -> Sequence[str]:
    worst = model.worst_layer
    if worst is None:
        return model.path.name, "", ""
    tensors = (f"{tensor.name} {tensor.type} ({tensor.error:.5f})" for tensor in worst.tensors[:_N_TENSORS])
    return model.path.name, f"layer {worst.layer}", ", ".join(tensors)


def _drift(layer: LayerDrift) -> str:
    changed = "" if layer.routing_changed is None else f" ({layer.routing_changed:.2%})"
    return f"{layer.drift:.5f}{changed}"


def _estimate(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} +/- {estimate.error:.{digits}f}"
