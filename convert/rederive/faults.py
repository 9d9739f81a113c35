"""Names of faults of tensors with other bytes: a few changed blocks, other importances, other weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.audit.measure import Sums
from convert.rederive.compare import MOST_ROWS, Compared
from convert.rederive.ways import Way
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.chunks import UNKNOWN, RowRange
from quantize.fill.encode import encode_rows
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import get_decoder

FEW_BLOCKS = 0.01
"""Largest share of blocks that count as few: llama.cpp's builds that contract products and sums (FMA) have
other bytes in 0.2 %."""

RAISED = 1.6
"""Error above which a tensor has other weights, in units of what encoding makes of the source's: importances
raise it by up to 1.37, see convert/audit/expected.py."""


@dataclass(frozen=True)
class Case:
    """A tensor with other bytes.

    way         in which it was made
    compared    what that has shown
    number      its provenance in the file, None for none
    is_matrix   whether importances were given
    """

    info: TensorInfo
    stored: SourceTensor
    way: Way
    compared: Compared
    number: int | None
    is_matrix: bool


def name_fault(case: Case) -> tuple[str, str]:
    """Say what a tensor with other bytes would be: a short name for programs, and words."""
    compared = case.compared
    share = compared.n_differ / max(1, compared.n_blocks)
    told = f"{compared.n_differ:,} of {compared.n_blocks:,} blocks differ ({100 * share:.2g} %)"
    told += f", the first in row {compared.rows[0]}"
    is_known = case.number is not None and compared.number != UNKNOWN
    if is_known and case.number == compared.number:
        return "changed", f"{told}: it was made of this, and changed afterwards, or is of another version"
    made, found = _errors(case)
    errors = f"relative error {100 * found:.3g} %, {100 * made:.3g} % as it should be"
    if is_known:
        told += "; by its provenance it was made of other weights or importances"
    if found > RAISED * made:
        kind = "changed" if share <= FEW_BLOCKS and not is_known else "other-weights"
        what = "changed weights" if kind == "changed" else "other weights than the source's"
        return kind, f"{told}: {what} ({errors})"
    if share <= FEW_BLOCKS:
        return "few-blocks", f"{told}: another build or version, or a small change ({errors})"
    importances = "other importances" if case.is_matrix else "importances, which were not given"
    return "encoding", f"{told}: the source's weights with {importances}, or another encoder ({errors})"


def _errors(case: Case) -> tuple[float, float]:
    """Measure the relative errors of what should be there and of what is, in the first rows that differ."""
    info, source = case.info, case.way.sources.tensors[case.info.name]
    group = info.type.rows_interleaved
    sums: list[Sums] = []
    for row in case.compared.rows[: max(1, MOST_ROWS // group)]:
        stop = row + group
        wanted = source.read_rows(row, stop).astype(np.float32)
        if info.type in FLOAT_DTYPES:
            made = wanted.astype(FLOAT_DTYPES[info.type]).astype(np.float32)
        else:
            data = encode_rows(RowRange(info.name, row, stop), info.type, case.way.sources)
            made = get_decoder(info.type)(data.reshape(group, -1), info.n_cols)
        found = np.nan_to_num(case.stored.read_rows(row, stop).astype(np.float32), posinf=0, neginf=0)
        sums.append(Sums.joined([Sums.of(wanted, made), Sums.of(wanted, found)]))
    rows = Sums.joined(sums)
    is_found = np.tile(np.repeat([False, True], group), len(sums))
    return tuple(float(rows.pick(which).over().relative) for which in (~is_found, is_found))  # type: ignore[return-value]
