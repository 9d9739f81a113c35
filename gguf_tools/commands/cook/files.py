"""The files that are cooked: planned, and made from one walk over the source or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from convert.sources import SourceOptions, plan_source
from gguf_tools.commands.cook.request import CookRequest, WantedFile
from gguf_tools.errors import BadRequest
from gguf_tools.findings import teller
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from gguf_tools.progress import Shown
from imatrix.calibrate.calibration import BegunCalibration
from quantize.importances.entries import ImportanceFile
from quantize.padding import PadChoice
from quantize.plan.recipe_files import Mixture, find_mixture
from quantize.plan.sensitivities import read_sensitivities
from quantize.run import Run, execute_together
from quantize.run_options import RunOptions
from quantize.size.solve import Planner, SizeRequest, nearest_recipe, size_padded


def make_files(request: CookRequest, wanted: Sequence[WantedFile], progress: Shown) -> None:
    """Make files, and resume those that an interrupted run has left in part.

    progress  see gguf_tools/progress.py
    raises    ToolkitError; finished work stays for the next run
    """
    chosen = [_mixture_of(request, each) for each in wanted]
    with ExitStack() as stack:
        runs = [
            stack.enter_context(_plan(request, mixture, request.output(each), request.calibration, pad=pad))
            for each, (mixture, pad) in zip(wanted, chosen, strict=True)
        ]
        how = RunOptions(
            request.forward.n_threads, request.restart, progress=progress,
            force=True,  # the folder's record has said what may be replaced
            tell=teller(quiet=progress is not True),
        )  # fmt: skip
        execute_together(runs, how)


@contextmanager
def plans(request: CookRequest) -> Iterator[Mapping[str, Run]]:
    """Give the plan of each file by its label, as if importances were there; nothing is read but headers.

    A file of a size is planned as the stock mixture that comes nearest to it.
    """
    promised = request.calibration or _PromisedMatrix(request.about_text)

    def plan(mixture: Mixture, wanted: WantedFile) -> AbstractContextManager[Run]:
        return _plan(request, mixture, request.output(wanted), promised, allow_problems=True)

    with ExitStack() as stack:
        yield {each.label: stack.enter_context(plan(_stand_in(each, plan), each)) for each in request.wanted}


class _PromisedMatrix(BegunCalibration):
    """Promises the importances of a matrix that is still to be collected.

    A file that is made with a matrix keeps no sketch of the text.
    """

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        return replace(super().promise(metadata, tensors), sketch=None)


def _plan(
    request: CookRequest,
    mixture: Mixture,
    output: Path,
    calibration: BegunCalibration | None,
    *,
    pad: PadChoice | None = "auto",
    allow_problems: bool = False,
) -> AbstractContextManager[Run]:
    importances = request.matrix if calibration is None else None
    options = SourceOptions(
        importances=importances, calibration=calibration, pad=pad, keep_grid=request.keep_grid
    )
    source = request.streamed or request.source
    return plan_source(source, output, mixture, options, allow_problems=allow_problems)


def _mixture_of(request: CookRequest, wanted: WantedFile) -> tuple[Mixture, PadChoice | None]:
    """Find the mixture of a file, the one that is wanted or the best one of the size, and its padding.

    raises  what `size_mixture` does
    """
    if wanted.mixture is not None:
        return wanted.mixture, "auto"
    output, calibration = request.output(wanted), request.calibration

    def planner_of(pad: PadChoice | None) -> Planner:
        return lambda mixture: _plan(request, mixture, output, calibration, pad=pad, allow_problems=True)

    sized, pad = size_padded(
        planner_of,
        SizeRequest(read_sensitivities(request.losses), size=wanted.size, calibrated=request.calibrate),
        None,
    )
    return sized.mixture, pad


def _stand_in(
    wanted: WantedFile, plan: Callable[[Mixture, WantedFile], AbstractContextManager[Run]]
) -> Mixture:
    if wanted.mixture is not None:
        return wanted.mixture
    assert wanted.size is not None
    bits = wanted.size.amount
    if wanted.size.kind == "bytes":
        with plan(find_mixture("F16"), wanted) as run:
            bits = 8 * wanted.size.amount / sum(info.n_elems for info in run.preparation.plan.infos)
    if not 0 < bits < 32:
        raise BadRequest(f"{wanted.label}: {bits:.1f} bits per weight, expected a size between 1 and 16")
    nearest = nearest_recipe(bits)
    return Mixture(nearest.name, nearest)
