"""Byte order of tensor data, against struct layouts."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.errors import FormatError
from gguf_tools.format import ggml_types as types
from gguf_tools.format.block_layouts import can_swap, swap_bytes


@pytest.mark.parametrize("name", sorted(types.SWAPPED))
def test_swapping_twice_changes_nothing(name: str) -> None:
    type_ = types.by_name(name)
    data = np.arange(3 * type_.block_bytes).astype(np.uint8).reshape(3, -1)
    once = swap_bytes(type_, data)
    assert sorted(once.ravel()) == sorted(data.ravel())
    np.testing.assert_array_equal(swap_bytes(type_, once), data)


@pytest.mark.parametrize(
    ("type_", "code"), [(types.F32, "f4"), (types.F16, "f2"), (types.F64, "f8"), (types.I32, "i4")], ids=str
)
def test_numbers_read_the_same_in_the_other_order(type_: types.GGMLType, code: str) -> None:
    numbers = np.array([1, -2, 300], "<" + code)
    np.testing.assert_array_equal(swap_bytes(type_, numbers.view(np.uint8)).view(">" + code), numbers)


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        (types.Q8_0, [("d", "{}u2"), ("codes", "u1", 32)]),
        (types.Q4_1, [("d", "{}u2"), ("m", "{}u2"), ("codes", "u1", 16)]),
        (types.Q5_1, [("d", "{}u2"), ("m", "{}u2"), ("high", "{}u4"), ("codes", "u1", 16)]),
        (types.Q2_K, [("codes", "u1", 80), ("d", "{}u2"), ("m", "{}u2")]),
        (types.Q6_K, [("codes", "u1", 208), ("d", "{}u2")]),
        (types.TQ1_0, [("codes", "u1", 52), ("d", "{}u2")]),
    ],
    ids=lambda value: value.name if isinstance(value, types.GGMLType) else "",
)
def test_fields_read_the_same_in_the_other_order(type_: types.GGMLType, fields: list[tuple]) -> None:
    little, big = (
        np.dtype([(name, code.format(order), *shape) for name, code, *shape in fields]) for order in "<>"
    )
    data = np.arange(2 * type_.block_bytes).astype(np.uint8)
    ours, theirs = data.view(little), swap_bytes(type_, data).view(big)
    for name, *_ in fields:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_unknown_order_is_an_error() -> None:
    assert can_swap(types.Q8_0)
    assert not can_swap(types.IQ3_XXS)
    with pytest.raises(FormatError, match="IQ3_XXS has no known big-endian form"):
        swap_bytes(types.IQ3_XXS, np.zeros(98, np.uint8))
