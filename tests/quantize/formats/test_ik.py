"""Decoders of ik_llama.cpp's own types, against what ik_llama.cpp itself makes of the same bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gguf_tools.errors import QuantError, ShapeError
from gguf_tools.format.ggml_types import by_name
from quantize.formats import available, decodable, encodable, get_decoder, get_format
from quantize.formats.codecs import CODECS, DECODERS, INTERLEAVED, requires_importances
from quantize.formats.ik.interleaved.interleaved import base_of, from_base, to_base
from quantize.importances.weighting import ColumnWeights
from tests import naive
from tests.quantize.codecs import OF_IK, told_layout

GOLDEN = Path(__file__).parents[2] / "golden" / "ik" / "vectors.npz"
N_COLS = 512

OWN = (*DECODERS, *OF_IK)

PLAIN = tuple(name for name in OWN if by_name(name).rows_interleaved == 1)

GROUPED = tuple(name for name in decodable() if by_name(name).rows_interleaved > 1)

every_decoder = pytest.mark.parametrize("name", [*OWN, *INTERLEAVED])


@cache
def recorded(key: str) -> npt.NDArray[np.generic]:
    """Return an array of the golden file."""
    with np.load(GOLDEN) as file:
        array: npt.NDArray[np.generic] = file[key]
        return array


def recorded_bytes(name: str) -> npt.NDArray[np.uint8]:
    """Return the recorded rows of a type, uint8 (16, row bytes)."""
    return recorded(f"bytes_{name}").view(np.uint8).reshape(16, by_name(name).row_bytes(N_COLS))


def any_bytes(name: str, n_rows: int, n_cols: int = N_COLS) -> npt.NDArray[np.uint8]:
    shape = (n_rows, by_name(name).row_bytes(n_cols))
    return np.random.default_rng([7, *name.encode()]).integers(0, 256, shape, np.uint8)


def assert_same_bits(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    """NaN counts as NaN, whatever its bits."""
    nan = np.isnan(ours)
    np.testing.assert_array_equal(nan, np.isnan(theirs))
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", PLAIN)
def test_decodes_bit_for_bit_as_recorded(name: str) -> None:
    rows = get_decoder(name)(recorded_bytes(name), N_COLS)
    assert_same_bits(rows, recorded(f"dequantized_{name}").astype(np.float32).reshape(16, N_COLS))


@pytest.mark.parametrize("name", naive.DECODERS)
def test_any_bytes_decode_as_the_naive_twin_says(name: str) -> None:
    data = any_bytes(name, 3)
    with np.errstate(all="ignore"):
        expected = np.stack([naive.DECODERS[name](row) for row in data])
    assert_same_bits(get_decoder(name)(data, N_COLS), expected)


@every_decoder
def test_any_bytes_decode_and_rows_do_not_depend_on_each_other(name: str) -> None:
    group = by_name(name).rows_interleaved
    data, decode = any_bytes(name, 3 * group), get_decoder(name)
    data.flags.writeable = False
    rows = decode(data, N_COLS)
    assert rows.dtype == np.float32
    assert rows.shape == (3 * group, N_COLS)
    assert_same_bits(decode(data[group : 2 * group], N_COLS), rows[group : 2 * group])
    if name in OWN:
        assert decode(data[:0], N_COLS).shape == (0, N_COLS)


@every_decoder
def test_rows_that_are_cut_short_are_refused_in_one_line(name: str) -> None:
    type_ = by_name(name)
    data = any_bytes(name, type_.rows_interleaved)
    with pytest.raises(ShapeError, match=f"{name}: data of rows of {N_COLS} must be") as e:
        get_decoder(name)(data[:, :-1], N_COLS)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", PLAIN)
def test_the_layout_is_told_with_its_source(name: str) -> None:
    assert "ik_llama.cpp 8337e4c" in told_layout(name)


def test_no_row_of_the_tables_is_there_twice() -> None:
    assert len(set(decodable())) == len(CODECS) + len(DECODERS) + len(INTERLEAVED)
    assert decodable() == (*available(), *DECODERS, *INTERLEAVED)


def test_a_decoder_is_found_by_type_and_by_name() -> None:
    assert get_decoder(by_name("IQ2_K")) is get_decoder("iq2_k")
    assert get_decoder("Q4_K") is get_format("Q4_K").decode
    assert get_decoder(by_name("IQ2_K_R4")) is get_decoder("iq2_k_r4")


def test_what_is_lacking_is_named() -> None:
    with pytest.raises(QuantError, match="Q8_K_R8: no encoder for this type"):
        get_format("Q8_K_R8")
    with pytest.raises(QuantError, match="IQ1_S_R4: no encoder for this type"):
        get_format("IQ1_S_R4")
    with pytest.raises(QuantError, match="IQ1_BN: no codec for this type"):
        get_decoder("IQ1_BN")


# ---- interleaved types


@pytest.mark.parametrize("name", GROUPED)
def test_recorded_groups_decode_to_what_was_encoded(name: str) -> None:
    """As far as so many bits can say it: a code in the wrong place would cost ten times as much."""
    x, importance = recorded("x").astype(np.float64), recorded("importance").astype(np.float64)
    lost = (get_decoder(name)(recorded_bytes(name), N_COLS) - x) ** 2
    error = float((lost @ importance).sum() / (x**2 @ importance).sum())
    assert error < max(min(4 * 4.0 ** (0.8 - by_name(name).bits_per_weight), 0.2), 2e-5)


@pytest.mark.parametrize(
    "name", [name for name, base in INTERLEAVED.items() if base in PLAIN], ids=lambda name: name
)
def test_recorded_groups_are_the_recorded_rows_of_the_base_type(name: str) -> None:
    base = base_of(by_name(name)).name
    rows = to_base(by_name(name), recorded_bytes(name), N_COLS)
    np.testing.assert_array_equal(rows, recorded_bytes(base))
    np.testing.assert_array_equal(
        from_base(by_name(name), recorded_bytes(base), N_COLS), recorded_bytes(name)
    )


@pytest.mark.parametrize("name", INTERLEAVED)
def test_any_group_is_regrouped_there_and_back(name: str) -> None:
    type_ = by_name(name)
    assert base_of(type_).row_bytes(N_COLS) == type_.row_bytes(N_COLS)
    for n_groups in (0, 1, 3):
        data = any_bytes(name, n_groups * type_.rows_interleaved)
        rows = to_base(type_, data, N_COLS)
        assert rows.shape == data.shape
        np.testing.assert_array_equal(from_base(type_, rows, N_COLS), data)
        np.testing.assert_array_equal(to_base(type_, from_base(type_, data, N_COLS), N_COLS), data)


@pytest.mark.parametrize("name", ["Q4_0_R8", "Q4_K_R4", "IQ2_XXS_R4", "BF16_R16", "Q8_KV_R8"])
def test_rows_are_encoded_as_the_base_type_and_regrouped(name: str) -> None:
    type_, codec = by_name(name), get_format(name)
    base = get_format(base_of(type_))
    rows, importance = recorded("x").astype(np.float32).reshape(16, N_COLS), recorded("importance")
    for weighting in (None, ColumnWeights(importance.astype(np.float32))):
        if weighting is None and requires_importances(name):
            continue
        plain, data = base.encode(rows, weighting), codec.encode(rows, weighting)
        assert codec.type == type_
        np.testing.assert_array_equal(to_base(type_, data, N_COLS), plain)
        assert_same_bits(codec.decode(data, N_COLS), base.decode(plain, N_COLS))
    assert name in encodable()
    with pytest.raises(ShapeError, match=f"{name}: 15 rows are no multiple of {type_.rows_interleaved}"):
        codec.encode(rows[:15], None)


@pytest.mark.parametrize("name", naive.GROUP_DECODERS)
def test_any_group_decodes_as_the_naive_twin_says(name: str) -> None:
    data = any_bytes(name, by_name(name).rows_interleaved)
    with np.errstate(all="ignore"):
        expected = naive.GROUP_DECODERS[name](data.reshape(-1))
    assert_same_bits(get_decoder(name)(data, N_COLS), expected)


@pytest.mark.parametrize("name", GROUPED)
def test_rows_that_fill_no_group_are_refused_in_one_line(name: str) -> None:
    n_rows = by_name(name).rows_interleaved + 1
    with pytest.raises(ShapeError, match=f"{name}: {n_rows} rows are no multiple of {n_rows - 1}"):
        get_decoder(name)(any_bytes(name, n_rows), N_COLS)


def test_columns_that_come_in_pairs_are_not_cut() -> None:
    with pytest.raises(ShapeError, match="BF16_R16: row length 3 is not a multiple of 2"):
        get_decoder("BF16_R16")(np.zeros((16, 6), np.uint8), 3)
