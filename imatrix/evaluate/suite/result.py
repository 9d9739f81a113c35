"""The result of a suite: values, rows of a table, JSON, and `suite_lines` for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.dataframes import dataframe
from gguf_tools.text import html_table, size_text, table
from imatrix.evaluate.against import FileComparison, compare_files, comparison_lines, comparisons_json
from imatrix.evaluate.evaluation import EvaluatedModel, Evaluation
from imatrix.evaluate.noise_floor import NoiseFloor, mean_floor, noise_by_class_lines
from imatrix.evaluate.suite.figures import Figures
from imatrix.texts.suite import Suite

if TYPE_CHECKING:
    import pandas

    from imatrix.texts.tokenise import ClassChunks

ALL = "all"
"""Name of the figures over all classes, beside those of classes."""


@dataclass(frozen=True, repr=False)
class SuiteEvaluation:
    """Files against a base, on every class of a suite.

    by_class  for each class, in the suite's order, what `evaluate` gives for a text of these chunks
    """

    suite: Suite
    by_class: Mapping[str, Evaluation]

    def by_size(self) -> SuiteEvaluation:
        """Return the same with the smallest file first."""
        return replace(self, by_class={name: each.by_size() for name, each in self.by_class.items()})

    @property
    def base_path(self) -> Path:
        return self._first.base_path

    @property
    def files(self) -> tuple[EvaluatedModel, ...]:
        """The files as they were measured on the first class: path, size, tensors."""
        return self._first.models

    @property
    def _first(self) -> Evaluation:
        return next(iter(self.by_class.values()))

    @cached_property
    def figures(self) -> tuple[Mapping[str, Figures], ...]:
        """The figures of each file: class -> those on its chunks, and ALL -> those over all classes."""
        found = []
        for number in range(len(self.files)):
            tokens = {name: each.models[number].tokens for name, each in self.by_class.items()}
            of_classes = {name: Figures.over([each]) for name, each in tokens.items()}
            found.append({**of_classes, ALL: Figures.over(list(tokens.values()))})
        return tuple(found)

    @cached_property
    def comparisons(self) -> tuple[FileComparison, ...]:
        """Every other file against the stock one; nothing without one."""
        if self._first.stock is None:
            return ()
        tokens = {name: [model.tokens for model in each.models] for name, each in self.by_class.items()}
        floors = {name: each.kld for name, each in self.noise.items()}
        return compare_files([file.path for file in self.files], self._first.stock, tokens, floors or None)

    @property
    def noise(self) -> Mapping[str, NoiseFloor]:
        """Class -> its noise floor; nothing where it was not measured."""
        return {name: each.noise for name, each in self.by_class.items() if each.noise is not None}

    def __repr__(self) -> str:
        files = ", ".join(
            f"{file.path.name}: KLD {figures[ALL].kld.value:.6f}"
            for file, figures in zip(self.files, self.figures, strict=True)
        )
        n_classes = len(self.by_class)
        return f"<Evaluation of {self.base_path.name} on {n_classes} classes of {self.suite.name}: {files}>"

    def _repr_html_(self) -> str:
        heads, *rows = _overall(self)
        return html_table(repr(self), heads, rows)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each file and class, and one named "all" for each file over all classes.

        Ratios are fractions, sizes in bytes. Errors are standard errors over chunks; see Figures.
        """
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        texts = {name: each.text for name, each in self.by_class.items()}
        for file, of_file in zip(self.files, self.figures, strict=True):
            for name, figures in of_file.items():
                measured = [texts[name]] if name in texts else list(texts.values())
                yield {
                    "suite": self.suite.name,
                    "class": name,
                    "file": str(file.path),
                    "n_bytes": file.n_bytes,
                    "bits_per_weight": file.bits_per_weight,
                    "n_chunks": sum(text.n_chunks for text in measured),
                    "n_tokens_measured": sum(text.n_tokens_measured for text in measured),
                    **figures.row(),
                }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return `rows` as a table of pandas; raises BadRequest where pandas is missing."""
        return dataframe(self.rows())

    def to_json(self) -> dict[str, Any]:
        """Return all but the values of single tokens as JSON data: ratios as fractions, sizes in bytes."""
        return {
            "suite": {
                "name": self.suite.name,
                "title": self.suite.title,
                "quick": self.suite.quick,
                "classes": [_class_json(each) for each in self.by_class.values()],
            },
            "base": {"path": str(self.base_path)},
            **self._noise_json(),
            **comparisons_json(self.comparisons),
            "models": [self._file_json(number) for number in range(len(self.files))],
        }

    def _noise_json(self) -> dict[str, Any]:
        if not self.noise:
            return {}
        classes = {name: each.to_json() for name, each in self.noise.items()}
        return {"noise_floor": {ALL: mean_floor(self.noise.values()), "classes": classes}}

    def _file_json(self, number: int) -> dict[str, Any]:
        figures = self.figures[number]
        return {
            **self.files[number].about_json(),
            ALL: figures[ALL].row(),
            "classes": {
                name: {**figures[name].row(), "evaluation": each.models[number].measures_json()}
                for name, each in self.by_class.items()
            },
        }


def _class_json(evaluation: Evaluation) -> dict[str, Any]:
    text, about = evaluation.text, _class_of(evaluation)
    return {
        "name": about.name,
        "title": about.title,
        "sha256": about.sha256,
        "template": about.template,
        "notes": list(about.notes),
        "n_chunks": text.n_chunks,
        "chunk_size": text.chunk_size,
        "n_tokens_measured": text.n_tokens_measured,
        "base_ppl": evaluation.base_ppl.value,
    }


def _class_of(evaluation: Evaluation) -> ClassChunks:
    found = evaluation.text.text_class
    assert found is not None
    return found


_CLASSES = ("class", "chunks", "context", "tokens measured", "PPL of the base")
_OVERALL = ("model", "size", "bpw", "KLD", "99.9%", "same top", "flips", "ln ratio")
_BY_CLASS = ("class", "KLD", "median", "99%", "99.9%", "same top", "flips", "ln ratio")

_MOST_NOTES = 5
"""Number of notes that are shown for a class; JSON has all."""


def suite_lines(evaluation: SuiteEvaluation) -> list[str]:
    """Print the figures over all classes as lines, and then those of every file by class."""
    suite, classes = evaluation.suite, [*evaluation.by_class.values()]
    n_measured = sum(each.text.n_tokens_measured for each in classes)
    quick = ", a tenth of each" if suite.quick else ""
    lines = [
        f"suite {suite.name}: {len(classes)} classes{quick}, {n_measured} tokens measured",
        f"base {evaluation.base_path}",
        "",
        *table([_CLASSES, *map(_class_row, classes)], right=range(1, len(_CLASSES))),
        *(f"note: {note}" for each in classes for note in _notes(_class_of(each))),
        "",
        "over all classes, which weigh the same",
        *table(_overall(evaluation), right=range(1, len(_OVERALL))),
    ]
    for file, figures in zip(evaluation.files, evaluation.figures, strict=True):
        rows = [(name, *_by_class(each)) for name, each in figures.items()]
        lines += ["", f"{file.path.name} by class"]
        lines += table([_BY_CLASS, *rows], right=range(1, len(_BY_CLASS)))
    if evaluation.noise:
        klds = [
            (file.path.name, {name: each.kld.value for name, each in figures.items()})
            for file, figures in zip(evaluation.files, evaluation.figures, strict=True)
        ]
        lines += ["", *noise_by_class_lines(evaluation.noise, klds)]
    return [*lines, *comparison_lines(evaluation.comparisons)]


def _class_row(evaluation: Evaluation) -> Sequence[str]:
    text = evaluation.text
    return (
        _class_of(evaluation).name,
        str(text.n_chunks),
        str(text.chunk_size),
        str(text.n_tokens_measured),
        f"{evaluation.base_ppl.value:.4f}",
    )


def _notes(about: ClassChunks) -> Iterator[str]:
    yield from (f"{about.name}: {note}" for note in about.notes[:_MOST_NOTES])
    if len(about.notes) > _MOST_NOTES:
        yield f"{about.name}: {len(about.notes) - _MOST_NOTES} more like these"


def _overall(evaluation: SuiteEvaluation) -> list[Sequence[str]]:
    """Return the heads and rows of the table over all classes."""
    rows = [
        (
            file.path.name,
            size_text(file.n_bytes),
            f"{file.bits_per_weight:.2f}",
            figures[ALL].kld.text(6),
            f"{figures[ALL].p99_9:.5f}",
            *_shares(figures[ALL]),
        )
        for file, figures in zip(evaluation.files, evaluation.figures, strict=True)
    ]
    return [_OVERALL, *rows]


def _by_class(figures: Figures) -> Sequence[str]:
    percentiles = (figures.median, figures.p99, figures.p99_9)
    return (figures.kld.text(6), *(f"{value:.5f}" for value in percentiles), *_shares(figures))


def _shares(figures: Figures) -> Sequence[str]:
    return (
        f"{figures.same_top.value:.2%}",
        f"{figures.flips.value:.2%}",
        f"{figures.ln_ratio.value:.5f}",
    )
