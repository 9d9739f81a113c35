"""A run: every step that is not finished yet, in order."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from calibrate.plan import refuse_text
from forward.gradients.forward_backward import forget_folders as forget_both_ways
from forward.work.work_folder import forget
from gguf_cli.cook.making import make_files, plans
from gguf_cli.cook.record import Record
from gguf_cli.cook.request import Collect, CookRequest
from gguf_cli.cook.steps import CARD, Step, losses_of, matrix_of, steps_of, work_of_evaluation
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.overwriting import refuse_shared
from gguf_tools.text import size_text
from quality.work_folders import forget_folders


def cook(request: CookRequest, collect: Collect) -> None:
    """Make everything that is asked for and not there yet.

    The same call goes on after an interruption, and gives the same files. With more types in it, what is
    there stays, and the rest is added.

    raises  ToolkitError. What is finished stays, and so does the work of the step that failed
    """
    refuse(request)
    with Record(request.folder) as record:
        steps = steps_of(request, record, collect)
        _refuse_shared(request, steps)
        for step in steps:
            _refuse_foreign(request, step, record)
        _refuse_what_does_not_fit(request)
        for step in steps:
            if step.decided_by is not None and (request.restart or not record.knows(step.name)):
                record.forget(step.name, step.outputs)
        if request.restart:
            record.clear()
            forget_folders(work_of_evaluation(request))
        number = 0
        for group in _together(steps, request):
            first, number = number + 1, number + len(group)
            label = f"[{first}/{len(steps)}]" if first == number else f"[{first}-{number}/{len(steps)}]"
            _carry_out(group, request, record, label)
        _tidy_up(request, steps)


def _tidy_up(request: CookRequest, steps: Sequence[Step]) -> None:
    """Remove work folders of finished steps that were killed while they removed them themselves."""
    forget_folders(work_of_evaluation(request))
    for output in (output for step in steps for output in step.outputs):
        forget(output)
        forget_both_ways(output)


def refuse(request: CookRequest) -> None:
    """Raise BadRequest, before hours of work, for what would fail at its end."""
    from convert.card.write import CARD_NAME, refuse_foreign

    if request.folder.exists() and not request.folder.is_dir():
        raise BadRequest(f"{request.folder}: is a file, expected a folder for the outputs")
    if request.source.is_dir() and request.folder.exists() and request.folder.samefile(request.source):
        raise BadRequest(f"{request.folder}: is the model's own folder; name another one for the outputs")
    if not request.force:
        refuse_foreign(request.folder / CARD_NAME)
    for text in (request.text, request.held_out):
        if text is not None and not text.is_file():
            raise BadRequest(f"{text}: no such file, expected a text")
    if request.held_out is not None:
        from quality.report.charts import require_matplotlib

        require_matplotlib()


def _refuse_shared(request: CookRequest, steps: Sequence[Step]) -> None:
    """Raise BadRequest if an output would replace the model or a text."""
    outputs = {f"{step.title}:": output for step in steps for output in step.outputs}
    inputs = (request.source, request.text, request.held_out)
    refuse_shared(outputs, [path for path in inputs if path is not None])


def _refuse_foreign(request: CookRequest, step: Step, record: Record) -> None:
    """Raise BadRequest for an output that is there and was not made here, unless it may be replaced."""
    there = [output for output in step.outputs if os.path.lexists(output)]
    if not there or record.knows(step.name) or step.name == CARD:  # which knows its own
        return
    if step.is_means:
        raise BadRequest(
            f"{there[0]}: is there already and was not cooked here; move it away, or give the files another"
            " --name"
        )
    if not request.force:
        raise BadRequest(
            f"{there[0]}: exists already and was not cooked here; --force replaces it, or name another folder"
        )


def _together(steps: Sequence[Step], request: CookRequest) -> Iterator[list[Step]]:
    """Yield steps that are made together: all files, unless each is calibrated by itself."""
    for are_files, group in groupby(steps, key=lambda step: step.wanted is not None):
        if are_files and not request.calibrate:
            yield list(group)
        else:
            yield from ([step] for step in group)


def _carry_out(group: Sequence[Step], request: CookRequest, record: Record, label: str) -> None:
    """Make what is not finished of steps that are made together, and note what is."""
    open_steps = []
    for step in group:
        if step.renewed and step.decided_by is not None and record.differs(step.name, step.decided_by()):
            record.forget(step.name, step.outputs)
        if step.decided_by is None or not record.is_finished(step.name, step.decided_by(), step.outputs):
            open_steps.append(step)
    if not request.quiet:
        titles = ", ".join(step.title for step in open_steps) or "there already"
        print(f"{label} {titles}", file=sys.stderr, flush=True)
    for step in open_steps:
        if step.decided_by is not None or not record.knows(step.name):
            record.begin(step.name, {} if step.decided_by is None else step.decided_by())
    if len(open_steps) > 1:
        wanted = [step.wanted for step in open_steps if step.wanted is not None]
        make_files(request, wanted, matrix_of(request), losses_of(request), label)
    else:
        for step in open_steps:
            step.make(label)
    for step in group:
        if step.decided_by is not None:
            record.finish(step.name, step.outputs)


def _refuse_what_does_not_fit(request: CookRequest) -> None:
    """Raise BadRequest for a text that is no good, and OutputError for a disk that is too small."""
    with plans(request) as runs:
        sizes = {label: run.preparation.total_bytes for label, run in runs.items()}
        first = next(iter(runs.values())).preparation
        refuse_text(request.text, request.cut, first)
        if request.held_out is not None:
            refuse_text(request.held_out, request.held_out_cut, first, measured=True)
    missing = [each for each in request.wanted if not request.output(each).exists()]
    n_bytes = sum(sizes[each.label] for each in missing)
    free = shutil.disk_usage(request.folder).free
    if n_bytes > free:
        raise OutputError(
            f"{request.folder}: {len(missing)} files take {size_text(n_bytes)}, and its disk has"
            f" {size_text(free)} left"
        )
