"""Points that a report draws of files, by size and divergence, and prices of tensors at their types.

Points are what an evaluation has measured, and what earlier ones have. Prices come from a losses file: what a
tensor costs, and what more bytes for it would save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.files.documents import count_at, number_at, read_document
from gguf_tools.format.ggml_types import by_name
from gguf_tools.text import shown
from imatrix.evaluate.evaluation import EvaluatedModel, EvaluatedText, Evaluation, TensorSize
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity

_NEAR = 0.01
"""Largest relative difference of the perplexities of one base: bfloat16 and float32 are not as far apart."""


@dataclass(frozen=True)
class Point:
    """A file with its size and its mean divergence.

    group  the evaluation that it comes from: 0 for the newest, then the others in order
    """

    name: str
    n_bytes: int
    kld: float
    group: int


@dataclass(frozen=True)
class EarlierText:
    """Facts of an earlier evaluation about its text, or about a class of its suite.

    name  of the class; None for a text that is alone
    """

    name: str | None
    sha256: str | None
    n_chunks: int
    chunk_size: int
    base_ppl: float

    @classmethod
    def of(cls, name: str | None, about: Any, base_ppl: float) -> EarlierText:
        """Read it; `about` is JSON data."""
        sha256 = about["sha256"] and shown(str(about["sha256"]))
        return cls(name, sha256, count_at(about, "n_chunks"), count_at(about, "chunk_size"), base_ppl)


@dataclass(frozen=True)
class Earlier:
    """An earlier evaluation, as its JSON tells it.

    texts  the one text, or the classes of a suite
    files  name, size in bytes and mean divergence of each
    """

    path: Path
    texts: tuple[EarlierText, ...]
    files: tuple[tuple[str, int, float], ...]

    def text(self, name: str | None) -> EarlierText:
        """Return a class, or with None the one text; raises BadRequest if there is none."""
        for each in self.texts:
            if each.name == name:
                return each
        what = "measured on a suite" if name is None else f"not measured on the class {name}"
        raise BadRequest(f"{self.path}: {what}")


def measured_points(models: Sequence[EvaluatedModel], klds: Sequence[float]) -> tuple[Point, ...]:
    """Return the files of an evaluation, with their mean divergences."""
    return tuple(
        Point(model.path.name, model.n_bytes, kld, 0) for model, kld in zip(models, klds, strict=True)
    )


def read_earlier(path: Path) -> Earlier:
    """Read what an earlier evaluation, on a text or a suite, has written with --json.

    raises  BadRequest for a file that is something else
    """
    content = read_document(path, unless="not what evaluate --json writes")
    try:
        suite = content.get("suite")
        if suite is None:
            texts = [EarlierText.of(None, content["text"], _ppl(content["base"], "ppl"))]
        else:
            classes = ((shown(str(each["name"])), each) for each in suite["classes"])
            texts = [EarlierText.of(name, each, _ppl(each, "base_ppl")) for name, each in classes]
        files = [
            (
                shown(Path(model["path"]).name),
                count_at(model, "n_bytes"),
                number_at(model["kld"], "mean") if suite is None else number_at(model["all"], "kld"),
            )
            for model in content["models"]
        ]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadRequest(f"{path}: not what evaluate --json writes ({shown(str(error))})") from error
    return Earlier(path, tuple(texts), tuple(files))


def _ppl(entry: Any, key: str) -> float:
    """Return a perplexity, which is above 0."""
    if (found := number_at(entry, key)) <= 0:
        raise ValueError(f"{key} is {found}, expected more than 0")
    return found


def refuse_another_text(earlier: Earlier, text: EvaluatedText) -> None:
    """Raise BadRequest if the earlier evaluation used another text, or cut it otherwise."""
    found = earlier.text(class_name(text))
    where = "" if found.name is None else f"class {found.name}: "
    for what, there, here in (
        ("text (sha256", found.sha256, text.sha256),
        ("context (tokens", found.chunk_size, text.chunk_size),
    ):
        if there != here:
            raise BadRequest(f"{earlier.path}: {where}measured on another {what} {there}, here {here})")
    if found.n_chunks != text.n_chunks:
        raise BadRequest(
            f"{earlier.path}: {where}measured on {found.n_chunks} chunks of the text, here {text.n_chunks}"
        )


def refuse_other_classes(earlier: Earlier, names: Sequence[str]) -> None:
    """Raise BadRequest if the earlier evaluation has classes that a suite lacks, or is of one text."""
    more = [str(each.name) for each in earlier.texts if each.name not in names]
    if more:
        is_suite = earlier.texts[0].name is not None
        what = f"classes that are not here: {', '.join(more)}" if is_suite else "one text"
        raise BadRequest(f"{earlier.path}: measured on {what}")


def class_name(text: EvaluatedText) -> str | None:
    """Return the name of the class that a text is; None for a text that is alone."""
    return None if text.text_class is None else text.text_class.name


def is_of_base(earlier: Earlier, evaluations: Sequence[Evaluation]) -> bool:
    """Tell whether an earlier evaluation of the same texts can be of the same base."""
    return _strange(earlier, evaluations) is None


def refuse_another_base(earlier: Earlier, evaluations: Sequence[Evaluation]) -> None:
    """Raise BadRequest if the perplexity of the earlier evaluation's base says that it is another model."""
    strange = _strange(earlier, evaluations)
    if strange is not None:
        there, here = strange
        raise BadRequest(f"{earlier.path}: measured against another base (PPL {there:.4f}, here {here:.4f})")


def _strange(earlier: Earlier, evaluations: Sequence[Evaluation]) -> tuple[float, float] | None:
    """Return two perplexities on one text that no two computations of one base have; None: there are none."""
    for each in evaluations:
        there, here = earlier.text(class_name(each.text)).base_ppl, each.base_ppl.value
        if abs(there / here - 1) > _NEAR:
            return there, here
    return None


def earlier_points(earlier: Earlier, group: int, evaluations: Sequence[Evaluation]) -> tuple[Point, ...]:
    """Return the files of an earlier evaluation.

    evaluations  on one text, or on each class of a suite
    raises       BadRequest if it was measured on another text, or against another base
    """
    for each in evaluations:
        refuse_another_text(earlier, each.text)
    refuse_another_base(earlier, evaluations)
    return tuple(Point(name, n_bytes, kld, group) for name, n_bytes, kld in earlier.files)


def pareto_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the files that no other beats in both size and divergence, the smallest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.n_bytes, point.kld)):
        if not front or point.kld < front[-1].kld:
            front.append(point)
    return tuple(front)


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without their endings and without what all of them begin with.

    >>> short_names(["lite-Q2_K.gguf", "lite-Q3_K_M.gguf"])
    ['Q2_K', 'Q3_K_M']
    """
    stems = [name.removesuffix(".gguf") for name in names]
    if len(stems) < 2:
        return stems
    common = stems[0][: _n_common(stems)]
    start = max(common.rfind(separator) for separator in "-. ") + 1  # types have "_" inside
    shorter = [stem[start:] for stem in stems]
    return shorter if all(shorter) else stems


def _n_common(texts: Sequence[str]) -> int:
    """Count the letters that all texts begin with."""
    columns = zip(*texts, strict=False)
    return next(
        (number for number, column in enumerate(columns) if len(set(column)) > 1), min(map(len, texts))
    )


MIB = 1 << 20


@dataclass(frozen=True)
class Price:
    """Cost of a tensor.

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
