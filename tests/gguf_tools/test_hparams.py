"""Hyper-parameters: every key is read as what it says, and nothing else is taken for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import _FIELDS, HParams, architecture_of, known_hparams, read_hparams
from gguf_tools.format.loaders import without_effect
from gguf_tools.format.values import Kind, Value

PATH = Path("model.gguf")
UNKNOWN = "what"
"""An architecture of whose loader nothing is known: all of its keys count."""

GOOD = {
    "a whole number": (Value.u32(7), 7),
    "a number": (Value.f32(0.5), 0.5),
    "a number, or one for each layer": (Value.f32s([0.5, 1.5]), (0.5, 1.5)),
    "true or false": (Value.bool_(True), True),
    "true or false for each layer, or a whole number": (Value.bools([True, False]), (True, False)),
    "a string": (Value.string("yarn"), "yarn"),
}
BAD = {
    "a whole number": [Value.string("7"), Value.f32(7.0), Value.bool_(True), Value.f32s([7.0])],
    "a number": [Value.string("0.5"), Value.bool_(False), Value.f32s([0.5])],
    "a number, or one for each layer": [Value.string("0.5"), Value.bool_(False), Value.strings(["0.5"])],
    "true or false": [Value.u8(1), Value.string("true")],
    "true or false for each layer, or a whole number": [Value.bool_(True), Value.strings(["true"])],
    "a string": [Value.u32(1), Value.strings(["yarn"])],
}


def read(key: str, value: Value) -> HParams:
    return read_hparams({key: value}, UNKNOWN, PATH)


@pytest.mark.parametrize("name", _FIELDS)
def test_every_key_is_read_and_refused(name: str) -> None:
    key, expected = HParams(UNKNOWN, PATH).key(name), _FIELDS[name].metadata["kind"].expected
    value, data = GOOD[expected]
    assert getattr(read(key, value), name) == data
    assert [other for other in _FIELDS if getattr(read(key, value), other) is not None] == [name]
    other_key = key.replace(UNKNOWN, "other")
    assert (getattr(read(other_key, value), name) is None) == (other_key != key)
    for wrong in BAD[expected]:
        with pytest.raises(FormatError, match=f"{re.escape(key)} is .*, expected {expected}"):
            read(key, wrong)
        assert getattr(known_hparams({key: wrong}, UNKNOWN), name) is None


def test_hyper_parameters_have_keys_of_their_own() -> None:
    templates = [item.metadata["template"] for item in _FIELDS.values()]
    assert len({*templates}) == len(templates)
    assert {*templates} < {*keys.hparam_templates()}


NEEDED = {
    f"llama.{key}": value
    for key, value in {
        "block_count": Value.u32(2), "context_length": Value.u32(64), "embedding_length": Value.u32(32),
        "attention.layer_norm_rms_epsilon": Value.f32(1e-5),
    }.items()
}  # fmt: skip


def test_a_key_that_llama_cpp_does_not_read_counts_as_missing() -> None:
    more = {"llama.logit_scale": Value.f32(2.0), "llama.rope.scale_linear": Value.f32(4.0)}
    hparams = read_hparams(NEEDED | more, "llama", PATH)
    assert hparams.logit_scale is None
    assert hparams.rope_scale_linear == 4.0
    assert without_effect(NEEDED | more, "llama") == ("llama.logit_scale",)
    assert without_effect(NEEDED | more, UNKNOWN) == ()


@pytest.mark.parametrize("key", NEEDED)
def test_a_key_that_llama_cpp_requires_is_missed(key: str) -> None:
    with pytest.raises(FormatError, match=f"model.gguf: no key {re.escape(key)}, which llama.cpp requires"):
        read_hparams({name: value for name, value in NEEDED.items() if name != key}, "llama", PATH)


def test_a_list_in_place_of_a_number_is_refused() -> None:
    for key, fits in (("llama.attention.head_count", True), ("llama.attention.key_length", False)):
        metadata = NEEDED | {key: Value.u32s([16, 16])}
        if fits:
            assert read_hparams(metadata, "llama", PATH).head_count == (16, 16)
        else:
            with pytest.raises(FormatError, match=r"key_length is \(16, 16\), expected a whole number"):
                read_hparams(metadata, "llama", PATH)


def test_sizes_by_layer_are_as_many_as_layers() -> None:
    hparams = read("what.attention.head_count_kv", Value.u32s([0, 8]))
    assert hparams.by_layer("head_count_kv", 2) == (0, 8)
    assert read("what.attention.head_count_kv", Value.u32(8)).by_layer("head_count_kv", 3) == (8, 8, 8)
    with pytest.raises(FormatError, match="expected 3 numbers, one for each layer"):
        hparams.by_layer("head_count_kv", 3)


def test_flags_may_be_one_number() -> None:
    name, key = "recurrent_layers", "what.attention.recurrent_layers"
    assert read(key, Value.u32s([1, 0])).flags(name, 2) == (True, False)
    assert read(key, Value.u32(1)).flags(name, 2) == (True, True)


@pytest.mark.parametrize("kind", [Kind.UINT8, Kind.INT32, Kind.UINT64, Kind.INT64])
def test_whole_numbers_of_any_width_do(kind: Kind) -> None:
    assert read("what.block_count", Value(kind, 3)).size("block_count") == 3


def test_a_number_may_be_written_as_a_whole_one() -> None:
    theta = read("what.rope.freq_base", Value.u32(10000)).rope_freq_base
    assert theta == 10000.0
    assert isinstance(theta, float)


def test_sizes_per_layer() -> None:
    hparams = read("what.attention.head_count_kv", Value.u32s([0, 8, 4]))
    assert hparams.head_count_kv == (0, 8, 4)
    assert hparams.size("head_count_kv") == 8
    assert hparams.first("head_count_kv") == 0
    assert read("what.attention.head_count_kv", Value.u32s([])).first("head_count_kv") is None


def test_a_size_that_is_missing_or_absurd_names_its_key() -> None:
    hparams = read("what.block_count", Value.i32(-1))
    assert hparams.size("head_count", 5) == 5
    assert hparams.first("head_count") is None
    for name in ("head_count", "block_count"):
        with pytest.raises(FormatError, match=re.escape(f"model.gguf: {hparams.key(name)} is ")):
            hparams.size(name)
    with pytest.raises(FormatError, match="is 2147483648, expected a whole number"):
        read("what.block_count", Value.u32(2**31)).size("block_count")


def test_the_architecture() -> None:
    assert architecture_of({"general.architecture": Value.string("llama")}) == "llama"
    assert architecture_of({"general.architecture": Value.u32(1)}) is None
    assert architecture_of({}) is None
