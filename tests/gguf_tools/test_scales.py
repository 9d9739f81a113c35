"""Where non-finite numbers are found: every type of the table, every place, both byte orders."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.format import ggml_types as types
from gguf_tools.format.block_layouts import SCALES, count_nonfinite
from tests.support import oracle

NAN = {
    "f2": b"\x00\x7e",
    "f4": b"\x00\x00\xc0\x7f",
    "f8": b"\0\0\0\0\0\0\xf8\x7f",
    "b2": b"\xc0\x7f",
    "e1": b"\xff",
}
N_BLOCKS = 2

#: Types that ggml decodes. Its MXFP4 takes the exponent 255, NaN in the standard, for a number.
DECODED = [
    type_
    for type_ in types.TYPES
    if type_.id <= 42 and type_.name in SCALES.keys() - {"F64", "MXFP4"} and not type_.note
]


def rows_of(type_: types.GGMLType) -> tuple[np.ndarray, int]:
    """Two groups of rows of two blocks, all zero."""
    row_bytes = type_.row_bytes(N_BLOCKS * type_.block_elems)
    return np.zeros(2 * type_.rows_interleaved * row_bytes, np.uint8), row_bytes


@pytest.mark.parametrize("name", SCALES)
def test_zeros_are_finite(name: str) -> None:
    type_ = types.by_name(name)
    assert count_nonfinite(type_, *rows_of(type_)) == (0, -1)


@pytest.mark.parametrize("name", [name for name in SCALES if name != "IQ1_M"])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_one_nan_is_found_in_its_row(name: str, endian: str) -> None:
    type_ = types.by_name(name)
    group = type_.rows_interleaved
    scales = SCALES[name]
    places = []
    group_bytes = group * type_.row_bytes(N_BLOCKS * type_.block_elems)
    last_block = 2 * group_bytes - group * type_.block_bytes
    for begin, fields in ((group_bytes, scales.row), (last_block, scales.block)):
        for field in fields:
            last_row = (group - 1) * len(NAN[field.kind])
            places.append((field.kind, begin + group * field.offset + last_row))
    assert places
    for code, where in places:
        rows, row_bytes = rows_of(type_)
        nan = NAN[code] if endian == "little" else NAN[code][::-1]
        rows[where : where + len(nan)] = np.frombuffer(nan, np.uint8)
        assert count_nonfinite(type_, rows, row_bytes, endian) == (1, group), (code, where)


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("type_", DECODED, ids=str)
def test_a_block_decodes_to_nan_exactly_when_we_say_so(type_: types.GGMLType) -> None:
    rng = np.random.default_rng(7)
    n_cols = type_.block_elems
    blocks = rng.integers(0, 256, (400, type_.row_bytes(n_cols)), np.uint8)
    values = oracle.dequantize(type_.id, blocks)
    for row, decoded in zip(blocks, values, strict=True):
        count, _ = count_nonfinite(type_, row, len(row))
        if not count:
            assert np.isfinite(decoded).all()
        elif not type_.is_quantized:
            assert not np.isfinite(decoded).any()
        else:
            assert not np.isfinite(decoded).all()


def test_iq1_m_scale_lies_in_four_nibbles() -> None:
    row = np.zeros(56, np.uint8)
    for index, nibble in enumerate((0x0, 0x0, 0xC, 0x7)):  # 0x7c00, infinity, lowest nibble first
        row[48 + 2 * index + 1] = nibble << 4
    assert count_nonfinite(types.IQ1_M, row, 56) == (1, 0)
    row[55] = 0x3 << 4  # 0x3c00 is 1
    assert count_nonfinite(types.IQ1_M, row, 56) == (0, -1)


def test_types_that_files_hold_are_covered() -> None:
    quantized = {t.name for t in types.TYPES if t.is_quantized and "not in files" not in t.note}
    assert quantized - SCALES.keys() == {"NVFP4", "I2_S", "Q4_2", "Q4_3", "IQ4_NL_4_8", "IQ4_NL_8_8"}
