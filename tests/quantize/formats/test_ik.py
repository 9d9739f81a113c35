"""Decoders of ik_llama.cpp's own types, against what ik_llama.cpp itself makes of the same bytes."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gguf_tools.errors import QuantError, ShapeError
from gguf_tools.ggml_types import by_name
from gguf_tools.scales import SCALES
from quantize.formats import available, decodable, get_decoder, get_format
from quantize.formats.codecs import CODECS, DECODERS
from tests import naive

GOLDEN = Path(__file__).parents[2] / "golden" / "ik" / "vectors.npz"
N_COLS = 512
SIZES = {"e": 2, "f": 4}

PLAIN = tuple(name for name in DECODERS if by_name(name).rows_interleaved == 1)

every_decoder = pytest.mark.parametrize("name", DECODERS)


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
    assert decode(data[:0], N_COLS).shape == (0, N_COLS)


@every_decoder
def test_rows_that_are_cut_short_are_refused_in_one_line(name: str) -> None:
    type_ = by_name(name)
    data = any_bytes(name, type_.rows_interleaved)
    with pytest.raises(ShapeError, match=f"{name}: data of rows of {N_COLS} must be") as e:
        get_decoder(name)(data[:, :-1], N_COLS)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", PLAIN)
def test_the_module_is_of_that_type(name: str) -> None:
    module, type_ = import_module(DECODERS[name], "quantize.formats"), by_name(name)
    assert module.__doc__ is not None
    assert module.__doc__.startswith(f"{name}: ")
    if name not in ("IQ4_KSS", "Q8_KV"):
        assert module.BLOCK.itemsize == type_.block_bytes
        front = [(code, offset) for code, offset in SCALES[name].block]
        fields = module.BLOCK.fields
        assert front == ([("e", fields["d"][1])] if "d" in fields else [])
    assert SIZES.get(SCALES[name].row, 0) <= type_.row_meta_bytes


def test_no_row_of_the_tables_is_there_twice() -> None:
    assert not set(CODECS) & set(DECODERS)
    assert decodable() == (*available(), *DECODERS)


def test_a_decoder_is_found_by_type_and_by_name() -> None:
    assert get_decoder(by_name("IQ2_K")) is get_decoder("iq2_k")
    assert get_decoder("Q4_K") is get_format("Q4_K").decode


def test_what_is_lacking_is_named() -> None:
    with pytest.raises(QuantError, match="IQ2_K: no encoder for this type; there are F32"):
        get_format("IQ2_K")
    with pytest.raises(QuantError, match=r"IQ1_BN: no codec for this type; there are F32.*IQ2_K"):
        get_decoder("IQ1_BN")
