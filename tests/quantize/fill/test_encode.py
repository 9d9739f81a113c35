"""Chunks are encoded a strip of rows at a time: the bytes don't depend on where strips end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gguf_tools.errors import BadWeights
from gguf_tools.format.ggml_types import F32, GGMLType, by_name
from quantize.fill import encode
from quantize.fill.chunks import RowRange
from quantize.fill.encode import RowSources, Target, encode_rows, encode_strips, strips
from quantize.importances.entries import Importance, ResolvedImportance
from tests.quantize import codecs
from tests.support import samples

N_COLS = 256
ROWS = samples.rows("normal", (40, N_COLS))


@dataclass
class Source:
    """Rows in memory, and the row ranges that were asked for."""

    rows: npt.NDArray[Any]
    by_rows: bool
    name: str = "t"
    type: GGMLType = F32
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        self.asked.append((start, stop))
        return self.rows[start:stop].copy()

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


@pytest.fixture(params=[1, 7, 100], ids="strips of {} rows".format)
def strip_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(encode, "STRIP_ELEMS", request.param * N_COLS)
    return request.param


@pytest.mark.parametrize("by_rows", [True, False])
def test_every_row_passes_once_and_in_order(strip_rows: int, by_rows: bool) -> None:
    source = Source(ROWS, by_rows)
    found = [(first, rows) for first, rows in strips(source, 3, 33)]
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in found]), ROWS[3:33])
    assert [first for first, _ in found] == list(range(3, 33, strip_rows))
    assert all(len(rows) <= strip_rows for _, rows in found)


@pytest.mark.parametrize("by_rows", [True, False])
def test_strips_do_not_tear_the_groups_of_the_target_apart(strip_rows: int, by_rows: bool) -> None:
    found = [(first, len(rows)) for first, rows in strips(Source(ROWS, by_rows), 8, 36, group=4)]
    assert all(first % 4 == 0 and count % 4 == 0 for first, count in found)
    assert sum(count for _, count in found) == 28
    assert all(count <= max(4, strip_rows) for _, count in found)


def test_rows_that_lie_in_columns_are_read_together(strip_rows: int) -> None:
    source = Source(ROWS, by_rows=False)
    list(strips(source, 3, 33))
    assert source.asked == [(3, 33)]


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "F16"])
@pytest.mark.parametrize("by_rows", [True, False])
def test_bytes_are_those_of_the_rows_together(strip_rows: int, by_rows: bool, type_name: str) -> None:
    target = by_name(type_name)
    weights = samples.importances("random", N_COLS)
    found = Importance(weights[None], np.ones(1, np.float32))
    resolved = ResolvedImportance("t", found, len(ROWS), 0, "its own")
    job = RowSources({"t": Source(ROWS, by_rows)}, {"t": resolved})
    wanted = RowRange("t", 3, 33)
    expected = codecs.encode(target, ROWS[3:33], weights).reshape(-1)
    np.testing.assert_array_equal(encode_rows(wanted, target, job), expected)
    strips_ = encode_strips(wanted, [Target(target, job)])
    assert b"".join(data.tobytes() for (data,) in strips_) == expected.tobytes()


def test_rows_of_the_same_type_pass_unchanged(strip_rows: int) -> None:
    for stored, type_ in ((codecs.encode("Q8_0", ROWS, None), by_name("Q8_0")), (ROWS, F32)):
        job = RowSources({"t": Source(stored, by_rows=True, type=type_)}, {})
        found = encode_rows(RowRange("t", 5, 20), type_, job)
        np.testing.assert_array_equal(found, stored[5:20].reshape(-1).view(np.uint8))


def test_rows_that_are_interleaved_are_not_torn_apart(strip_rows: int) -> None:
    type_ = by_name("Q4_0_R8")
    source = Source(codecs.encode(type_, ROWS, None), by_rows=True, type=type_)
    list(encode_strips(RowRange("t", 8, 40), [Target(type_, RowSources({"t": source}, {}))]))
    assert all(start % 8 == 0 and stop % 8 == 0 for start, stop in source.asked)
    assert (source.asked[0][0], source.asked[-1][1]) == (8, 40)


def test_the_row_of_a_bad_weight_is_counted_from_the_tensor(strip_rows: int) -> None:
    rows = ROWS.copy()
    rows[20, 5] = np.inf
    job = RowSources({"t": Source(rows, by_rows=True)}, {})
    for type_name in ("Q8_0", "F32"):
        with pytest.raises(BadWeights, match="t: weight at row 20, column 5 is inf"):
            encode_rows(RowRange("t", 3, 33), by_name(type_name), job)


def test_a_weight_beyond_half_is_named(strip_rows: int) -> None:
    rows = ROWS.copy()
    rows[20, 5] = 1e5
    job = RowSources({"t": Source(rows, by_rows=True)}, {})
    message = r"^t: F16: row 20, column 5: the weight is 100000, beyond the range of F16 \(65504\)"
    with pytest.raises(BadWeights, match=message):
        encode_rows(RowRange("t", 3, 33), by_name("F16"), job)


def test_a_refused_block_names_its_tensor() -> None:
    rows = ROWS.copy()
    rows[20] = samples.rows("largest", (1, N_COLS))
    job = RowSources({"t": Source(rows, by_rows=True)}, {})
    with pytest.raises(BadWeights, match=r"^t: IQ3_XXS: row 20, columns 0 to 255"):
        encode_rows(RowRange("t", 3, 33), by_name("IQ3_XXS"), job)
