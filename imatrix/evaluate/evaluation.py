"""The result of an evaluation: values, rows of a table, JSON, and lines for the terminal.

A text alone is a suite with one class. It is shown with the measures of llama-perplexity, whose errors are
over tokens, and with the drift of each layer. Classes are shown by `Figures`, whose errors are over chunks.
Models that are for embeddings have `Likeness` in the place of both, and what is about predictions is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.dataframes import dataframe
from gguf_tools.files.named_files import AnyPath, Paths
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.lazy import late
from gguf_tools.text import MAX_WIDTH, for_json, html_table, size_text, table
from imatrix.evaluate.against import FileComparison, compare_files, comparison_lines, comparisons_json
from imatrix.evaluate.divergence import (
    DRAFT_HEADINGS,
    DRAFTS_ARE,
    Drafts,
    Estimate,
    draft_rows,
)
from imatrix.evaluate.figures import ALL, Figures
from imatrix.evaluate.likeness import LIKENESS_HEADINGS, Likeness
from imatrix.evaluate.noise_floor import NoiseFloor, mean_floor, noise_by_class_lines, noise_lines
from imatrix.texts.suite import Suite
from imatrix.texts.tokenise import ClassChunks

if TYPE_CHECKING:
    import pandas

    from imatrix.evaluate.drift import LayerDrift
    from imatrix.evaluate.worst_layer import WorstLayer
    from quantize.plan.sensitivities import Sensitivities


Check = Callable[[ClassChunks, Sequence[Sequence[TensorInfo]]], None]
"""Given a class and the tensors of each file, raises BadRequest for what can't be done with their result."""


@dataclass(frozen=True)
class EvaluatedModel:
    """One model against the base.

    path             of its file, or of the first one
    n_bytes          size of its file or files
    bits_per_weight  of its tensors
    divergence       of its predictions from the base's; of a model for embeddings, how like its vectors are
    layers           how far it has moved from the base after each layer; empty where only the base's logits
                     are known
    worst_layer      the layer that adds most to the drift, and the errors of its tensors; None without layers
    tokens           what was measured of each token, or of each passage
    tensors          all that the file has, in its order
    drafts           what its MTP layer predicts; None where it or the base has none
    """

    path: Path
    n_bytes: int
    bits_per_weight: float
    divergence: Any  # Divergence or Likeness
    layers: tuple[LayerDrift, ...]
    worst_layer: WorstLayer | None
    tokens: Any = field(repr=False)  # TokenValues or PassageValues
    tensors: Sequence[TensorInfo] = field(repr=False)
    drafts: Drafts | None = None

    def about_json(self) -> dict[str, Any]:
        """Return as JSON data which file it is."""
        return {"path": str(self.path), "n_bytes": self.n_bytes, "bits_per_weight": self.bits_per_weight}

    def measures_json(self) -> dict[str, Any]:
        """Return as JSON data what was measured: ratios as fractions."""
        found, worst = self.divergence, self.worst_layer
        of_layers = {
            "layers": [
                {"layer": layer.layer, "drift": layer.drift, "routing_changed": layer.routing_changed}
                for layer in self.layers
            ],
            "worst_layer": None if worst is None else worst.to_json(),
        }
        if isinstance(found, Likeness):
            return {**found.row(), **of_layers}
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
            **of_layers,
            **({} if self.drafts is None else {"drafts": self.drafts.to_json()}),
        }


@dataclass(frozen=True)
class ClassEvaluation:
    """Models against a base, on a class of texts.

    text      its chunks
    base_ppl  perplexity of the base; None of a model for embeddings
    models    each model against the base, in the order in which they were given
    noise     what the base itself loses to rounding; None: not measured
    """

    text: ClassChunks
    base_ppl: Estimate | None
    models: tuple[EvaluatedModel, ...]
    noise: NoiseFloor | None = None


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Models against a base, on every class of a suite, or on a text alone.

    base_path  the base, or the file with its log probabilities
    by_class   class -> what was measured on it, in the suite's order; a text alone is called as its file
    stock      number of the model that the others are compared with; None: none
    suite      None for a text alone
    """

    base_path: Path
    by_class: Mapping[str, ClassEvaluation]
    stock: int | None = None
    suite: Suite | None = None

    @property
    def alone(self) -> ClassEvaluation:
        """The only class, such as a text alone; raises ValueError where there are several."""
        (only,) = self.by_class.values()
        return only

    @property
    def is_of_vectors(self) -> bool:
        """Whether vectors of passages were compared, and no predictions."""
        return isinstance(self.models[0].divergence, Likeness)

    @property
    def models(self) -> tuple[EvaluatedModel, ...]:
        """The models as they were measured on the first class, or on the text alone."""
        return next(iter(self.by_class.values())).models

    def by_size(self) -> Evaluation:
        """Return the same with the smallest file first."""
        order = sorted(range(len(self.models)), key=lambda number: self.models[number].n_bytes)
        by_class = {
            name: replace(each, models=tuple(each.models[number] for number in order))
            for name, each in self.by_class.items()
        }
        return replace(self, by_class=by_class, stock=None if self.stock is None else order.index(self.stock))

    @cached_property
    def figures(self) -> tuple[Mapping[str, Any], ...]:
        """The Figures, or Likeness, of each model by class, and under ALL over all classes."""
        found = []
        kind: Any = Likeness if self.is_of_vectors else Figures
        for number in range(len(self.models)):
            tokens = {name: each.models[number].tokens for name, each in self.by_class.items()}
            of_classes = {name: kind.over([each]) for name, each in tokens.items()}
            found.append({**of_classes, ALL: kind.over(list(tokens.values()))})
        return tuple(found)

    @cached_property
    def comparisons(self) -> tuple[FileComparison, ...]:
        """Every other file against the stock one; nothing without one."""
        if self.stock is None:
            return ()
        tokens = {name: [model.tokens for model in each.models] for name, each in self.by_class.items()}
        floors = {name: each.kld for name, each in self.noise.items()}
        return compare_files([model.path for model in self.models], self.stock, tokens, floors or None)

    @property
    def noise(self) -> Mapping[str, NoiseFloor]:
        """Class -> its noise floor; nothing where it was not measured."""
        return {name: each.noise for name, each in self.by_class.items() if each.noise is not None}

    @property
    def mean_klds(self) -> tuple[float, ...]:
        """The mean divergence of each model, or what the mean cosine lacks to 1; classes weigh the same."""
        if self.is_of_vectors:
            return tuple(figures[ALL].distance for figures in self.figures)
        if self.suite is None:
            return tuple(model.divergence.kld.mean.value for model in self.models)
        return tuple(figures[ALL].kld.value for figures in self.figures)

    @property
    def measure_name(self) -> str:
        """Name of what `mean_klds` has."""
        return "1 - cosine" if self.is_of_vectors else "KLD"

    def __repr__(self) -> str:
        models = ", ".join(
            f"{model.path.name}: {self.measure_name} {kld:.6f}"
            for model, kld in zip(self.models, self.mean_klds, strict=True)
        )
        if self.suite is not None:
            where = f"{len(self.by_class)} classes of {self.suite.name}"
        elif self.is_of_vectors:
            where = f"{self.alone.text.n_chunks} passages"
        else:
            where = f"{self.alone.text.n_tokens_measured} tokens"
        return f"<Evaluation of {self.base_path.name} on {where}: {models}>"

    def _repr_html_(self) -> str:
        heads, *rows = _overview(self.models) if self.suite is None else _overall(self)
        return html_table(repr(self), heads, rows)

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as rows: ratios as fractions, sizes in bytes, divergences in nats.

        A text alone has a row for each file. A suite has one for each file and class, and one named "all" for
        each file over all classes, whose errors are standard errors over chunks; see Figures.
        """
        return [*map(_model_row, self.models)] if self.suite is None else [*_suite_rows(self, self.suite)]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return `rows` as a table of pandas; raises BadRequest where pandas is missing."""
        return dataframe(self.rows())

    def to_json(self) -> dict[str, Any]:
        """Return all but the values of single tokens: ratios as fractions, sizes in bytes, NaN as "nan"."""
        data = _text_json(self) if self.suite is None else _suite_json(self, self.suite)
        return dict(for_json(data))

    def to_html(self, earlier: Paths = (), losses: AnyPath | Sensitivities | None = None) -> str:
        """Return a page that loads nothing, as `evaluate --html` writes it; its charts need matplotlib.

        earlier  JSON files of evaluations on the same texts, whose files are shown beside
        losses   what each tensor costs at each type, as `sensitivity` measures it, for a map of that
        raises   BadRequest for an earlier evaluation of other texts or another base, losses of another model,
                 and where matplotlib is missing
        """
        page = late("imatrix.evaluate.report.page")  # which is made of this module's values
        inputs = page.PageInputs.read(earlier, losses)
        return str(page.report_page(self, inputs.earlier, inputs.losses))

    def lines(self) -> list[str]:
        """Print the measures as lines: on a text alone with the drift by layer, of a suite also by class.

        A line has at most MAX_WIDTH columns as long as the files' names have no more than about 20.
        """
        return _text_lines(self) if self.suite is None else _suite_lines(self, self.suite)


SuiteEvaluation = Evaluation
"""An evaluation on a suite."""


def _overview(models: Sequence[EvaluatedModel]) -> list[Sequence[str]]:
    """Return the heads and rows of a table of files on one text."""
    if isinstance(models[0].divergence, Likeness):
        return _likenesses(models)
    rows = [
        (
            *_about(model),
            f"{model.divergence.ppl.value:.4f}",
            f"{model.divergence.kld.mean.value:.6f}",
            f"{model.divergence.same_top.value:.2%}",
        )
        for model in models
    ]
    return [("model", "size", "bpw", "PPL", "KLD", "same top"), *rows]


_LIKENESSES = ("model", "size", "bpw", *LIKENESS_HEADINGS)


def _likenesses(models: Sequence[EvaluatedModel]) -> list[Sequence[str]]:
    """Return the heads and rows of a table of files for embeddings on one text."""
    rows = [(*_about(each), *each.divergence.cells()) for each in models]
    return [_LIKENESSES, *rows]


def _about(model: EvaluatedModel) -> tuple[str, str, str]:
    """Return the columns that every table of files begins with."""
    return model.path.name, size_text(model.n_bytes), f"{model.bits_per_weight:.2f}"


def _model_row(model: EvaluatedModel) -> dict[str, Any]:
    found, drafts = model.divergence, model.drafts
    if isinstance(found, Likeness):
        about = {"n_bytes": model.n_bytes, "bits_per_weight": model.bits_per_weight}
        return {"file": model.path.name, **about, **found.row()}
    row = {
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
    }
    if drafts is not None:
        row["draft_kld"] = drafts.kld.mean.value
        row["draft_accepted"] = drafts.accepted.value
        row["base_draft_accepted"] = drafts.base_accepted.value
    return row


def _suite_rows(evaluation: Evaluation, suite: Suite) -> Iterator[dict[str, Any]]:
    texts = {name: each.text for name, each in evaluation.by_class.items()}
    for model, of_model in zip(evaluation.models, evaluation.figures, strict=True):
        for name, figures in of_model.items():
            measured = [texts[name]] if name in texts else list(texts.values())
            yield {
                "suite": suite.name,
                "class": name,
                "file": str(model.path),
                "n_bytes": model.n_bytes,
                "bits_per_weight": model.bits_per_weight,
                "n_chunks": sum(text.n_chunks for text in measured),
                "n_tokens_measured": sum(text.n_tokens_measured for text in measured),
                **figures.row(),
            }


def _text_json(evaluation: Evaluation) -> dict[str, Any]:
    alone = evaluation.alone
    text, ppl, noise = alone.text, alone.base_ppl, alone.noise
    return {
        "text": {
            "path": None if text.path is None else str(text.path),
            "sha256": text.sha256,
            **_sizes(text),
        },
        "base": {
            "path": str(evaluation.base_path),
            **({} if ppl is None else {"ppl": ppl.value, "ppl_error": ppl.error}),
        },
        **({} if noise is None else {"noise_floor": noise.to_json()}),
        "models": [model.about_json() | model.measures_json() for model in alone.models],
        **comparisons_json(evaluation.comparisons),
    }


def _suite_json(evaluation: Evaluation, suite: Suite) -> dict[str, Any]:
    by_class, noise = evaluation.by_class, evaluation.noise
    floors = {name: each.to_json() for name, each in noise.items()}
    return {
        "suite": {
            "name": suite.name,
            "title": suite.title,
            "quick": suite.quick,
            "classes": [_class_json(each) for each in by_class.values()],
        },
        "base": {"path": str(evaluation.base_path)},
        **({"noise_floor": {ALL: mean_floor(noise.values()), "classes": floors}} if noise else {}),
        **comparisons_json(evaluation.comparisons),
        "models": [
            {
                **model.about_json(),
                ALL: figures[ALL].row(),
                "classes": {
                    name: {**figures[name].row(), "evaluation": each.models[number].measures_json()}
                    for name, each in by_class.items()
                },
            }
            for number, (model, figures) in enumerate(zip(evaluation.models, evaluation.figures, strict=True))
        ],
    }


def _class_json(evaluation: ClassEvaluation) -> dict[str, Any]:
    text = evaluation.text
    return {
        "name": text.name,
        "title": text.title,
        "sha256": text.sha256,
        "template": text.template,
        "notes": list(text.notes),
        **_sizes(text),
        **({} if evaluation.base_ppl is None else {"base_ppl": evaluation.base_ppl.value}),
    }


def _sizes(text: ClassChunks) -> dict[str, int]:
    return {
        "n_chunks": text.n_chunks,
        "chunk_size": text.chunk_size,
        "n_tokens_measured": text.n_tokens_measured,
    }


_HEADINGS = ("model", "size", "bpw", "PPL", "ln ratio", "same top", "flips")
_DIVERGENCE_HEADINGS = ("model", "KLD", "median", "90%", "99%", "99.9%", "max", "RMS dp")

_N_TENSORS = 3
"""Number of tensors that are shown for a layer."""


def _text_lines(evaluation: Evaluation) -> list[str]:
    """Print the measures of every model on a text alone, and how far each has drifted, layer by layer."""
    alone, models = evaluation.alone, evaluation.models
    text = alone.text
    ends = ["", *_drift_sections(models)] if any(model.layers for model in models) else []
    if alone.base_ppl is None:
        return [
            f"{text.path}: {text.n_chunks} passages of {text.chunk_size} tokens",
            f"base {evaluation.base_path}",
            "",
            *table(_likenesses(models), right=range(1, len(_LIKENESSES))),
            *ends,
        ]
    lines = [
        f"{evaluation.base_path if text.path is None else text.path}: {text.n_chunks} chunks of"
        f" {text.chunk_size} tokens, {text.n_tokens_measured} measured",
        f"base {evaluation.base_path}: PPL {alone.base_ppl.text(4)}",
        "",
        *table([_HEADINGS, *map(_measures, models)], right=range(1, len(_HEADINGS))),
        "",
        *table([_DIVERGENCE_HEADINGS, *map(_divergences, models)], right=range(1, len(_DIVERGENCE_HEADINGS))),
    ]
    drafts = list(draft_rows((model.path, model.drafts) for model in models))
    if drafts:
        lines += ["", DRAFTS_ARE, *table([DRAFT_HEADINGS, *drafts], right=range(1, len(DRAFT_HEADINGS)))]
    if alone.noise is not None:
        files = [model.path.name for model in models]
        lines += ["", *noise_lines(alone.noise, zip(files, evaluation.mean_klds, strict=True))]
    return [*lines, *comparison_lines(evaluation.comparisons), *ends]


def _drift_sections(models: Sequence[EvaluatedModel]) -> list[str]:
    """Print how far each model has drifted, layer by layer, and the tensors of the worst layer."""
    return [
        "drift of the hidden states by layer (share of expert choices that changed)",
        *_drift_lines(models),
        "",
        "layer that adds most to the drift, and its tensors that are farthest from the base (relative error)",
        *(line for model in models for line in _worst(model)),
    ]


def _measures(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    return (
        *_about(model),
        found.ppl.text(4),
        found.ln_ratio.text(5),
        f"{found.same_top.value:.2%}",
        f"{found.flips.value:.2%}",
    )


def _divergences(model: EvaluatedModel) -> Sequence[str]:
    found = model.divergence
    return (
        model.path.name,
        found.kld.mean.text(6),
        *(f"{found.kld.percentiles[name]:.5f}" for name in ("median", "p90", "p99", "p99_9", "max")),
        f"{found.rms_delta_p.value:.3%}",
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


_CLASSES = ("class", "chunks", "context", "tokens measured", "PPL of the base")
_PASSAGES = ("class", "passages", "tokens of the longest")
_OVERALL = ("model", "size", "bpw", "KLD", "99.9%", "same top", "flips", "ln ratio")
_BY_CLASS = ("class", "KLD", "median", "99%", "99.9%", "same top", "flips", "ln ratio")

_MOST_NOTES = 5
"""Number of notes that are shown for a class; JSON has all."""


def _suite_lines(evaluation: Evaluation, suite: Suite) -> list[str]:
    """Print the figures over all classes, and then those of every model by class."""
    classes = [*evaluation.by_class.values()]
    n_measured = sum(each.text.n_tokens_measured for each in classes)
    measured = f"{n_measured} tokens measured"
    heads: Sequence[str] = _CLASSES
    by_class: Sequence[str] = _BY_CLASS
    if evaluation.is_of_vectors:
        measured = f"{sum(each.text.n_chunks for each in classes)} passages"
        heads, by_class = _PASSAGES, ("class", *LIKENESS_HEADINGS)
    quick, overall = ", a tenth of each" if suite.quick else "", _overall(evaluation)
    lines = [
        f"suite {suite.name}: {len(classes)} classes{quick}, {measured}",
        f"base {evaluation.base_path}",
        "",
        *table([heads, *map(_class_row, classes)], right=range(1, len(heads))),
        *(f"note: {note}" for each in classes for note in _notes(each.text)),
        "",
        "over all classes, which have the same weight",
        *table(overall, right=range(1, len(overall[0]))),
    ]
    for model, figures in zip(evaluation.models, evaluation.figures, strict=True):
        rows = [(name, *_by_class(each)) for name, each in figures.items()]
        lines += ["", f"{model.path.name} by class"]
        lines += table([by_class, *rows], right=range(1, len(by_class)))
    if evaluation.noise:
        klds = [
            (model.path.name, {name: each.kld.value for name, each in figures.items()})
            for model, figures in zip(evaluation.models, evaluation.figures, strict=True)
        ]
        lines += ["", *noise_by_class_lines(evaluation.noise, klds)]
    return [*lines, *comparison_lines(evaluation.comparisons)]


def _class_row(evaluation: ClassEvaluation) -> Sequence[str]:
    text = evaluation.text
    sizes = (text.name, str(text.n_chunks), str(text.chunk_size))
    if evaluation.base_ppl is None:
        return sizes
    return (
        *sizes,
        str(text.n_tokens_measured),
        f"{evaluation.base_ppl.value:.4f}",
    )


def _notes(text: ClassChunks) -> Iterator[str]:
    yield from (f"{text.name}: {note}" for note in text.notes[:_MOST_NOTES])
    if len(text.notes) > _MOST_NOTES:
        yield f"{text.name}: {len(text.notes) - _MOST_NOTES} more like these"


def _overall(evaluation: Evaluation) -> list[Sequence[str]]:
    """Return the heads and rows of the table over all classes."""
    if evaluation.is_of_vectors:
        files = zip(evaluation.models, evaluation.figures, strict=True)
        return [_LIKENESSES, *((*_about(model), *figures[ALL].cells()) for model, figures in files)]
    rows = [
        (
            *_about(model),
            figures[ALL].kld.text(6),
            f"{figures[ALL].p99_9:.5f}",
            *_shares(figures[ALL]),
        )
        for model, figures in zip(evaluation.models, evaluation.figures, strict=True)
    ]
    return [_OVERALL, *rows]


def _by_class(figures: Figures | Likeness) -> Sequence[str]:
    if isinstance(figures, Likeness):
        return figures.cells()
    percentiles = (figures.median, figures.p99, figures.p99_9)
    return (figures.kld.text(6), *(f"{value:.5f}" for value in percentiles), *_shares(figures))


def _shares(figures: Figures) -> Sequence[str]:
    return (
        f"{figures.same_top.value:.2%}",
        f"{figures.flips.value:.2%}",
        f"{figures.ln_ratio.value:.5f}",
    )
