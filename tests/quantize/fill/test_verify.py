"""What a check of a finished file lets pass, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_tools.errors import BadTensor, BadWeights, OutputError
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import F32, GGMLType, by_name
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from quantize.fill import verify
from quantize.fill.chunks import ChunkTable, RowRange
from quantize.fill.encode import RowSources, encode_rows
from quantize.fill.filling import FillJob, Output
from quantize.fill.verify import (
    SAMPLE_ROWS,
    SAMPLE_RUNS,
    SAMPLE_WEIGHTS,
    Verification,
    merge_verifications,
    sample_rows,
    verify_output,
)
from quantize.formats import available
from quantize.formats.codecs import CODECS, ignores_importances, requires_importances
from quantize.importances.entries import Importance, ResolvedImportance
from tests.quantize.codecs import block_dtype, decode, encode
from tests.support import samples

SHAPE = (3, 12, 256)
HARMLESS = [kind for kind in samples.ROWS if kind not in ("half_overflow", *samples.TOO_LARGE)]
QUANTIZED = [name for name in available() if by_name(name).is_quantized]


@dataclass(frozen=True)
class ArraySource:
    """A tensor in memory, stored as `type`; `data` are its rows, float32 or uint8."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: npt.NDArray[Any]
    by_rows: ClassVar[bool] = True

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        rows = self.data[start:stop]
        return rows if self.type == F32 else decode(self.type, rows)

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(self.data[start:stop]).reshape(-1).view(np.uint8)


def float_source(kind: str, shape: tuple[int, ...] = SHAPE, name: str = "t", seed: int = 0) -> ArraySource:
    n_rows = int(np.prod(shape[:-1]))
    return ArraySource(name, shape, F32, samples.rows(kind, (n_rows, shape[-1]), seed))


@dataclass
class File:
    """A file made of sources, as a run leaves it before it is published."""

    path: Path
    layout: FileLayout
    job: FillJob
    data: bytearray = field(repr=False)

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored rows of a tensor, (n_rows, row_bytes), to be changed."""
        info = next(info for info in self.layout.tensors if info.name == name)
        offset = self.layout.offset_of(name)
        stored = np.frombuffer(self.data, np.uint8)[offset : offset + info.n_bytes]
        return stored.reshape(info.n_rows, info.row_bytes)

    def verify(self) -> Verification:
        self.path.write_bytes(self.data)
        return verify_output(self.path, self.layout, self.job)

    def refusal(self) -> str:
        """Return the message with which the file is refused."""
        with pytest.raises(OutputError) as caught:
            self.verify()
        text = str(caught.value)
        if isinstance(caught.value, BadTensor):
            assert text.startswith(f"{self.path}: {caught.value.tensor}: ")
        return text


def make_file(
    folder: Path,
    sources: dict[str, tuple[ArraySource, str]],
    importances: dict[str, ResolvedImportance] | None = None,
    endian: Endian = "little",
) -> File:
    """Fill a file with tensors: name -> (source, type)."""
    infos = [TensorInfo(name, source.shape, by_name(type_)) for name, (source, type_) in sources.items()]
    layout = FileLayout.of({}, infos, endian=endian)
    path = folder / "model.gguf.partial"
    rows = RowSources({name: source for name, (source, _) in sources.items()}, importances or {})
    job = FillJob((Output(path, layout),), rows)
    types = {info.name: info.type for info in infos}
    data = bytearray(layout.total_bytes)
    data[: len(layout.header)] = layout.header
    for task in ChunkTable.of([layout], rows.rows_per_weights()):
        encoded = encode_rows(task.rows, types[task.rows.tensor], rows)
        if endian == "big":
            encoded = swap_bytes(types[task.rows.tensor], encoded)
        data[task.offset : task.offset + task.n_bytes] = encoded.tobytes()
    return File(path, layout, job, data)


def importance(source: ArraySource, kind: str) -> ResolvedImportance:
    """Return one row of importances for each matrix of a source."""
    n_mats = int(np.prod(source.shape[:-2]))
    values = np.stack([samples.importances(kind, source.shape[-1], seed) for seed in range(n_mats)])
    counts = np.ones(n_mats, np.float32)
    return ResolvedImportance(source.name, Importance(values, counts), source.shape[-2], 0, "")


def one_tensor(folder: Path, type_: str, kind: str = "normal", weighed: bool = True) -> File:
    source = float_source(kind)
    needed = weighed and not ignores_importances(type_)
    found = {"t": importance(source, "random")} if needed else {}
    return make_file(folder, {"t": (source, type_)}, found)


# --- what passes ----------------------------------------------------------------------------


def weighings(type_: str) -> list[str | None]:
    """The kinds of importances that a type can be encoded with; None is without any."""
    plain = [] if requires_importances(type_) else [None]
    weighed = [] if ignores_importances(type_) else samples.IMPORTANCES
    return [*plain, *weighed]


@pytest.mark.parametrize(
    ("type_", "weighing"), [(type_, way) for type_ in available() for way in weighings(type_)]
)
def test_whatever_the_codecs_make_of_odd_rows_is_good(
    type_: str, weighing: str | None, tmp_path: Path
) -> None:
    sources = {kind: float_source(kind, name=kind) for kind in HARMLESS}
    found = {} if weighing is None else {kind: importance(sources[kind], weighing) for kind in HARMLESS}
    file = make_file(tmp_path, {kind: (source, type_) for kind, source in sources.items()}, found)
    verified = file.verify()
    assert verified.n_tensors == len(HARMLESS)
    assert verified.n_weights == len(HARMLESS) * np.prod(SHAPE)


def relative_error(rows: npt.NDArray, type_: str, weights: npt.NDArray | None = None) -> float:
    """Return what encoding `rows` and decoding them again loses, straight from the formula."""
    lost = (rows - decode(type_, encode(type_, rows, weights))).astype(np.float64) ** 2
    total = rows.astype(np.float64) ** 2
    if weights is not None:
        lost, total = lost * weights, total * weights
    return float(np.sqrt(lost.sum() / total.sum()))


def test_what_is_reported(tmp_path: Path) -> None:
    sources = {"a": (float_source("normal"), "Q8_0"), "b": (float_source("normal"), "Q4_0")}
    file = make_file(tmp_path, {**sources, "c": (float_source("zero"), "Q2_K")})
    error = relative_error(samples.rows("normal", (36, 256)), "Q4_0")
    verified = file.verify()
    assert verified.worst is not None
    assert (verified.worst.tensor, verified.worst.type) == ("b", "Q4_0")
    assert verified.worst.relative == pytest.approx(error, rel=1e-6)
    text = f"verified 27,648 weights of 3 tensors: worst relative error {100 * error:.3g}% (b, Q4_0)"
    assert str(verified) == text
    both = merge_verifications([verified, verify.Verification(10, 1, None)])
    assert (both.n_weights, both.n_tensors, both.worst) == (27658, 4, verified.worst)
    assert str(merge_verifications([])) == "verified 0 weights of 0 tensors"


def test_errors_count_as_much_as_their_columns(tmp_path: Path) -> None:
    source = float_source("normal", (4, 256))
    weights = samples.importances("random", 256)
    assert weights is not None
    found = ResolvedImportance("t", Importance(weights[np.newaxis], np.ones(1, np.float32)), 4, 0, "")
    verified = make_file(tmp_path, {"t": (source, "Q4_0")}, {"t": found}).verify()
    assert verified.worst is not None
    assert verified.worst.relative == pytest.approx(relative_error(source.data, "Q4_0", weights), rel=1e-6)


def test_a_big_endian_file(tmp_path: Path) -> None:
    sources = {"a": (float_source("normal"), "Q4_K"), "b": (float_source("normal"), "F16")}
    file = make_file(tmp_path, sources, endian="big")
    assert file.verify().n_tensors == 2
    file.rows("a")[5, 17] ^= 1
    assert "a: row 5 " in file.refusal()


def test_copied_blocks_and_float_vectors(tmp_path: Path) -> None:
    blocks = encode("IQ4_XS", samples.rows("normal", (36, 256)), None)
    copied = ArraySource("copied", SHAPE, by_name("IQ4_XS"), blocks)
    file = make_file(tmp_path, {"copied": (copied, "IQ4_XS"), "v": (float_source("positive", (7,)), "F32")})
    verified = file.verify()
    assert verified.n_weights == 36 * 256 + 7
    assert verified.worst is not None
    assert verified.worst.relative == 0


def test_a_type_without_a_codec_is_copied_in_whole_groups_of_rows(tmp_path: Path) -> None:
    type_ = by_name("Q4_K_R4")
    raw = np.random.default_rng(0).integers(0, 60, (400, type_.row_bytes(256)), np.uint8)
    file = make_file(tmp_path, {"t": (ArraySource("t", (400, 256), type_, raw), "Q4_K_R4")})
    assert file.verify().n_weights == SAMPLE_ROWS * 256
    file.rows("t")[399, 3] ^= 1
    assert "t: row 399 is not the source's from byte 3 on" in file.refusal()


# --- what is found --------------------------------------------------------------------------


def damage_block(rows: npt.NDArray[np.uint8], type_: GGMLType) -> None:
    rows[20, -type_.block_bytes :] = rows[3, : type_.block_bytes]


def flip_a_bit(rows: npt.NDArray[np.uint8], type_: GGMLType) -> None:
    rows[20, -1] ^= 1


def shift_rows(rows: npt.NDArray[np.uint8], type_: GGMLType) -> None:
    rows[:] = np.roll(rows, 1, axis=0)


def swap_experts(rows: npt.NDArray[np.uint8], type_: GGMLType) -> None:
    rows[:] = rows.reshape(3, 12, -1)[[1, 0, 2]].reshape(rows.shape)


def leave_a_hole(rows: npt.NDArray[np.uint8], type_: GGMLType) -> None:
    rows[12:24] = 0


DAMAGES: dict[Callable[[npt.NDArray[np.uint8], GGMLType], None], int] = {
    damage_block: 20,
    flip_a_bit: 20,
    shift_rows: 0,
    swap_experts: 0,
    leave_a_hole: 12,
}
"""Each with the first row that it hits."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("type_", available())
def test_damage(
    type_: str, damage: Callable[[npt.NDArray[np.uint8], GGMLType], None], tmp_path: Path
) -> None:
    file = one_tensor(tmp_path, type_)
    file.verify()
    damage(file.rows("t"), by_name(type_))
    text = file.refusal()
    assert text.startswith(f"{file.path}: t: row {DAMAGES[damage]} ")
    assert "\n" not in text


def test_what_is_said_of_a_row_that_differs(tmp_path: Path) -> None:
    file = one_tensor(tmp_path, "Q4_0", weighed=False)
    rows = file.rows("t")
    rows[7] = rows[8]
    assert file.refusal().startswith(
        f"{file.path}: t: row 7 is not what encoding it as Q4_0 gives from byte 0 on: relative error 14"
    )
    assert "%, expected 7." in file.refusal()


@pytest.mark.parametrize("scale", [np.nan, np.inf])
@pytest.mark.parametrize("type_", ["Q4_0", "Q4_K", "IQ3_S", "TQ1_0"])
def test_a_scale_that_is_not_finite(type_: str, scale: float, tmp_path: Path) -> None:
    file = one_tensor(tmp_path, type_)
    file.rows("t").view(block_dtype(type_))["d"][30, 0] = np.float16(scale).view(np.uint16)
    assert f"t: row 30: a scale of {type_} is NaN or infinite, expected a finite one" in file.refusal()


def test_a_nan_in_the_source_too(tmp_path: Path) -> None:
    blocks = encode("Q8_0", samples.rows("normal", (36, 256)), None)
    blocks.view(block_dtype("Q8_0"))["d"][4, 2] = 0x7E00
    copied = ArraySource("t", SHAPE, by_name("Q8_0"), blocks)
    with pytest.raises(BadWeights, match="t: a scale of Q8_0 in row 4 of the input is NaN or infinite"):
        make_file(tmp_path, {"t": (copied, "Q8_0")})


def test_weights_beyond_the_type(tmp_path: Path) -> None:
    source = float_source("normal")
    source.data[9, 40] = 1e9
    with pytest.raises(BadWeights, match=r"t: Q8_0: row 9, columns 32 to 63: the largest weight is 1e\+09, "):
        make_file(tmp_path, {"t": (source, "Q8_0")})


def test_tensors_in_the_wrong_order(tmp_path: Path) -> None:
    file = make_file(
        tmp_path,
        {"a": (float_source("normal", seed=1), "Q4_0"), "b": (float_source("normal", seed=2), "Q4_0")},
    )
    first, second = file.rows("a"), file.rows("b")
    first[:], second[:] = second.copy(), first.copy()
    assert ": a: row 0 is not what" in file.refusal()


def test_importances_of_another_matrix(tmp_path: Path) -> None:
    source = float_source("normal")
    file = make_file(tmp_path, {"t": (source, "Q4_0")}, {"t": importance(source, "random")})
    other = make_file(tmp_path, {"t": (source, "Q4_0")}, {"t": importance(source, "wide")})
    file.data[:] = other.data
    assert ": t: row 0 is not what" in file.refusal()


def test_the_header(tmp_path: Path) -> None:
    file = one_tensor(tmp_path, "Q4_0")
    file.data[60] ^= 1
    assert f"{file.path}: byte 60 of the header is not what was written" in file.refusal()
    del file.data[-1]
    assert "bytes, expected" in file.refusal()


def write_zeros(rows: npt.NDArray[np.uint8], type_: GGMLType) -> None:
    rows[:] = 0


# Shifted rows are sqrt(2) off for the best of types, and nearer to 1 for coarse ones.
FAULTS = [(type_, shift_rows) for type_ in QUANTIZED if CODECS[type_].error_range.relative <= 1] + [
    (type_, write_zeros) for type_ in QUANTIZED if CODECS[type_].error_range.relative < 1
]


@pytest.mark.parametrize(("type_", "fault"), FAULTS)
def test_a_kernel_that_is_wrong_whenever_it_is_asked(
    type_: str,
    fault: Callable[[npt.NDArray[np.uint8], GGMLType], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoding again gives the same wrong bytes; what they decode to tells."""
    file = one_tensor(tmp_path, type_, weighed=requires_importances(type_))
    rows = file.rows("t")
    fault(rows, by_name(type_))

    def same_fault(wanted: RowRange, target: GGMLType, sources: RowSources) -> npt.NDArray[np.uint8]:
        return rows[wanted.start : wanted.stop].reshape(-1)

    monkeypatch.setattr(verify, "encode_rows", same_fault)
    text = file.refusal()
    assert f"{file.path}: t: relative error " in text
    assert f"{type_} is not computed right on this machine" in text


# --- which rows -----------------------------------------------------------------------------

shapes = st.tuples(
    st.integers(1, 300), st.integers(1, 400), st.sampled_from([32, 256, 7168, 20480, 600_000 // 32 * 32])
)


@given(shapes, st.sampled_from(["Q4_0", "Q8_0_R8"]), st.booleans())
def test_sampled_rows(shape: tuple[int, int, int], type_: str, per_half: bool) -> None:
    group = by_name(type_).rows_interleaved
    n_mats, rows_per_matrix, n_cols = shape[0], shape[1] * group * 2, shape[2]
    info = TensorInfo("t", (n_mats, rows_per_matrix, n_cols), by_name(type_))
    span = rows_per_matrix // 2 if per_half else rows_per_matrix
    ranges = [(rows.start, rows.stop) for rows in sample_rows(info, span if per_half else None)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == info.n_rows
    assert all(a < b <= c for (a, b), (c, _) in pairwise(ranges))
    assert all(start // span == (stop - 1) // span for start, stop in ranges)
    assert all(start % group == 0 and stop % group == 0 for start, stop in ranges)
    n_rows = sum(stop - start for start, stop in ranges)
    least = SAMPLE_RUNS * group
    assert n_rows <= max(SAMPLE_ROWS, least)
    assert n_rows * n_cols <= max(SAMPLE_WEIGHTS, least * n_cols)
    if n_mats >= SAMPLE_RUNS and info.n_rows > SAMPLE_ROWS:
        assert len({start // rows_per_matrix for start, _ in ranges}) >= SAMPLE_RUNS
    if info.n_rows <= least:
        assert n_rows == info.n_rows
