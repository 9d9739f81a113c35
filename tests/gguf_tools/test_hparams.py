"""Hyper-parameters: every key is read as what it says, and nothing else is taken for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import _FIELDS, HParams, architecture_of, known_hparams, read_hparams
from gguf_tools.format.values import Kind, Value

PATH = Path("model.gguf")
GOOD = {
    "a whole number": (Value.u32(7), 7),
    "a number": (Value.f32(0.5), 0.5),
    "a number, or one for each layer": (Value.f32s([0.5, 1.5]), (0.5, 1.5)),
    "true or false": (Value.bool_(True), True),
    "true or false for each layer": (Value.bools([True, False]), (True, False)),
    "a string": (Value.string("yarn"), "yarn"),
}
BAD = {
    "a whole number": [Value.string("7"), Value.f32(7.0), Value.bool_(True), Value.f32s([7.0])],
    "a number": [Value.string("0.5"), Value.bool_(False), Value.f32s([0.5])],
    "a number, or one for each layer": [Value.string("0.5"), Value.bool_(False), Value.strings(["0.5"])],
    "true or false": [Value.u8(1), Value.string("true")],
    "true or false for each layer": [Value.bool_(True), Value.u8s([1, 0]), Value.strings(["true"])],
    "a string": [Value.u32(1), Value.strings(["yarn"])],
}


def read(key: str, value: Value) -> HParams:
    return read_hparams({key: value}, "llama", PATH)


@pytest.mark.parametrize("name", _FIELDS)
def test_every_key_is_read_and_refused(name: str) -> None:
    key, expected = HParams("llama", PATH).key(name), _FIELDS[name].metadata["kind"].expected
    value, data = GOOD[expected]
    assert getattr(read(key, value), name) == data
    assert [other for other in _FIELDS if getattr(read(key, value), other) is not None] == [name]
    assert getattr(read(key.replace("llama", "other"), value), name) is None
    for wrong in BAD[expected]:
        with pytest.raises(FormatError, match=f"{re.escape(key)} is .*, expected {expected}"):
            read(key, wrong)
        assert getattr(known_hparams({key: wrong}, "llama"), name) is None


def test_hyper_parameters_of_gguf_tools_keys_are_all_there() -> None:
    templates = {
        value for name, value in vars(keys).items() if isinstance(value, str) and value.startswith("{arch}.")
    }
    assert {item.metadata["template"] for item in _FIELDS.values()} == templates


@pytest.mark.parametrize("kind", [Kind.UINT8, Kind.INT32, Kind.UINT64, Kind.INT64])
def test_whole_numbers_of_any_width_do(kind: Kind) -> None:
    assert read("llama.block_count", Value(kind, 3)).size("block_count") == 3


def test_a_number_may_be_written_as_a_whole_one() -> None:
    theta = read("llama.rope.freq_base", Value.u32(10000)).rope_freq_base
    assert theta == 10000.0
    assert isinstance(theta, float)


def test_sizes_per_layer() -> None:
    hparams = read("llama.attention.head_count_kv", Value.u32s([0, 8, 4]))
    assert hparams.head_count_kv == (0, 8, 4)
    assert hparams.size("head_count_kv") == 8
    assert hparams.first("head_count_kv") == 0
    assert read("llama.attention.head_count_kv", Value.u32s([])).first("head_count_kv") is None


def test_a_size_that_is_missing_or_absurd_names_its_key() -> None:
    hparams = read("llama.block_count", Value.i32(-1))
    assert hparams.size("head_count", 5) == 5
    assert hparams.first("head_count") is None
    for name in ("head_count", "block_count"):
        with pytest.raises(FormatError, match=re.escape(f"model.gguf: {hparams.key(name)} is ")):
            hparams.size(name)
    with pytest.raises(FormatError, match="is 2147483648, expected a whole number"):
        read("llama.block_count", Value.u32(2**31)).size("block_count")


def test_the_architecture() -> None:
    assert architecture_of({"general.architecture": Value.string("llama")}) == "llama"
    assert architecture_of({"general.architecture": Value.u32(1)}) is None
    assert architecture_of({}) is None
