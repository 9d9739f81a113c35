"""The files themselves: planned and made together from one walk over the source, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from calibrate.calibration import Calibration
from calibrate.size.solve import SizeRequest, nearest_recipe, size_mixture
from convert.options import ConvertOptions
from convert.pipeline import plan_run as plan_folder
from gguf_cli.cook.request import CookRequest, WantedFile
from gguf_tools.errors import BadRequest
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
