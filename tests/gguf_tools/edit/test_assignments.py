"""KEY=TYPE:VALUE: every type, from text and from files, and one line for each that makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_tools import Kind, Value
from gguf_tools.edit.header_edits import Assignment, parse_assignment, parse_value
from gguf_tools.errors import BadRequest

SHORT = {
    "u8": Kind.UINT8, "i8": Kind.INT8, "u16": Kind.UINT16, "i16": Kind.INT16, "u32": Kind.UINT32,
    "i32": Kind.INT32, "u64": Kind.UINT64, "i64": Kind.INT64,
}  # fmt: skip


def value_of(argument: str, default: str = "string") -> Value:
    assignment = parse_assignment(argument)
    return parse_value(assignment.key, assignment.type_name or default, assignment.text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("u8:255", Value.u8(255)),
        ("i8:-128", Value.i8(-128)),
        ("u16:0xffff", Value.u16(65535)),
        ("i16:-1", Value.i16(-1)),
        ("u32: 4_000 ", Value.u32(4000)),
        ("i32:0", Value.i32(0)),
        ("u64:18446744073709551615", Value.u64(2**64 - 1)),
        ("i64:-9223372036854775808", Value.i64(-(2**63))),
        ("f32:0.1", Value.f32(0.1)),
        ("f32:1e-06", Value.f32(1e-6)),
        ("f64:0.1", Value.f64(0.1)),
        ("f64:-inf", Value.f64(float("-inf"))),
        ("bool:true", Value.bool_(True)),
        ("bool:False", Value.bool_(False)),
        ("bool:0", Value.bool_(False)),
        ("str:", Value.string("")),
        ("str: a = b: c\n", Value.string(" a = b: c\n")),
        ("uint32:1", Value.u32(1)),
        ("float32:1", Value.f32(1)),
        ("string:x", Value.string("x")),
        ("[i32]:1, -2,3", Value.i32s([1, -2, 3])),
        ("[u8]:", Value.u8s([])),
        ("[f32]:[0.5, 1]", Value.f32s([0.5, 1])),
        ("[bool]:true,0", Value.bools([True, False])),
        ("[bool]:[true, false]", Value.bools([True, False])),
        ("[str]:a,b b", Value.strings(["a", "b b"])),
        ('[str]:["a, b", "", "ü"]', Value.strings(["a, b", "", "ü"])),
        ("[string]:a", Value.strings(["a"])),
    ],
)
def test_typed_values(text: str, expected: Value) -> None:
    assert value_of(f"some.key={text}") == expected
    assert value_of(f"some.key={text}").type_name == expected.type_name


@pytest.mark.parametrize("text", ["x", "", "https://a.b/c", "a=b", "note: u32", "U8:1", "[1,2]", "str"])
def test_what_has_no_type_is_the_value(text: str) -> None:
    assert parse_assignment(f"k={text}") == Assignment("k", None, text)


@given(st.sampled_from(sorted(SHORT)), st.integers(-(2**65), 2**65))
def test_integers_are_held_exactly_or_refused(name: str, number: int) -> None:
    kind = SHORT[name]
    bits = int(name[1:])
    lowest, highest = (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if lowest <= number <= highest:
        assert value_of(f"k={name}:{number}") == Value(kind, number)
    else:
        with pytest.raises(BadRequest, match=f"is not a number that {kind.name.lower()} can hold"):
            value_of(f"k={name}:{number}")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_any_strings_come_through_json(texts: list[str]) -> None:
    assert value_of(f"k=[str]:{json.dumps(texts)}") == Value.strings(texts)


@given(st.text())
def test_any_text_is_a_string(text: str) -> None:
    assert value_of(f"k=str:{text}") == Value.string(text)


def test_files_are_taken_as_they_are(tmp_path: Path) -> None:
    raw = b"{% if x %}\r\n \xff\n"
    (tmp_path / "chat.jinja").write_bytes(raw)
    assert value_of(f"k=str@{tmp_path}/chat.jinja") == Value.string(raw)
    (tmp_path / "ids.json").write_text("[1,\n 2]\n")
    assert value_of(f"k=[u32]@{tmp_path}/ids.json") == Value.u32s([1, 2])
    with pytest.raises(BadRequest, match="nowhere: can't be read"):
        parse_assignment("k=str@nowhere")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("k", "'k': expected KEY=TYPE:VALUE"),
        ("=str:x", "expected KEY=TYPE:VALUE"),
        ("k=int:5", "key 'k': 'int' is not a type, expected u8, i8"),
        ("k=[x]:5", "'x' is not a type"),
        ("k=u32:", "key 'k': '' is not a number that uint32 can hold"),
        ("k=u32:1.0", "'1.0' is not a number that uint32"),
        ("k=f32:1e39", "'1e39' is not a number that float32"),
        ("k=f32:x", "'x' is not a number that float32"),
        ("k=bool:yes", "'yes' is not a bool, expected true or false"),
        ("k=[u8]:1,,2", "'' is not a number that uint8"),
        ("k=[u8]:[1, 256]", "'256' is not a number that uint8"),
        ("k=[u8]:[1, true]", "'true' is not a number that uint8"),
        ("k=[u8]:[1", "begins like a JSON array, but is none"),
        ("k=[str]:[[1]]", r"an array holds \[1\], expected a plain value"),
        ("k=[str]:[null]", "an array holds null"),
        ("k=[u8]:" + "[" * 100_000, "begins like a JSON array"),
    ],
)
def test_what_makes_no_sense_is_refused(argument: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        value_of(argument)


def test_arrays_of_arrays_are_refused() -> None:
    with pytest.raises(BadRequest, match="an array of arrays can't be written here"):
        parse_value("k", "array of array", "[[1]]")
