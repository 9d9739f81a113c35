"""The steps of a run, in order: what each makes, what decides it, and how it is made.

The files themselves are planned and made together from one walk over the source, or one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrate.calibration import Calibration
from calibrate.sensitivities.measure import SensitivityOptions, sensitivity
from calibrate.size.solve import SizeRequest, nearest_recipe, size_mixture
from convert.card.write import CardRequest, write_card
from convert.options import ConvertOptions
from convert.pipeline import plan_run as plan_folder
from gguf_cli.cook.record import FOLDER, Record, sha256
from gguf_cli.cook.request import Collect, CookRequest, WantedFile
from gguf_tools import __version__
from gguf_tools.errors import BadRequest
from gguf_tools.files.atomic_write import write_whole
from gguf_tools.files.inputs import InputWatch, gguf_inputs
from gguf_tools.format.shards import open_gguf
from gguf_tools.hub.upload import files_of_a_model
from gguf_tools.progress import LayerBar
from gguf_tools.text import json_text
from quality.options import EvaluateOptions
from quality.pipeline import evaluating
from quantize.options import QuantizeOptions
from quantize.pipeline import plan_run as plan_file
from quantize.plan.recipe_files import Mixture, find_mixture
from quantize.plan.sensitivities import read_sensitivities
from quantize.run import Run, execute_together
from quantize.run_options import ProgressBar, RunOptions


def plan(
    request: CookRequest, mixture: Mixture, output: Path, matrix: Path | None, *, allow_problems: bool = False
) -> AbstractContextManager[Run]:
    """Plan a file; see `convert.pipeline.plan_run` and its twin for GGUF files."""
    calibration = None
    if request.calibrate:
        calibration = Calibration(
            request.text, cut=request.cut, forward=request.forward, any_text=request.force
        )
    if request.source.is_dir():
        options = ConvertOptions(outtype=mixture, importances=matrix, calibration=calibration)
        return plan_folder(request.streamed or request.source, output, options, allow_problems=allow_problems)
    quantized = QuantizeOptions(importances=matrix, calibration=calibration)
    return plan_file(request.source, output, mixture, quantized, allow_problems=allow_problems)


def mixture_of(request: CookRequest, wanted: WantedFile, matrix: Path | None, losses: Path) -> Mixture:
    """Return the mixture of a file: the one that is wanted, or the best one of the size.

    raises  what `size_mixture` does
    """
    if wanted.mixture is not None:
        return wanted.mixture
    sized = size_mixture(
        lambda mixture: plan(request, mixture, request.output(wanted), matrix, allow_problems=True),
        SizeRequest(read_sensitivities(losses), size=wanted.size, calibrated=request.calibrate),
    )
    return sized.mixture


def make_files(
    request: CookRequest, wanted: Sequence[WantedFile], matrix: Path | None, losses: Path, label: str
) -> None:
    """Make files, and resume those that an interrupted run has left in part.

    raises  ToolkitError; finished work stays for the next run
    """
    groups = [[each] for each in wanted] if request.calibrate else [list(wanted)]
    for group in groups:
        names = ", ".join(each.label for each in group)
        mixtures = [mixture_of(request, each, matrix, losses) for each in group]
        with ExitStack() as stack:
            runs = [
                stack.enter_context(plan(request, mixture, request.output(each), matrix))
                for each, mixture in zip(group, mixtures, strict=True)
            ]
            with ProgressBar(f"{label} {names}", quiet=request.quiet) as bar:
                how = RunOptions(
                    request.forward.n_threads, request.restart, compiling=bar.compiling, progress=bar.start
                )
                execute_together(runs, how)


@contextmanager
def plans(request: CookRequest) -> Iterator[Mapping[str, Run]]:
    """Give the plan of each file by its label, as if importances were there; nothing is read but headers.

    A file of a size is planned as the stock mixture that comes nearest to it.
    """
    request = replace(request, calibrate=True)  # which promises importances
    with ExitStack() as stack:
        yield {
            each.label: stack.enter_context(
                plan(request, _stand_in(request, each), request.output(each), None, allow_problems=True)
            )
            for each in request.wanted
        }


def _stand_in(request: CookRequest, wanted: WantedFile) -> Mixture:
    if wanted.mixture is not None:
        return wanted.mixture
    assert wanted.size is not None
    bits = wanted.size.amount
    if wanted.size.kind == "bytes":
        with plan(request, find_mixture("F16"), request.output(wanted), None, allow_problems=True) as run:
            bits = 8 * wanted.size.amount / sum(info.n_elems for info in run.preparation.plan.infos)
    if not 0 < bits < 32:
        raise BadRequest(f"{wanted.label}: {bits:.1f} bits per weight, expected a size between 1 and 16")
    nearest = nearest_recipe(bits)
    return Mixture(nearest.name, nearest)


CARD = "card"
"""Name of the step that writes README.md, which is recognised by what is in it."""

SUMS_NAME = "SHA256SUMS"
_OF_A_MODEL = (".json", ".safetensors", ".model", ".jinja", ".txt")
"""Endings of the files in a folder that decide what is made of it."""


@dataclass(frozen=True)
class Step:
    """A step.

    name        in the record
    title       for people
    outputs     files that appear whole
    decided_by  what the outputs depend on; None: made anew in every run, from what the folder holds
    make        makes the outputs; gets a label for its bar
    renewed     when what decides has changed, outputs are made anew instead of the run being refused
    wanted      the file of a step that makes one: such steps are made together
    is_means    nobody has asked for the outputs by name; other steps need them
    """

    name: str
    title: str
    outputs: tuple[Path, ...]
    decided_by: Callable[[], Mapping[str, Any]] | None
    make: Callable[[str], None]
    renewed: bool = False
    wanted: WantedFile | None = None
    is_means: bool = False


def steps_of(request: CookRequest, record: Record, collect: Collect) -> list[Step]:
    """Return the steps of a request.

    record   the record of its folder, which says what was made before
    collect  collects importances
    """
    return list(_steps(request, record, collect))


def matrix_of(request: CookRequest) -> Path | None:
    """Return where importances go; None with a calibration, which collects its own."""
    return None if request.calibrate else request.path(".imatrix.gguf")


def losses_of(request: CookRequest) -> Path:
    """Return where losses go; there are some only if a size is wanted."""
    return request.path(".losses.json")


def report_of(request: CookRequest) -> tuple[Path, Path]:
    """Return where the report goes: numbers and page."""
    return request.path(".evaluation.json"), request.path(".evaluation.html")


def work_of_evaluation(request: CookRequest) -> Path:
    """Return where an evaluation keeps finished layers."""
    return request.folder / FOLDER / "evaluation"


def _steps(request: CookRequest, record: Record, collect: Collect) -> Iterator[Step]:
    model = _model_state(request.source)
    cut, how = request.cut, request.forward
    text = {
        "text": sha256(request.text), "context": cut.chunk_size, "chunks": cut.n_chunks, "dtype": how.dtype,
        "version": __version__,
    }  # fmt: skip
    matrix, losses = matrix_of(request), losses_of(request)
    if matrix is not None:
        target = matrix
        yield Step(
            "importances", "importances", (target,),
            lambda: {"model": model, **text},
            lambda label: collect(request.source, request.text, target, request),
            is_means=True,
        )  # fmt: skip
    if request.has_sizes:
        yield Step(
            "losses", "what each tensor costs at each type", (losses,),
            lambda: {"model": model, **text},
            lambda label: _measure_losses(request, losses, label),
            is_means=True,
        )  # fmt: skip
    for each in request.wanted:
        yield Step(
            f"file {each.label}", each.label, (request.output(each),),
            _decisions(request, each, record, {"model": model, **text}),
            _maker(request, each),
            wanted=each,
        )  # fmt: skip
    if request.held_out is not None:
        held_out = request.held_out
        yield Step(
            "evaluation", f"divergence on {held_out.name}", report_of(request),
            lambda: {
                "model": model, "text": sha256(held_out), "context": request.held_out_cut.chunk_size,
                "chunks": request.held_out_cut.n_chunks, "dtype": how.dtype, "version": __version__,
                "files": {
                    request.output(each).name: record.digest(request.output(each)) for each in request.wanted
                },
            },
            lambda label: _measure(request, held_out, label),
            renewed=True,
        )  # fmt: skip
    yield Step(CARD, "card", (request.folder / "README.md",), None, lambda label: _write_card(request))
    yield Step(
        "sums", "checksums", (request.folder / SUMS_NAME,), None, lambda label: _write_sums(request, record)
    )


def _decisions(
    request: CookRequest, wanted: WantedFile, record: Record, begun_from: Mapping[str, Any]
) -> Callable[[], Mapping[str, Any]]:
    """Return a function that tells what decides a file, once importances and losses are there."""

    def decide() -> Mapping[str, Any]:
        matrix = matrix_of(request)
        return {
            **(begun_from if request.calibrate else {key: begun_from[key] for key in ("model", "version")}),
            "calibrated": request.calibrate,
            "importances": None if matrix is None else record.digest(matrix),
            "losses": None if wanted.size is None else record.digest(losses_of(request)),
            "mixture": wanted.decides,
        }

    return decide


def _maker(request: CookRequest, wanted: WantedFile) -> Callable[[str], None]:
    return lambda label: make_files(request, [wanted], matrix_of(request), losses_of(request), label)


def _measure_losses(request: CookRequest, output: Path, label: str) -> None:
    options = SensitivityOptions(
        cut=request.cut, forward=request.forward, restart=request.restart, any_text=request.force
    )
    with LayerBar(f"{label} layers there and back", quiet=request.quiet) as bar:
        sensitivity(request.source, request.text, output, options, bar)


def _measure(request: CookRequest, held_out: Path, label: str) -> None:
    from quality.report.page import report_page

    files = [request.output(each) for each in request.wanted]
    options = EvaluateOptions(
        cut=request.held_out_cut,
        forward=request.forward,
        work=work_of_evaluation(request),
        restart=request.restart,
    )
    numbers, page = report_of(request)
    with ExitStack() as opened:
        with LayerBar(f"{label} layers of all models", quiet=request.quiet) as bar:
            evaluation = opened.enter_context(evaluating(request.source, held_out, files, options, bar))
        write_whole(page, report_page(evaluation).encode())
        write_whole(numbers, (json_text(evaluation.to_json()) + "\n").encode())


def _write_card(request: CookRequest) -> None:
    files = [request.output(each) for each in request.wanted]
    numbers, page = report_of(request)
    measured = request.held_out is not None
    remarks = [f"[{page.name}]({page.name}) has charts, and the texts where the files are worst."]
    card = CardRequest(
        source=request.source,
        repo=request.repo,
        quantized_by=request.quantized_by,
        report=numbers if measured else None,
        remarks=remarks if measured else (),
    )
    commands = {file.name: request.typed for file in files} if request.typed else None
    write_card(files, card, commands, force=request.force)


def _write_sums(request: CookRequest, record: Record) -> None:
    """Write the checksums of what belongs to the model in the folder, as `sha256sum -c` reads them."""
    paths = [path for path in files_of_a_model(request.folder)[0] if path.name != SUMS_NAME]
    lines = [f"{record.digest(path)}  {path.name}\n" for path in paths]
    write_whole(request.folder / SUMS_NAME, "".join(lines).encode())


def _model_state(source: Path) -> list[list[str]]:
    """Return names of the files that a model consists of, and what they are recognised by."""
    if source.is_dir():
        paths = [path for path in sorted(source.iterdir()) if path.suffix in _OF_A_MODEL and path.is_file()]
    else:
        with open_gguf(source) as file:
            return InputWatch(gguf_inputs(file)).recognised_by()
    return InputWatch(paths).recognised_by()
