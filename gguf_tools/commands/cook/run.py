"""A run: every step that is not finished yet, in order; and a dry run, which shows them all.

A dry run says sizes, about how long each step takes, and what the disk must hold.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from gguf_tools.commands.cook.estimate import Estimates
from gguf_tools.commands.cook.files import make_files, plans
from gguf_tools.commands.cook.record import Record
from gguf_tools.commands.cook.request import CookRequest
from gguf_tools.commands.cook.steps import CARD, Cooking, Step, costs_of, steps_of, work_of_evaluation
from gguf_tools.drawing import require_matplotlib
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.early_checks import nearest_folder, refuse_early, refuse_shared
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import work_path
from gguf_tools.progress import WORK, Bar, Shown, clock_text, part_of
from gguf_tools.system.locks import usable_cores
from gguf_tools.text import counted, size_text, table
from imatrix.calibrate.estimate import time_text
from imatrix.calibrate.plan import refuse_text
from imatrix.forward.options import require_torch


def cook(request: CookRequest) -> dict[Path, float]:
    """Make everything that is asked for and not there yet; return how long each file took, in seconds.

    The same call goes on after an interruption, and gives the same files. With more types in it, what is
    there stays, and the rest is added.

    raises  ToolkitError. What is finished stays, and so does the work of the step that failed
    """
    refuse(request)
    steps = tuple(steps_of(request))
    with Record(request.folder, request.inputs) as record:
        cooking = Cooking(request, record)
        _refuse_shared(request, steps)
        if not request.restart:
            record.refuse_another_model(cooking.model)
        for step in steps:
            _refuse_foreign(request, step, record)
        costs = _refuse_what_does_not_fit(request, steps)
        for step in steps:
            if step.decided_by is not None and (request.restart or not record.knows(step.name)):
                record.forget(step.name, step.outputs)
        if request.restart:
            record.clear()
            forget(work_of_evaluation(request))
        seconds = _carry_out_all(cooking, steps, costs)
        # What finished steps leave that were killed while they removed their work folders themselves.
        outputs = (output for step in steps for output in step.outputs)
        for folder in (work_of_evaluation(request), *map(work_path, outputs)):
            forget(folder)
    return seconds


def _carry_out_all(cooking: Cooking, steps: Sequence[Step], costs: Mapping[str, float]) -> dict[Path, float]:
    """Carry out all steps under one bar; return how long each file took, those made together together."""
    request, number, seconds = cooking.request, 0, dict[Path, float]()
    with Bar(f"cooking {request.name}", WORK, request.progress) as bar:
        bar.start(sum(costs.values()))
        for group in _together(steps, request):
            first, number = number + 1, number + len(group)
            label = f"[{first}/{len(steps)}]" if first == number else f"[{first}-{number}/{len(steps)}]"
            started = time.monotonic()
            with (
                _interruptible(first - 1, len(steps)),
                part_of(bar, sum(costs[step.name] for step in group)) as progress,
            ):
                made = _carry_out(group, cooking, partial(_say, bar, label), progress)
            took = time.monotonic() - started
            seconds |= {output: took for step in made if step.wanted for output in step.outputs}
    return seconds


@contextmanager
def _interruptible(n_done: int, n_steps: int) -> Iterator[None]:
    """Have ctrl-C say what is kept, where the step that it ends does not say more."""
    try:
        yield
    except KeyboardInterrupt as error:
        if n_done and not getattr(error, "__notes__", []):
            error.add_note(
                f"{n_done} of {n_steps} steps are done and kept: the same command resumes from there"
            )
        raise


def _say(bar: Bar, label: str, text: str) -> None:
    bar.say(f"{label} {text}")


def made_lines(request: CookRequest, seconds: Mapping[Path, float]) -> Iterator[str]:
    """Yield a table of the files: size, bits per weight, divergence, and how long each took.

    seconds  of the files that were made in this run
    """
    from convert.card.facts import read_facts

    divergence = dict[str, float]()
    if request.held_out is not None:
        models = json.loads(request.report[0].read_text(encoding="utf-8"))["models"]
        divergence = {Path(model["path"]).name: model["kld"]["mean"] for model in models}
    rows = [("file", "size", "bits per weight", *(["KLD"] if divergence else []), "time")]
    for path in map(request.output, request.wanted):
        facts = read_facts(path)
        measured = [f"{divergence[path.name]:.5f}"] if divergence else []
        time_ = clock_text(seconds[path]) if path in seconds else "there already"
        rows.append((path.name, size_text(facts.n_bytes), f"{facts.bits_per_weight:.2f}", *measured, time_))
    yield from table(rows, right=range(1, len(rows[0])))


def refuse(request: CookRequest) -> None:
    """Raise BadRequest, before hours of work, for what would fail at its end."""
    from convert.card.write import CARD_NAME, refuse_foreign

    if request.folder.exists() and not request.folder.is_dir():
        raise BadRequest(f"{request.folder}: is a file, expected a folder for the outputs")
    if request.source.is_dir() and request.folder.exists() and request.folder.samefile(request.source):
        raise BadRequest(f"{request.folder}: is the model's own folder; name another one for the outputs")
    if not request.force:
        refuse_foreign(request.folder / CARD_NAME)
    refuse_early([nearest_folder(request.folder)], [request.held_out])
    refuse_early(texts=[request.text], folders=True)
    if request.held_out is not None:
        require_matplotlib("--evaluate")


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


def _carry_out(
    group: Sequence[Step], cooking: Cooking, say: Callable[[str], None], progress: Shown
) -> list[Step]:
    """Make what is not finished of steps that are made together, and note what is; return what was made."""
    request, record, open_steps = cooking.request, cooking.record, []
    for step in group:
        decided_by = None if step.decided_by is None else step.decided_by(cooking)
        if step.renewed and decided_by is not None and record.differs(step.name, decided_by):
            record.forget(step.name, step.outputs)
        if decided_by is None or not record.is_finished(step.name, decided_by, step.outputs):
            open_steps.append((step, decided_by))
    say(", ".join(step.title for step, _ in open_steps) or "there already")
    for step, decided_by in open_steps:
        if decided_by is not None or not record.knows(step.name):
            record.begin(step.name, decided_by or {})
    if len(open_steps) > 1:
        make_files(request, [step.wanted for step, _ in open_steps if step.wanted is not None], progress)
    else:
        for step, _ in open_steps:
            step.make(cooking, progress)
    for step in group:
        if step.decided_by is not None:
            record.finish(step.name, step.outputs)
    return [step for step, _ in open_steps]


def _refuse_what_does_not_fit(request: CookRequest, steps: Sequence[Step]) -> dict[str, float]:
    """Raise BadRequest for a text that is no good, and OutputError for a disk that is too small.

    returns  the seconds that each step will take, about
    """
    with plans(request) as runs:
        sizes = {label: run.preparation.total_bytes for label, run in runs.items()}
        first = next(iter(runs.values())).preparation
        refuse_text(request.text, request.cut, first)
        if request.held_out is not None:
            refuse_text(request.held_out, request.held_out_cut, first, measured=True)
        costs = costs_of(steps, Estimates(request, runs))
        seconds = {
            step.name: 0.0 if _is_there(step) else cost.seconds
            for step, cost in zip(steps, costs, strict=True)
        }
    missing = [each for each in request.wanted if not request.output(each).exists()]
    n_bytes = sum(sizes[each.label] for each in missing)
    free = shutil.disk_usage(request.folder).free
    if n_bytes > free:
        raise OutputError(
            f"{request.folder}: {counted(len(missing), 'file')} of {size_text(n_bytes)} in all, and its disk"
            f" has {size_text(free)} left"
        )
    return seconds


def _is_there(step: Step) -> bool:
    return step.decided_by is not None and all(output.exists() for output in step.outputs)


def plan_lines(request: CookRequest) -> Iterator[str]:
    """Yield the steps of a run, in lines; nothing is written, and of weights only headers are read.

    raises  what `cook` raises before it begins
    """
    require_torch("cooking")
    refuse(request)
    folder = nearest_folder(request.folder)
    steps = tuple(steps_of(request))
    with plans(replace(request, folder=folder)) as runs:
        estimates = Estimates(request, runs)
        costs = costs_of(steps, estimates)
    rows, missing = [("step", "output", "size", "time")], []
    for number, (step, cost) in enumerate(zip(steps, costs, strict=True), 1):
        output, size = step.outputs[0], size_text(cost.n_bytes)
        if not output.exists():
            missing.append(cost)
        time = "there already" if output.exists() else _time(cost.seconds)
        title = f"[{number}] {step.planned or step.title}"
        rows.append((title, output.name, size if cost.is_exact else f"about {size}", time))
    yield from table(rows, right=(2,))
    yield (
        f"{len(missing)} of {len(steps)} steps are left:"
        f" {_time(sum(cost.seconds for cost in missing))} with {counted(estimates.n_threads, 'thread')} on"
        f" {counted(usable_cores(), 'core')},"
        f" {size_text(sum(cost.n_bytes for cost in missing))} in {request.folder}"
        f" ({size_text(shutil.disk_usage(folder).free)} are free)"
    )


def _time(seconds: float) -> str:
    return "less than a minute" if seconds < 60 else f"about {time_text(seconds)}"
