"""Hostile numbers: finite weights and importances that a type's scales, or a search, can't hold.

llama-quantize refuses what it has made of such weights ("quantized data validation failed"). So do we, for
all types, those of ik_llama.cpp and interleaved ones too, wherever weights become bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import gguf_tools.commands.quantize
import quantize
from gguf_tools.errors import BadImportance, BadWeights
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.block_layouts import EXPONENTS, SCALES, count_nonfinite
from gguf_tools.format.ggml_types import F32, GGMLType, by_name
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.fill import encode
from quantize.fill.chunks import RowRange
from quantize.fill.encode import RowSources, Target, encode_rows, encode_strips
from quantize.formats import available, encodable, get_format
from quantize.formats.base import BlockRefused
from quantize.formats.codecs import INTERLEAVED, ignores_importances, requires_importances
from quantize.importances.entries import Importance, ResolvedImportance, resolve
from quantize.importances.weighting import ColumnWeights
from quantize.rounding.factor import Factor
from quantize.rounding.rounders import ROUNDERS
from tests.quantize import codecs
from tests.quantize.rounding.judged import encode_judged
from tests.support import oracle

N_COLS = 512
ROWS = (np.random.default_rng(0).standard_normal((16, N_COLS)) * 0.02).astype(np.float32)
WEIGHTS = np.random.default_rng(1).random(N_COLS, np.float32) + np.float32(0.01)

OUTLIERS = (1e4, 7e4, 1e6, 1e7, 1e8, 1e10, 1e20, 3e38)
FACTORS = (1e7, 1e10)

FLOATS = {"F32", "F16", "BF16"}

QUICK = {"IQ2_XXS", "IQ4_XS", "IQ4_NL", "IQ4_KS"}
"""Types with grids or tables that stand for the others, whose kernels take long to compile."""


def types(names: Iterable[str]) -> pytest.MarkDecorator:
    """Try a test with types; those that stand behind another one are slow."""
    slow = [name for name in names if name.startswith("IQ") and name not in QUICK]
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]
    )


every_type = types(encodable())


def hostile_rows() -> Iterator[npt.NDArray[np.float32]]:
    """Yield rows with a weight in row 5 that is too large for some types, and rows that are all large."""
    for value in OUTLIERS:
        rows = ROWS.copy()
        rows[5, 300] = -value
        yield rows
    for factor in FACTORS:
        yield ROWS * np.float32(factor)


def weightings(name: str) -> list[ColumnWeights | None]:
    """Return the ways in which a type can be told what counts."""
    if ignores_importances(name):
        return [None]
    return [ColumnWeights(WEIGHTS), *([] if requires_importances(name) else [None])]


@dataclass
class Source:
    """Rows in memory, as the tensor `t`."""

    rows: npt.NDArray[Any]
    name: str = "t"
    type: GGMLType = F32
    by_rows: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self.rows[start:stop].copy()

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.rows[start:stop].reshape(-1).view(np.uint8)


# --- weights that a type can't hold -------------------------------------------------------


@every_type
def test_no_scale_is_ever_nan_or_infinite(name: str) -> None:
    type_ = by_name(name)
    for rows in hostile_rows():
        for weighting in weightings(name):
            with suppress(BlockRefused):
                data = get_format(name).encode(rows, weighting)
                assert count_nonfinite(type_, data.reshape(-1), data.shape[1]) == (0, -1)


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@types(codecs.OF_LLAMA)
def test_what_llama_quantize_refuses_is_refused_and_nothing_else(name: str) -> None:
    type_ = by_name(name)
    for rows in hostile_rows():
        for weighting in weightings(name):
            values = None if weighting is None else weighting.values
            try:
                ours = get_format(name).encode(rows, weighting)
            except BadWeights:
                assert oracle.refuses(type_.id, rows, values)
            else:
                theirs = oracle.quantize(type_.id, rows, values)
                assert oracle.is_valid(type_.id, theirs)
                np.testing.assert_array_equal(ours, theirs)


def has_halves(name: str) -> bool:
    """Return whether a type's scales are float16."""
    scales = SCALES.get(name)
    return scales is not None and any(field.kind == "f2" for field in scales.row + scales.block)


@pytest.mark.parametrize("name", filter(has_halves, encodable()))
def test_the_tensor_the_row_and_the_weight_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "STRIP_ELEMS", 4 * N_COLS)
    rows = np.concatenate([ROWS, ROWS])
    rows[21, 300] = -1e10
    found = Importance(WEIGHTS[None], np.ones(1, np.float32))
    job = RowSources({"t": Source(rows)}, {"t": ResolvedImportance("t", found, len(rows), 0, "its own")})
    message = rf"^t: {name}: row 21(, columns? \d+.* -1e\+10, beyond|: .* \(up to 1e\+10\) .* float16)"
    with pytest.raises(BadWeights, match=message):
        encode_rows(RowRange("t", 16, 32), by_name(name), job)


def test_bfloat16_refuses_what_it_rounds_to_infinity() -> None:
    rows = ROWS.copy()
    rows[2, 7] = np.finfo(np.float32).max
    with pytest.raises(BadWeights, match=r"BF16: row 2, column 7: the weight is 3\.40282e\+38, beyond"):
        quantize.encode(rows, "BF16")


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_floats_that_are_not_finite_are_refused_in_memory_too(name: str, bad: float) -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        rows = ROWS.astype(dtype)
        rows[2, 7] = bad
        with pytest.raises(BadWeights, match=f"{name}: row 2, column 7: a weight is not a finite number"):
            quantize.encode(rows, name)


@pytest.mark.parametrize("name", [name for name in available() if name in SCALES.keys() - FLOATS])
def test_a_damaged_tensor_is_not_copied(name: str) -> None:
    """llama-quantize says "tensor has invalid data" of such an input."""
    type_ = by_name(name)
    field = (*SCALES[name].row, *SCALES[name].block)[-1]
    data = np.zeros((4, type_.row_bytes(N_COLS)), np.uint8)
    place = type_.row_bytes(N_COLS) - type_.block_bytes if SCALES[name].block else 0
    for byte, mask in EXPONENTS[field.kind]:
        data[2, place + field.offset + byte] |= mask
    job = RowSources({"t": Source(data, type=type_)}, {})
    with pytest.raises(BadWeights, match=rf"^t: a scale of {name} in row 2 of the input is NaN or infinite"):
        encode_rows(RowRange("t", 0, 4), type_, job)


@types(ROUNDERS)
def test_feedback_never_makes_what_the_encoder_refuses(name: str) -> None:
    inputs = np.random.default_rng(2).standard_normal((64, N_COLS))
    factor = Factor.of((inputs.T @ inputs).astype(np.float32), damp=0.05)
    type_ = by_name(name)
    for value in (1e6, 1e10, 1e20):
        rows = ROWS[:4].copy()
        rows[2, 300] = value
        try:
            data = encode_judged(rows, type_, factor)
        except BadWeights:
            continue
        assert count_nonfinite(type_, data.reshape(-1), data.shape[1]) == (0, -1)


# --- importances ----------------------------------------------------------------------------


@every_type
def test_importances_of_any_size_give_the_bytes_of_usual_ones(name: str) -> None:
    """Searches multiply sums of importances; where float32 would overflow, they get smaller ones."""
    codec = get_format(name)
    for odd in (0, 1):
        usual = codec.encode(ROWS, ColumnWeights(np.ldexp(WEIGHTS, odd)))
        for exponent in (44, 64, 100, 126):
            found = codec.encode(ROWS, ColumnWeights(np.ldexp(WEIGHTS, exponent + odd)))
            np.testing.assert_array_equal(found, usual, f"2 ** {exponent + odd}")


@every_type
def test_one_importance_beyond_all_others_leaves_scales_finite(name: str) -> None:
    weights = WEIGHTS.copy()
    weights[300] = 3e38
    data = get_format(name).encode(ROWS, ColumnWeights(weights))
    assert count_nonfinite(by_name(name), data.reshape(-1), data.shape[1]) == (0, -1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 1e300])
def test_importances_that_are_none_are_refused_in_memory(bad: float) -> None:
    weights = WEIGHTS.astype(np.float64)
    weights[7] = bad
    with pytest.raises(BadImportance, match=r"importance of column 7 is .*, expected a finite number"):
        quantize.encode(ROWS, "Q4_K", weights)


def test_the_mean_over_heads_does_not_overflow() -> None:
    n_heads = 4
    sums = np.full((n_heads, N_COLS), 3e38, np.float32)
    stored = Importance(sums, np.full(n_heads, 2, np.float32))
    tensor = TensorInfo("blk.0.attn_kv_b.weight", (n_heads * 8, N_COLS), F32)
    found = resolve(tensor, {"blk.0.attn_v_b.weight": stored}, n_heads)
    assert found is not None
    np.testing.assert_allclose(found.weights(), np.full((1, N_COLS), 1.5e38), rtol=1e-6)


# --- several targets ------------------------------------------------------------------------


@pytest.mark.parametrize("name", INTERLEAVED)
@pytest.mark.parametrize("strip_rows", [1, 7])
def test_an_interleaved_type_beside_plain_ones(
    name: str, strip_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strip is whole groups of rows of every target, however wide rows are."""
    monkeypatch.setattr(encode, "STRIP_ELEMS", strip_rows * N_COLS)
    found = Importance(WEIGHTS[None], np.ones(1, np.float32))
    job = RowSources({"t": Source(ROWS)}, {"t": ResolvedImportance("t", found, len(ROWS), 0, "its own")})
    rows = RowRange("t", 0, len(ROWS))
    types = [by_name(each) for each in ("Q8_0", name, INTERLEAVED[name])]
    together = list(encode_strips(rows, [Target(type_, job) for type_ in types]))
    for type_, parts in zip(types, zip(*together, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), encode_rows(rows, type_, job))


def write_wide_model(path: Path, outlier: float | None = None) -> None:
    """Write a model whose rows are so wide that a strip of them is no multiple of four."""
    n_cols = 5120
    infos = [TensorInfo("blk.0.attn_output.weight", (n_cols // 20, n_cols), F32)]
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}
    layout = FileLayout.of(metadata, infos)
    values = np.random.default_rng(0).standard_normal(infos[0].shape, np.float32)
    if outlier is not None:
        values[100, 4000] = outlier
    with GGUFWriter(path, layout) as writer:
        writer.write(layout.offset_of(infos[0].name), values)
        writer.publish()


def test_types_of_both_programs_from_one_walk(tmp_path: Path) -> None:
    write_wide_model(tmp_path / "in.gguf")
    source, names = str(tmp_path / "in.gguf"), ["Q4_K_S", "Q4_K_R4", "Q8_0_R8"]
    for name in names:
        assert (
            gguf_tools.commands.quantize.main(["-q", source, str(tmp_path / f"alone-{name}.gguf"), name]) == 0
        )
    assert (
        gguf_tools.commands.quantize.main(["-q", source, str(tmp_path / "m-{FTYPE}.gguf"), ",".join(names)])
        == 0
    )
    for name in names:
        alone, made = (tmp_path / f"{kind}-{name}.gguf" for kind in ("alone", "m"))
        assert made.read_bytes() == alone.read_bytes()


@pytest.mark.parametrize("types", ["Q8_0", "Q8_0,Q4_K_S"])
def test_a_run_ends_in_one_line_and_leaves_no_file(
    types: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wide_model(tmp_path / "in.gguf", outlier=1e10)
    assert (
        gguf_tools.commands.quantize.main(
            [str(tmp_path / "in.gguf"), str(tmp_path / "m-{FTYPE}.gguf"), types]
        )
        == 1
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "blk.0.attn_output.weight: Q8_0: row 100, columns 4000 to 4031: the largest weight is 1e" in said
    assert list(tmp_path.glob("m-*.gguf")) == []
