"""Reports: a plan and its outcome, as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf_tools.choices import spoken
from gguf_tools.text import json_line, size_text
from quantize.plan.plan import Plan, TensorPlan
from quantize.prepare import TYPES_CHOSEN_KEY, Preparation
from quantize.run import Result, Run
from quantize.run_options import RunOptions


def dry_run_lines(
    run: Run, how: RunOptions, *, as_json: bool = False, summary: bool = False
) -> Iterator[str]:
    """Yield the lines of a dry run: the plan, its sums, and what the run would need.

    as_json  the plan as one JSON object, and nothing else
    summary  leave out the line of each tensor
    """
    done = run.preparation
    if as_json:
        yield json_line(done.plan.to_json(done.total_bytes))
        return
    if not summary:
        yield from plan_lines(done.plan)
    yield from total_lines(done)
    yield from note_lines(done.plan)
    yield from run.needs(how)


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield a line per tensor: number, name, shape, types, sizes, importances, reason."""
    name_width = max((len(tensor.name) for tensor in plan.tensors), default=0)
    shapes = [" x ".join(map(str, tensor.shape)) for tensor in plan.tensors]
    shape_width = max(map(len, shapes), default=0)
    total = len(plan.tensors)
    for number, (tensor, shape) in enumerate(zip(plan.tensors, shapes, strict=True), 1):
        yield (
            f"[{number:{len(str(total))}}/{total}] {tensor.name:{name_width}}  {shape:>{shape_width}}"
            f"  {_types_text(tensor):16}  {size_text(tensor.info.n_bytes):>10}  {_why(tensor)}"
        )


def _types_text(tensor: TensorPlan) -> str:
    if tensor.is_copied:
        return tensor.target_type.name
    return f"{tensor.source_type.name} -> {tensor.target_type.name}"


def _why(tensor: TensorPlan) -> str:
    if tensor.entry is None:
        return tensor.reason
    weighting = f": {tensor.weighting}" if tensor.weighting else ""
    return f"{tensor.reason} [importances{weighting}]"


def total_lines(preparation: Preparation) -> Iterator[str]:
    """Yield the sums of a plan: bytes by type, bits per weight, exact size of the output."""
    plan, outputs = preparation.plan, preparation.outputs
    is_chosen = TYPES_CHOSEN_KEY in outputs[0].layout.metadata
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in plan.infos:
        tensors[info.type.name] += 1
        sizes[info.type.name] += info.n_bytes
    for name, n_bytes in sizes.most_common():
        yield f"  {name:8} {tensors[name]:5} tensors  {size_text(n_bytes):>10}"
    yield (
        f"{plan.file_type}: {size_text(preparation.source_bytes)} -> {size_text(preparation.total_bytes)}"
        f" ({preparation.total_bytes:,} bytes), {plan.bits_per_weight:.2f} bits per weight"
        f"{', types chosen' if is_chosen else ''}"
    )
    if len(outputs) > 1:
        for output in outputs:
            yield f"  {output.path}  {size_text(output.layout.total_bytes)}"


def note_lines(plan: Plan, *, is_done: bool = False) -> Iterator[str]:
    """Yield the notes on a plan, in lines.

    is_done  the run is over: what is common and harmless has no news any more
    """
    for remark in plan.warnings if is_done else plan.remarks:
        yield f"note: {remark}"
    for problem in plan.problems:
        yield f"warning: this plan can't be run: {problem.text}"


def paths_text(paths: Sequence[Path]) -> str:
    """Name the outputs of a run by the first of them."""
    return f"{paths[0]}{f' and {len(paths) - 1} more parts' if len(paths) > 1 else ''}"


def found_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Say that the outputs of a run were there already."""
    yield spoken(f"{paths_text(paths)}: exists already, and is what you asked for; --force makes it anew")


def result_lines(result: Result) -> Iterator[str]:
    """Yield the summary of a run: the plan's sums, then where the output is and how long it took."""
    preparation = result.preparation
    if result.is_found:
        yield from found_lines(result.paths)
        return
    yield from total_lines(preparation)
    yield from note_lines(preparation.plan, is_done=True)
    written = result.written
    if written.n_resumed:
        yield f"resumed an interrupted run: {written.n_resumed} of {written.n_chunks} chunks were done"
    for path, count in written.reused.items():
        yield f"reused {count} of {len(preparation.plan.tensors)} tensors from {path}"
    for note in written.notes:
        yield f"note: {note}"
    if result.replaced:
        yield f"replaced {paths_text(result.replaced)}, which existed before"
    if written.verification is not None:
        yield str(written.verification)
    yield from written.calibration
    compiling = written.compile_seconds
    rate = preparation.plan.total_bytes / max(result.seconds - compiling, 1e-9)
    first_time = f", {compiling:.1f} s of them for compiling kernels, once" if compiling > 1 else ""
    limit = "" if written.limit is None else f", the limit was {written.limit}"
    took = f"{result.seconds:.1f} s{first_time} ({size_text(rate)} a second{limit})"
    yield f"wrote {paths_text(result.paths)} in {took}"
