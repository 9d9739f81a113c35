"""The steps of a run, in order, as one list of values: the record, the dry run and the run itself read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from convert.card.markdown import as_address, as_markdown
from convert.card.write import CARD_NAME, CardRequest, write_card
from gguf_tools import __version__
from gguf_tools.choices import filled
from gguf_tools.commands.attestation import ATTESTATION_NAME, statement
from gguf_tools.commands.cook.estimate import Cost, Estimates
from gguf_tools.commands.cook.files import make_files
from gguf_tools.commands.cook.record import FOLDER, Record
from gguf_tools.commands.cook.request import CookRequest, WantedFile
from gguf_tools.files.inputs import InputWatch, gguf_inputs
from gguf_tools.files.named_files import sha256_of, write_whole
from gguf_tools.findings import teller
from gguf_tools.format.shards import open_gguf
from gguf_tools.hub.upload import files_of_a_model
from gguf_tools.progress import Shown, reporting
from gguf_tools.text import json_text
from imatrix.collecting import collect
from imatrix.evaluate.options import EvaluateOptions
from imatrix.evaluate.pipeline import evaluating
from imatrix.options import CollectOptions
from imatrix.sensitivities.measure import SensitivityOptions, sensitivity
from imatrix.texts.mixture import mixture_sha256

CARD = "card"
"""Name of the step that writes README.md, which is recognised by what is in it."""

_SUMS_NAME = "SHA256SUMS"
_OF_A_MODEL = (".json", ".safetensors", ".model", ".jinja", ".txt")
"""Endings of the files in a folder that decide what is made of it."""


@dataclass(frozen=True)
class Cooking:
    """A request under way, with the record of its folder; what steps depend on is read once."""

    request: CookRequest
    record: Record

    @cached_property
    def model(self) -> list[list[str]]:
        """The files of the model, and what they are recognised by."""
        return _model_state(self.request.source)

    @cached_property
    def of_text(self) -> Mapping[str, Any]:
        """Facts that decide the results of a model on the calibration text."""
        cut = self.request.cut
        return {
            "model": self.model, "text": mixture_sha256(self.request.text), "context": cut.chunk_size,
            "chunks": cut.n_chunks, "dtype": self.request.forward.dtype, "version": __version__,
        }  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A step.

    name        in the record
    title       for people
    outputs     files that appear whole
    make        makes the outputs; gets a `progress`
    cost        estimates what it takes; gets the costs of the steps before it, too
    decided_by  what the outputs depend on; None: made anew in every run, from what the folder holds
    planned     title in a dry run; "": `title`
    renewed     when what decides has changed, outputs are made anew instead of the run being refused
    wanted      the file of a step that makes one: such steps are made together
    is_means    nobody has asked for the outputs by name; other steps need them
    """

    name: str
    title: str
    outputs: tuple[Path, ...]
    make: Callable[[Cooking, Shown], None]
    cost: Callable[[Estimates, Sequence[Cost]], Cost]
    decided_by: Callable[[Cooking], Mapping[str, Any]] | None = None
    planned: str = ""
    renewed: bool = False
    wanted: WantedFile | None = None
    is_means: bool = False


def costs_of(steps: Sequence[Step], estimates: Estimates) -> list[Cost]:
    """Estimate what each step takes."""
    costs: list[Cost] = []
    for step in steps:
        costs.append(step.cost(estimates, costs))
    return costs


def work_of_evaluation(request: CookRequest) -> Path:
    """Name the folder where an evaluation keeps finished layers."""
    return request.folder / FOLDER / "evaluation"


def steps_of(request: CookRequest) -> Iterator[Step]:
    """Yield the steps of a request, in order."""
    if request.matrix is not None:
        yield Step(
            "importances", "importances", (request.matrix,), _collect,
            lambda estimates, before: estimates.importances(),
            decided_by=lambda cooking: cooking.of_text,
            is_means=True,
        )  # fmt: skip
    if request.has_sizes:
        yield Step(
            "losses", "the loss of each tensor at each type", (request.losses,), _measure_losses,
            lambda estimates, before: estimates.losses(),
            decided_by=lambda cooking: cooking.of_text,
            planned="losses",
            is_means=True,
        )  # fmt: skip
    yield from map(_file_step, request.wanted, [request] * len(request.wanted))
    if request.held_out is not None:
        yield _evaluation_step(request, request.held_out)
    yield _attestation_step(request)
    yield Step(CARD, "card", (request.folder / CARD_NAME,), _write_card, lambda estimates, before: Cost(4096))
    yield Step(
        "sums", "checksums", (request.folder / _SUMS_NAME,), _write_sums,
        lambda estimates, before: estimates.sums(before),
    )  # fmt: skip


def _file_step(wanted: WantedFile, request: CookRequest) -> Step:
    def decided_by(cooking: Cooking) -> Mapping[str, Any]:
        record, begun_from = cooking.record, cooking.of_text
        if not request.calibrate:
            begun_from = {key: begun_from[key] for key in ("model", "version")}
        return {
            **begun_from,
            "calibrated": request.calibrate,
            "importances": None if request.matrix is None else record.digest(request.matrix),
            "losses": None if wanted.size is None else record.digest(request.losses),
            "mixture": wanted.decides,
            **({"--keep-grid": True} if request.keep_grid else {}),
        }

    return Step(
        f"file {wanted.label}", wanted.label, (request.output(wanted),),
        lambda cooking, progress: make_files(request, [wanted], progress),
        lambda estimates, before: estimates.file(wanted),
        decided_by,
        wanted=wanted,
    )  # fmt: skip


def _evaluation_step(request: CookRequest, text: Path) -> Step:
    outputs = [request.output(each) for each in request.wanted]

    def decided_by(cooking: Cooking) -> Mapping[str, Any]:
        cut = request.held_out_cut
        return {
            "model": cooking.model, "text": sha256_of(text), "context": cut.chunk_size,
            "chunks": cut.n_chunks,
            "dtype": request.forward.dtype, "version": __version__,
            "files": {output.name: cooking.record.digest(output) for output in outputs},
        }  # fmt: skip

    return Step(
        "evaluation", f"divergence on {text.name}", request.report,
        lambda cooking, progress: _evaluate(request, text, progress),
        lambda estimates, before: estimates.evaluation(text),
        decided_by,
        planned="divergence",
        renewed=True,
    )  # fmt: skip


def _attestation_step(request: CookRequest) -> Step:
    outputs = [request.output(each) for each in request.wanted]

    def decided_by(cooking: Cooking) -> Mapping[str, Any]:
        of_text = {key: cooking.of_text[key] for key in ("model", "text", "version")}
        return {**of_text, "files": {output.name: cooking.record.digest(output) for output in outputs}}

    def write(cooking: Cooking, progress: Shown) -> None:
        inputs = (request.source, request.text, request.matrix)
        made_of = [path for path in inputs if path is not None]
        said = statement(outputs, made_of, request.typed, cooking.record.digest)
        write_whole(request.folder / ATTESTATION_NAME, (json_text(said) + "\n").encode())

    return Step(
        "attestation", "attestation", (request.folder / ATTESTATION_NAME,), write,
        lambda estimates, before: Cost(4096),
        decided_by,
        renewed=True,
    )  # fmt: skip


def _collect(cooking: Cooking, progress: Shown) -> None:
    request = cooking.request
    options = filled(CollectOptions, request, any_text=request.force, force=True)
    collect(request.source, request.text, request.matrix, options, progress=progress)


def _measure_losses(cooking: Cooking, progress: Shown) -> None:
    request = cooking.request
    options = filled(SensitivityOptions, request, any_text=request.force, force=True)
    sensitivity(request.source, request.text, request.losses, options, progress)


def _evaluate(request: CookRequest, text: Path, progress: Shown) -> None:
    from imatrix.evaluate.report.standalone import size_chart_file

    files = [request.output(each) for each in request.wanted]
    cut, work = request.held_out_cut, work_of_evaluation(request)
    options = filled(EvaluateOptions, request, cut=cut, work=work)
    numbers, page, chart = request.report
    with ExitStack() as opened:
        with reporting(progress, "evaluating") as report:
            evaluation = opened.enter_context(evaluating(request.source, text, files, options, report))
        write_whole(page, evaluation.to_html().encode())
        write_whole(numbers, (json_text(evaluation.to_json()) + "\n").encode())
        write_whole(chart, size_chart_file(numbers).encode())


def _write_card(cooking: Cooking, progress: Shown) -> None:
    request = cooking.request
    files = [request.output(each) for each in request.wanted]
    numbers, page, chart = request.report
    measured = request.held_out is not None
    remarks = [
        f"![Mean divergence of each file against its size]({as_address(chart.name)})",
        f"[{as_markdown(page.name)}]({as_address(page.name)}) has more charts, and the texts where the files"
        " are worst.",
    ]
    card = filled(
        CardRequest,
        request,
        report=numbers if measured else None,
        remarks=remarks if measured else (),
    )
    commands = {file.name: request.typed for file in files} if request.typed else None
    tell = teller(quiet=request.progress is not True)
    write_card(files, card, commands, force=request.force, tell=tell)


def _write_sums(cooking: Cooking, progress: Shown) -> None:
    """Write the checksums of what belongs to the model in the folder, as `sha256sum -c` reads them."""
    folder, record = cooking.request.folder, cooking.record
    # Without the card, which its readers edit.
    paths = [path for path in files_of_a_model(folder)[0] if path.name not in (_SUMS_NAME, CARD_NAME)]
    lines = [f"{record.digest(path)}  {path.name}\n" for path in paths]
    write_whole(folder / _SUMS_NAME, "".join(lines).encode())


def _model_state(source: Path) -> list[list[str]]:
    """List the files that a model consists of, and what they are recognised by."""
    if source.is_dir():
        paths = [path for path in sorted(source.iterdir()) if path.suffix in _OF_A_MODEL and path.is_file()]
    else:
        with open_gguf(source) as file:
            return InputWatch(gguf_inputs(file)).recognised_by()
    return InputWatch(paths).recognised_by()
