"""What a run will do: steps with sizes, about how long each takes, and what the disk must hold.

Sizes of file types are right but for a few bytes of the header. Times are those of the arithmetic, at the
speed that this machine multiplies at and at the rates below. Expect a large model's to be right within a
factor of two; of a small one, starting and compiling take longer than that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrate.estimate import Work, calibration_seconds, flops_per_second, time_text
from calibrate.footprint import Shapes
from calibrate.options import CalibrationOptions, Coverage
from forward.gradients.forward_backward import BACKWARD_WORK
from forward.options import require_torch
from forward.text.tokens import Text
from gguf_cli.cook.making import plans
from gguf_cli.cook.request import CookRequest
from gguf_cli.cook.run import refuse
from gguf_cli.cook.steps import SUMS_NAME, losses_of, matrix_of, report_of
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.locks import usable_cores
from gguf_tools.text import size_text, table
from quantize.prepare import Preparation
from quantize.roles import layer_of
from quantize.run import Run

_RATES = (("IQ1", 70e6), ("IQ2", 30e6), ("IQ3", 28e6), ("Q", 100e6), ("IQ4", 250e6))
"""Weights a second that one thread encodes, by the beginning of the type's name: scripts/bench_kernels.py,
2026-11-21, with importances."""

_OTHER_RATE = 2e9
_HASH_RATE = 1e9
"""Bytes a second that are hashed for the checksums."""


@dataclass(frozen=True)
class _Line:
    """A step of the plan.

    seconds   on all threads
    is_exact  whether n_bytes is known from the plan of a file
    """

    title: str
    output: Path
    n_bytes: int
    seconds: float
    is_exact: bool = False


def plan_lines(request: CookRequest) -> Iterator[str]:
    """Yield the steps of a run, in lines; nothing is written, and of weights only headers are read.

    raises  what `cook` raises before it begins
    """
    require_torch("cooking")
    refuse(request)
    folder = next(path for path in (request.folder, *request.folder.absolute().parents) if path.exists())
    with plans(replace(request, folder=folder)) as runs:
        lines = _lines(request, runs)
    rows = [("step", "output", "size", "time")]
    for number, line in enumerate(lines, 1):
        done = line.output.exists()
        size = size_text(line.n_bytes) if line.is_exact else f"about {size_text(line.n_bytes)}"
        time = "there already" if done else _time(line.seconds)
        rows.append((f"[{number}] {line.title}", line.output.name, size, time))
    yield from table(rows, right=(2,))
    missing = [line for line in lines if not line.output.exists()]
    yield (
        f"{len(missing)} of {len(lines)} steps are left:"
        f" {_time(sum(line.seconds for line in missing))} on {_n_threads(request)} threads,"
        f" {size_text(sum(line.n_bytes for line in missing))} in {request.folder}"
        f" ({size_text(shutil.disk_usage(folder).free)} are free)"
    )


def _lines(request: CookRequest, runs: Mapping[str, Run]) -> list[_Line]:
    first = next(iter(runs.values())).preparation
    metadata, infos = first.outputs[0].layout.metadata, first.plan.infos
    coverage = Coverage.of(request.source, metadata, infos)
    shapes = Shapes.of(coverage.network, infos, (), metadata)
    speed = flops_per_second()
    text = CalibrationOptions(request.text, request.cut).read(metadata, coverage)
    forward = _forward_seconds(request, shapes, text, speed)
    lines = []
    matrix = matrix_of(request)
    if matrix is not None:
        lines.append(_Line("importances", matrix, _matrix_bytes(infos), forward))
    if request.has_sizes:
        n_bytes = 800 * len(infos)
        lines.append(_Line("losses", losses_of(request), n_bytes, (1 + BACKWARD_WORK) * forward))
    for each in request.wanted:
        preparation = runs[each.label].preparation
        seconds = _making_seconds(request, preparation, shapes, text, speed)
        n_bytes, is_exact = preparation.total_bytes, each.size is None
        if each.size is not None:
            n_weights = sum(info.n_elems for info in infos)
            n_bytes = int(each.size.amount * (n_weights / 8 if each.size.kind == "bpw" else 1))
        lines.append(_Line(each.label, request.output(each), n_bytes, seconds, is_exact))
    if request.held_out is not None:
        held_out = CalibrationOptions(request.held_out, request.held_out_cut).read(metadata, coverage)
        seconds = _forward_seconds(request, shapes, held_out, speed) * (1 + len(request.wanted))
        lines.append(_Line("divergence", report_of(request)[0], 1 << 20, seconds))
    lines.append(_Line("card", request.folder / "README.md", 4096, 0.0))
    n_bytes = sum(line.n_bytes for line in lines)
    lines.append(_Line("checksums", request.folder / SUMS_NAME, 100 * len(lines), n_bytes / _HASH_RATE))
    return lines


def _making_seconds(
    request: CookRequest, preparation: Preparation, shapes: Shapes, text: Text, speed: float
) -> float:
    """Return how long a file takes: encoding, or with a calibration all that it computes."""
    plan, n_threads = preparation.plan, _n_threads(request)
    if not request.calibrate:
        return sum(info.n_elems / _rate(info) for info in plan.infos) / n_threads
    made = [each for each in plan.infos if layer_of(each.name) is not None and len(each.shape) > 1]
    choices = CalibrationOptions(request.text, request.cut, forward=request.forward)
    shapes = replace(shapes, infos=plan.infos, made=made)
    return calibration_seconds(choices, shapes, text, n_threads, speed)


def _rate(info: TensorInfo) -> float:
    return next((rate for start, rate in _RATES if info.type.name.startswith(start)), _OTHER_RATE)


def _forward_seconds(request: CookRequest, shapes: Shapes, text: Text, speed: float) -> float:
    """Return how long a pass through all layers and the output matrix takes."""
    active = sum(info.n_elems * shapes.share(info) for info in shapes.infos if len(info.shape) > 1)
    n_threads = _n_threads(request)
    return Work(2 * active * text.inputs.size, 0.0).seconds_on(n_threads, speed, n_threads)


def _matrix_bytes(infos: Sequence[TensorInfo]) -> int:
    matrices = [info for info in infos if len(info.shape) > 1 and layer_of(info.name) is not None]
    return sum(4 * info.n_mats * (info.n_cols + 1) for info in matrices)


def _time(seconds: float) -> str:
    return "less than a minute" if seconds < 60 else f"about {time_text(seconds)}"


def _n_threads(request: CookRequest) -> int:
    return request.forward.n_threads or usable_cores()
