"""Regroup the rows of a GGUF file: decide, lay out, fill, publish.

`prepare` reads headers and decides everything, down to the exact size of the output; `repack` then has the
output written (see quantize/fill/outputs.py). Bytes pass as they are or in another order, and no weight is
decoded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from gguf_tools.errors import BadRequest
from gguf_tools.format.shards import GGUFSet
from gguf_tools.text import size_text
from quantize.change import Changed, change_file
from quantize.fill.encode import FillJob
from quantize.plan.decide import Decider, TensorPlan
from quantize.plan.plan import Plan
from quantize.prepare import Preparation, lay_out, parts_of, source_bytes
from quantize.repack.file_types import regrouped_metadata
from quantize.repack.rules import Regrouping, Regroupings, RepackOptions, plan_regroupings
from quantize.repack.sources import RegroupedSources
from quantize.roles import tensor_role
from quantize.run_options import RunChoices, RunOptions, merge_choices


class RepackChoices(RunChoices, total=False):
    """The fields of RepackOptions and RunOptions as keyword arguments."""

    to: tuple[str, ...]
    undo: bool
    only: tuple[str, ...]
    keep_split: bool


@dataclass(frozen=True)
class RepackChange:
    """All that is decided before a row is read.

    source       the file or split set
    regroupings  what becomes of its tensors, in order
    preparation  the same as a plan, with the layout of the output
    """

    source: Path
    regroupings: Regroupings
    preparation: Preparation

    @property
    def is_needed(self) -> bool:
        """Whether the output would differ from the input."""
        return any(each.is_regrouped for each in self.regroupings.tensors)

    def lines(self) -> Iterator[str]:
        """Yield the changes of types with their counts, then the size and the notes."""
        if not self.is_needed:
            yield f"{self.source}: nothing to regroup; nothing is written"
        else:
            ways = Counter(_way(each) for each in self.regroupings.tensors if each.is_regrouped)
            yield from (f"{way}: {count} tensors" for way, count in ways.items())
            n_kept = len(self.regroupings.tensors) - ways.total()
            yield f"as they are: {n_kept} tensors"
            total = self.preparation.total_bytes
            yield f"lossless: every weight keeps its value; {size_text(total)} ({total:,} bytes)"
        yield from (f"note: {note}" for note in self.regroupings.notes)

    def describe(self, *, written: bool) -> dict[str, Any]:
        """Return the change as plain data for JSON.

        written  whether the outputs have been written
        """
        return {
            "source": str(self.source),
            "needed": self.is_needed,
            "tensors": [
                {"name": each.info.name, "from": each.origin.name, "to": each.info.type.name}
                for each in self.regroupings.tensors
            ],
            "notes": list(self.regroupings.notes),
            "total_bytes": self.preparation.total_bytes,
            "written": [str(output.path) for output in self.preparation.outputs] if written else [],
        }


def repack(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: RepackOptions | None = None,
    run: RunOptions | None = None,
    **choices: Unpack[RepackChoices],
) -> Changed[RepackChange]:
    """Write the GGUF file `source` (or the split set it belongs to) as `output` with its rows regrouped.

        repack("lite-Q4_K_M.gguf", "lite-Q4_K_R4.gguf")
        repack("lite-Q4_K_R4.gguf", "lite-Q4_K_M.gguf", undo=True)

    options  what to regroup: RepackOptions
    run      how to run: RunOptions
    choices  fields of both as keyword arguments; they replace those of `options` and `run`
    raises   ToolkitError. The old output then stays as it was, and finished work is kept for the next run

    The two calls above give back the first file, byte for byte. A file with nothing to regroup is not written
    again: the result then has no paths.
    """
    options, run = merge_choices(options or RepackOptions(), run, choices)
    return change_file(source, lambda opened: prepare(opened, Path(output), options), _fill_job, run)


def prepare(source: GGUFSet, output: Path, options: RepackOptions | None = None) -> RepackChange:
    """Decide which tensors of `source` are regrouped, and lay the output out; see `repack`.

    raises  what `plan_regroupings` does, and BadRequest for a big-endian file and for types that have bytes
            behind their rows
    """
    options = options or RepackOptions()
    tensors = tuple(source.tensors.values())
    if source.endian == "big":
        raise BadRequest(
            f"{source.path}: is big-endian, and interleaved rows are known in little-endian only"
        )
    odd = next((info for info in tensors if info.type.tensor_meta_bytes), None)
    if odd is not None:
        raise BadRequest(f"{source.path}: {odd.name} is {odd.type}, which has bytes after its rows")
    regroupings = plan_regroupings(tensors, options)
    metadata = regrouped_metadata(source.metadata, undo=options.undo)
    plan = Plan("undo" if options.undo else "repack", tuple(map(_tensor_plan, regroupings.tensors)))
    parts = parts_of(source, ((info, info.name) for info in plan.infos), keep_split=options.keep_split)
    outputs = lay_out(output, metadata, parts, source.endian)
    return RepackChange(source.path, regroupings, Preparation(plan, outputs, source_bytes(plan)))


def _tensor_plan(each: Regrouping) -> TensorPlan:
    return TensorPlan(
        name=each.info.name,
        shape=each.info.shape,
        role=tensor_role(each.info.name, each.info.shape).role,
        source_name=each.info.name,
        source_type=each.origin,
        target_type=each.info.type,
        decider=Decider.RULES if each.is_regrouped else Decider.KEPT,
        reason=_way(each) if each.is_regrouped else "as it is",
    )


def _way(each: Regrouping) -> str:
    return f"{each.origin} -> {each.info.type}"


def _fill_job(change: RepackChange, source: GGUFSet) -> FillJob:
    types = {each.info.name: each.info.type for each in change.regroupings.tensors if each.is_regrouped}
    spec = RegroupedSources(source.path, types)
    return FillJob(spec.of(source), {}, spec)
