"""The table of bits: what it says is read and written, and every decoder finds the numbers there."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.format.block_layouts import LAYOUTS
from gguf_tools.format.ggml_types import BITS, GGMLType, by_name
from quantize.formats.bits import numbers_of
from tests.quantize.codecs import decode

every_type = pytest.mark.parametrize("type_", [by_name(name) for name in BITS], ids=str)

ON_A_GRID = ("IQ1", "IQ2_X", "IQ2_S", "IQ3_X", "IQ3_S")
SIGN_AND_SIZE = ("MXFP4", "NVFP4")
"""Beginnings of the names of types whose codes do not ascend."""

ONES = {kind: np.ones(1, f"<{kind}").view(np.uint8) for kind in ("f2", "f4")}


def random_bytes(type_: GGMLType) -> np.ndarray:
    return np.random.default_rng(type_.id).integers(0, 256, (20, type_.block_bytes), np.uint8)


def replaced(type_: GGMLType, blocks: np.ndarray, name: str, values: np.ndarray) -> np.ndarray:
    """Return blocks with other numbers of one name."""
    numbers = numbers_of(type_)[name]
    bits = np.unpackbits(blocks, axis=1, bitorder="little")
    bits[:, numbers.positions.ravel()] = 0
    blocks = np.packbits(bits, axis=1, bitorder="little")
    numbers.write(blocks, values)
    return blocks


def with_plain_scales(type_: GGMLType) -> np.ndarray:
    """Return random bytes with floats that are 1 and integer scales that are not 0."""
    blocks = random_bytes(type_)
    for field in LAYOUTS[type_.name].block:
        if field.kind in ONES:
            blocks[:, field.offset : field.offset + field.item_bytes] = ONES[field.kind]
    for name, numbers in numbers_of(type_).items():
        if name == "scales":
            third = np.full(numbers.read(blocks).shape, (numbers.highest - numbers.lowest) // 3)
            blocks = replaced(type_, blocks, name, third)
        elif name == "d":
            one = np.float16(1).view(np.uint16) >> 4 * np.arange(4) & 15
            blocks = replaced(type_, blocks, name, np.tile(one, (len(blocks), 1)))
    return blocks


def decoded(type_: GGMLType, blocks: np.ndarray) -> np.ndarray:
    """Decode blocks as rows of their own; what stands before a row is 1."""
    before = [ONES[field.kind] for field in LAYOUTS[type_.name].row]
    rows = np.hstack([*(np.tile(part, (len(blocks), 1)) for part in before), blocks])
    return decode(type_, rows)


@every_type
def test_numbers_are_read_from_the_bits_that_they_are_written_to(type_: GGMLType) -> None:
    blocks, written = random_bytes(type_), np.zeros((20, type_.block_bytes), np.uint8)
    bits = np.unpackbits(blocks, axis=1, bitorder="little")
    taken = np.zeros(8 * type_.block_bytes, np.int64)
    for numbers in numbers_of(type_).values():
        stored = (bits[:, numbers.positions].astype(np.int64) << np.arange(numbers.positions.shape[1])).sum(
            -1
        )
        if numbers.is_signed:
            stored = stored ^ 0x80
        np.testing.assert_array_equal(numbers.read(blocks), stored)
        numbers.write(written, numbers.read(blocks))
        np.add.at(taken, numbers.positions.ravel(), 1)
    assert taken.max() == 1, "no bit belongs to two numbers"
    np.testing.assert_array_equal(np.unpackbits(written, axis=1, bitorder="little"), bits * taken)


@every_type
def test_a_decoder_finds_each_number_where_it_is(type_: GGMLType) -> None:
    """A number that changes moves the weights of its share of a block, and no others."""
    blocks = with_plain_scales(type_)
    before = decoded(type_, blocks)
    for name in numbers_of(type_).keys() - {"d"}:
        values = numbers_of(type_)[name].read(blocks)
        n_weights = type_.block_elems // values.shape[1]
        for number in range(0, values.shape[1], 1 + values.shape[1] // 40):
            other = values.copy()
            other[:, number] ^= 1
            moved = decoded(type_, replaced(type_, blocks, name, other)) != before
            share = slice(number * n_weights, (number + 1) * n_weights)
            assert moved[:, share].any()
            moved[:, share] = False
            assert not moved.any()


@pytest.mark.parametrize(
    "type_", [by_name(name) for name in BITS if not name.startswith(ON_A_GRID + SIGN_AND_SIZE)], ids=str
)
def test_weights_ascend_with_codes(type_: GGMLType) -> None:
    """So no two bits of a code are mistaken for each other. Where a scale is negative they descend."""
    codes = numbers_of(type_)["codes"]
    n_codes = codes.highest - codes.lowest + (0 if type_.name == "TQ2_0" else 1)
    blocks = with_plain_scales(type_)[:1]
    rows = [
        decoded(type_, replaced(type_, blocks, "codes", np.full((1, type_.block_elems), code)))
        for code in range(n_codes)
    ]
    steps = np.diff(np.concatenate(rows), axis=0)
    assert ((steps > 0).all(0) | (steps < 0).all(0)).all()
