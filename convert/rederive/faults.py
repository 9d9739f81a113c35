"""Names of faults of tensors with other bytes: a few changed blocks, other importances, other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from convert.audit.measure import Sums
from convert.rederive.compare import MOST_ROWS, Compared
from convert.rederive.ways import Way
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import counted
from quantize.fill.chunks import UNKNOWN, RowRange
from quantize.fill.encode import encode_rows
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import get_decoder
from quantize.formats.bits import numbers_of

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
    source = case.way.sources.tensors[case.info.name]
    encoded = _Encoded(case.info, case.way)
    made, found = relative_errors(case.info, compared.rows, source, encoded, case.stored)
    errors = f"{_steps(case, encoded)}relative error {100 * found:.3g} %, {100 * made:.3g} % as it should be"
    if is_known:
        told += "; by its provenance it was made of other weights or importances"
    if found > RAISED * made:
        kind = "changed" if share <= FEW_BLOCKS and not is_known else "other-weights"
        what = "changed weights" if kind == "changed" else "other weights than the source's"
        return kind, f"{told}: {what} ({errors})"
    if share <= FEW_BLOCKS:
        return "few-blocks", f"{told}: another build, as those with FMA are, or a small change ({errors})"
    importances = "other importances" if case.is_matrix else "importances, which were not given"
    return "encoding", f"{told}: the source's weights with {importances}, or another encoder ({errors})"


@dataclass(frozen=True)
class _Encoded:
    """Rows of a tensor as they are made in one way."""

    info: TensorInfo
    way: Way

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return encode_rows(RowRange(self.info.name, start, stop), self.info.type, self.way.sources)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        if self.info.type in FLOAT_DTYPES:
            rows = self.way.sources.tensors[self.info.name].read_rows(start, stop)
            return rows.astype(np.float32).astype(FLOAT_DTYPES[self.info.type])
        data = self.raw_rows(start, stop).reshape(stop - start, -1)
        return get_decoder(self.info.type)(data, self.info.n_cols)


def _steps(case: Case, made: _Encoded) -> str:
    """Say by how many steps codes differ in the first rows that do; "" where codes are in no order."""
    type_, numbers = case.info.type, numbers_of(case.info.type)
    if "codes" not in numbers or "signs" in numbers or type_.name in ("MXFP4", "NVFP4"):
        return ""
    rows = case.compared.rows[:MOST_ROWS]
    pairs = (np.array([of.raw_rows(row, row + 1) for row in rows]) for of in (made, case.stored))
    ours, theirs = (raw[:, type_.row_meta_bytes :].reshape(-1, type_.block_bytes) for raw in pairs)
    wrong = (ours != theirs).any(axis=1)
    codes = (numbers["codes"].read(each[wrong]).astype(np.int64) for each in (ours, theirs))
    steps = np.abs(np.subtract(*codes))
    if not steps.any():
        return "no code differs, scales do; "
    share = 100 * (steps > 0).mean()
    return f"{share:.2g} % of their codes differ, by up to {counted(int(steps.max()), 'step')}; "


class _Rows(Protocol):
    """Something whose rows can be read."""

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows start .. stop - 1."""


def relative_errors(
    info: TensorInfo, rows: Sequence[int], source: _Rows, made: _Rows, stored: _Rows
) -> tuple[float, float]:
    """Measure the relative errors of what is made of a tensor, and of what is stored, in some of its rows.

    rows  numbers of the first rows of groups that differ, of which the first MOST_ROWS are measured
    """
    group = info.type.rows_interleaved
    sums: list[list[Sums]] = [[], []]
    for row in rows[: max(1, MOST_ROWS // group)]:
        wanted = source.read_rows(row, row + group).astype(np.float32)
        for of, kept in zip((made, stored), sums, strict=True):
            found = np.nan_to_num(of.read_rows(row, row + group).astype(np.float32), posinf=0, neginf=0)
            kept.append(Sums.of(wanted, found))
    first, second = (float(Sums.joined(kept).over().relative) for kept in sums)
    return first, second
