"""Regroup the rows of a GGUF file: decide, lay out, fill, publish.

`prepare` reads headers and decides everything, down to the exact size of the output; `repack` then has the
output written (see quantize/fill/outputs.py). Bytes pass as they are or in another order, and no weight is
decoded.

A file that is taken apart again gets the number in `general.file_type` back that it had: several file types
share an interleaved one.
Provenance says which bytes a tensor has, and other bytes have another. It waits under another name for the
rows to be taken apart.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from gguf_tools.choices import with_choices
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.shards import GGUFSet
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import size_text
from quantize.change import Changed, change_file
from quantize.fill.encode import RowSources
from quantize.fill.provenance import PROVENANCE_KEY
from quantize.fill.sources import FLOAT_DTYPES, GGUFSources, GGUFTensor, MadeOfTensor, SourceTensor
from quantize.formats import get_decoder
from quantize.plan.decide import Decider, TensorPlan
from quantize.plan.plan import Plan
from quantize.prepare import Preparation, lay_out, parts_of, source_bytes
from quantize.repack.rules import Regrouping, Regroupings, RepackOptions, plan_regroupings
from quantize.roles import tensor_role
from quantize.run_options import RunChoices, RunOptions

FILE_TYPE_BEFORE = "gguf_tools.repack.file_type"
PROVENANCE_BEFORE = "gguf_tools.repack.provenance"

_INTERLEAVED: Mapping[int, int] = {
    2: 202, 7: 207, 8: 208, 10: 210, 11: 211, 12: 211, 13: 211, 14: 214, 15: 214, 16: 216, 17: 216, 18: 218,
    19: 219, 20: 220, 23: 223, 24: 224, 25: 225, 26: 226, 29: 229, 30: 230, 31: 231, 32: 232, 135: 335,
    138: 338, 139: 339, 140: 340, 141: 341, 145: 345, 149: 398, 150: 350,
}  # fmt: skip
"""Number of a file type -> that of the same interleaved (llama-quantize.cpp: repacked_ftype)."""

_APART = {new: old for old, new in sorted(_INTERLEAVED.items(), reverse=True)}
"""The inverse; of several the lowest, which is the file type that is least of a mixture."""


def _interleaved(metadata: Metadata) -> dict[str, Value]:
    """Return the metadata of a file whose rows are interleaved; nobody is to read the old provenance."""
    renamed = {PROVENANCE_BEFORE if key == PROVENANCE_KEY else key: each for key, each in metadata.items()}
    number = renamed.get(keys.FILE_TYPE)
    if number is None or number.data not in _INTERLEAVED:
        return renamed
    return {**renamed, keys.FILE_TYPE: Value.u32(_INTERLEAVED[number.data]), FILE_TYPE_BEFORE: number}


def _apart(metadata: Metadata) -> dict[str, Value]:
    """Return the metadata of a file whose rows are taken apart."""
    number, before = metadata.get(keys.FILE_TYPE), metadata.get(FILE_TYPE_BEFORE)
    if before is None and number is not None and number.data in _APART:
        before = Value.u32(_APART[number.data])
    kept = {
        PROVENANCE_KEY if key == PROVENANCE_BEFORE else key: value
        for key, value in metadata.items()
        if key != FILE_TYPE_BEFORE
    }
    return kept if before is None else {**kept, keys.FILE_TYPE: before}


@dataclass(frozen=True)
class Regrouped(MadeOfTensor):
    """A stored tensor whose rows are interleaved or taken apart; `type` is what they become."""

    tensor: GGUFTensor
    type: GGMLType

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        from quantize.formats.ik.interleaved.interleaved import from_base, to_base

        apart = self.type.rows_interleaved == 1
        grouped = self.tensor.type if apart else self.type
        group, n_cols = grouped.rows_interleaved, self.shape[-1]
        first, last = start // group * group, -(-stop // group) * group
        data = self.tensor.raw_rows(first, last).reshape(last - first, -1)
        rows = to_base(grouped, data, n_cols) if apart else from_base(grouped, data, n_cols)
        return rows[start - first : stop - first].reshape(-1)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        raw, dtype = self.raw_rows(start, stop), FLOAT_DTYPES.get(self.type)
        if dtype is not None:
            return raw.view(dtype).reshape(stop - start, -1)
        return get_decoder(self.type)(raw.reshape(stop - start, -1), self.shape[-1])


def _regrouped(file: GGUFSet, types: Mapping[str, GGMLType]) -> dict[str, SourceTensor]:
    """Take the tensors of a file, those in `types` as what their rows become."""
    stored = {name: GGUFTensor(file, name) for name in file.tensors}
    return {name: Regrouped(each, types[name]) if name in types else each for name, each in stored.items()}


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
            "written": list(map(str, self.preparation.paths)) if written else [],
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
    options, run = with_choices(choices, options or RepackOptions(), run or RunOptions())
    return change_file(source, lambda opened: prepare(opened, Path(output), options), _row_sources, run)


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
    metadata = _apart(source.metadata) if options.undo else _interleaved(source.metadata)
    plan = Plan("undo" if options.undo else "repack", tuple(map(_tensor_plan, regroupings.tensors)))
    parts = parts_of(source, ((info, info.name) for info in plan.infos), keep_split=options.keep_split)
    outputs = lay_out(output, metadata, parts, source.endian)
    n_bytes = source_bytes(plan, source.tensors.values())
    return RepackChange(source.path, regroupings, Preparation(plan, outputs, n_bytes))


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


def _row_sources(change: RepackChange, source: GGUFSet) -> RowSources:
    types = {each.info.name: each.info.type for each in change.regroupings.tensors if each.is_regrouped}
    make = partial(_regrouped, types=types)
    return RowSources(make(source), {}, GGUFSources(source.path, make))
