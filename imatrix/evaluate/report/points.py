"""Points that a report draws of files, by size and divergence, and prices of tensors at their types.

Points are what an evaluation has measured, and what earlier ones have. Prices come from a losses file: what a
tensor costs, and what more bytes for it would save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convert.card.facts import Report, ReportText
from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import shown
from imatrix.evaluate.evaluation import Evaluation
from imatrix.texts.tokenise import ClassChunks
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


def measured_points(evaluation: Evaluation) -> tuple[Point, ...]:
    """Return the files of an evaluation, with their mean divergences."""
    files = zip(evaluation.models, evaluation.mean_klds, strict=True)
    return tuple(Point(model.path.name, model.n_bytes, kld, 0) for model, kld in files)


def report_points(report: Report, group: int) -> tuple[Point, ...]:
    """Return the files of an evaluation that its JSON tells."""
    return tuple(Point(shown(each.name), each.n_bytes, each.kld, group) for each in report.files)


def _same_text(earlier: Report, here: ClassChunks) -> ReportText:
    """Find the same class in an earlier evaluation, or its one text; raises BadRequest if there is none."""
    name = None if here.is_alone else here.name
    for each in earlier.texts:
        if each.name == name:
            return each
    what = "measured on a suite" if name is None else f"not measured on the class {name}"
    raise BadRequest(f"{earlier.path}: {what}")


def refuse_another_text(earlier: Report, text: ClassChunks) -> None:
    """Raise BadRequest if the earlier evaluation used another text, or cut it otherwise."""
    found = _same_text(earlier, text)
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


def refuse_other_classes(earlier: Report, names: Sequence[str]) -> None:
    """Raise BadRequest if the earlier evaluation has classes that a suite lacks, or is of one text."""
    more = [str(each.name) for each in earlier.texts if each.name not in names]
    if more:
        is_suite = earlier.texts[0].name is not None
        what = f"classes that are not here: {', '.join(more)}" if is_suite else "one text"
        raise BadRequest(f"{earlier.path}: measured on {what}")


def is_of_base(earlier: Report, evaluation: Evaluation) -> bool:
    """Tell whether an earlier evaluation of the same texts can be of the same base."""
    return _strange(earlier, evaluation) is None


def refuse_another_base(earlier: Report, evaluation: Evaluation) -> None:
    """Raise BadRequest if the perplexity of the earlier evaluation's base says that it is another model."""
    strange = _strange(earlier, evaluation)
    if strange is not None:
        there, here = strange
        raise BadRequest(f"{earlier.path}: measured against another base (PPL {there:.4f}, here {here:.4f})")


def _strange(earlier: Report, evaluation: Evaluation) -> tuple[float, float] | None:
    """Return two perplexities on one text that no two computations of one base have; None: there are none."""
    for each in evaluation.by_class.values():
        if each.base_ppl is None:
            raise BadRequest(f"{earlier.path}: measured predictions, and vectors are compared here")
        there, here = _same_text(earlier, each.text).base_ppl, each.base_ppl.value
        if abs(there / here - 1) > _NEAR:
            return there, here
    return None


def earlier_points(earlier: Report, group: int, evaluation: Evaluation) -> tuple[Point, ...]:
    """Return the files of an earlier evaluation.

    raises  BadRequest if it was measured on other texts than `evaluation`, or against another base
    """
    for each in evaluation.by_class.values():
        refuse_another_text(earlier, each.text)
    refuse_another_base(earlier, evaluation)
    return report_points(earlier, group)


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

    loss     predicted for stock encoding, nats per token
    larger   the larger type that would save most for each byte; None where no larger one saves anything
    per_mib  what it would save for each MiB that it takes more, nats per token; 0 with no larger one
    """

    loss: float
    larger: str | None
    per_mib: float


def prices_of(tensors: Sequence[TensorInfo], losses: Sensitivities) -> dict[str, Price]:
    """Price the tensors of a file that the losses know at their types.

    raises  BadRequest for losses of another model
    """
    here = {tensor.name for tensor in tensors}
    for name in losses.tensors:
        if name not in here:
            raise BadRequest(
                f"{name}: has losses, but the file lacks this tensor; were they measured on another model?"
            )
    return {
        tensor.name: _price(tensor, measured)
        for tensor in tensors
        if (measured := losses.tensors.get(tensor.name)) is not None and tensor.type.name in measured.by_type
    }


def _price(tensor: TensorInfo, measured: TensorSensitivity) -> Price:
    expected = tensor.type.tensor_bytes(measured.shape)
    if tensor.n_bytes != expected:
        raise BadRequest(
            f"{tensor.name}: {tensor.n_bytes:,} bytes as {tensor.type}, and the losses have a shape of"
            f" {expected:,}; losses of another model?"
        )
    loss, best = measured.by_type[tensor.type.name], (0.0, "")
    for name, less in measured.by_type.items():
        more_bytes = by_name(name).tensor_bytes(measured.shape) - tensor.n_bytes
        if more_bytes > 0 and less < loss:
            best = max(best, ((loss - less) / more_bytes * MIB, name))
    return Price(loss, best[1] or None, best[0])
