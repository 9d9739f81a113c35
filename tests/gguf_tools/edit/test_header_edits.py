"""Edits of metadata and names, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_tools import Value
from gguf_tools.edit.header_edits import (
    Change,
    Edited,
    new_names_of,
    parse_assignment,
    remove_keys,
    rename_keys,
    rename_tensors,
    set_values,
)
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.keys import expected_kinds

GOLDEN = Path(__file__).parents[2] / "golden"
METADATA = {
    keys.ARCHITECTURE: Value.string("deepseek2"),
    keys.NAME: Value.string("x"),
    "deepseek2.block_count": Value.u32(3),
    "own.number": Value.i16(-1),
    "own.list": Value.f32s([0.5]),
}
SPLIT = {keys.SPLIT_NO: Value.u16(0), keys.SPLIT_COUNT: Value.u16(2), keys.SPLIT_TENSORS_COUNT: Value.i32(6)}


def set_(*arguments: str, metadata: dict[str, Value] = METADATA, force: bool = False) -> Edited:
    return set_values(metadata, [parse_assignment(argument) for argument in arguments], force=force)


# --- kinds ----------------------------------------------------------------------------------


def test_every_key_has_its_kinds() -> None:
    apart = {keys.SPLIT_NO, keys.SPLIT_COUNT, keys.SPLIT_TENSORS_COUNT}
    for name, key in vars(keys).items():
        if name.isupper() and key not in apart and not name.startswith(("_", "QUANTIZE_", "IMATRIX_")):
            sample = key.format(arch="deepseek2", id=17, name="tool_use")
            assert expected_kinds(sample, "deepseek2"), key


def test_the_converter_writes_the_kinds_that_are_expected() -> None:
    """What llama.cpp's converter wrote, by what its values look like: JSON has no more to tell."""
    names = {"string": str, "bool": bool, "float32": float, "uint32": int, "int32": int}
    n_keys = 0
    for path in (GOLDEN / "convert").glob("*.json"):
        for key, value in json.loads(path.read_text())["metadata"].items():
            expected = expected_kinds(key, "deepseek2")
            if expected and not isinstance(value, list | dict):
                assert type(value) in [names.get(kind) for kind in expected], key
                n_keys += 1
    assert n_keys > 100


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("general.base_model.12.name", ("string",)),
        ("general.base_model.x.name", ()),
        ("tokenizer.chat_template.rag", ("string",)),
        ("tokenizer.chat_template", ("string",)),
        ("llama.block_count", ()),
        ("deepseek2.block_count", ("uint32",)),
        ("deepseek2.attention.head_count", ("uint32", "array of int32", "array of uint32")),
        ("own.key", ()),
    ],
)
def test_kinds_by_key(key: str, expected: tuple[str, ...]) -> None:
    assert expected_kinds(key, "deepseek2") == expected


# --- set ------------------------------------------------------------------------------------


def test_known_keys_keep_their_places_and_new_ones_come_last() -> None:
    edited = set_("general.name=y", "new=u8:1", "own.number=5", "general.license=mit")
    assert list(edited.metadata.items()) == [
        (keys.ARCHITECTURE, Value.string("deepseek2")),
        (keys.NAME, Value.string("y")),
        ("deepseek2.block_count", Value.u32(3)),
        ("own.number", Value.i16(5)),
        ("own.list", Value.f32s([0.5])),
        ("new", Value.u8(1)),
        ("general.license", Value.string("mit")),
    ]
    assert [change.as_text() for change in edited.changes] == [
        "general.name: 'x' -> 'y'",
        "new: added uint8 1",
        "own.number: -1 -> 5",
        "general.license: added string 'mit'",
    ]


def test_new_keys_stay_in_front_of_the_keys_of_the_set() -> None:
    edited = set_("new=u8:1", "general.name=y", metadata=METADATA | SPLIT)
    assert list(edited.metadata) == [*METADATA, "new", *SPLIT]
    assert edited.metadata[keys.NAME] == Value.string("y")
    early = SPLIT | METADATA
    assert list(set_("new=u8:1", metadata=early).metadata) == [*early, "new"]
    assert list(set_("general.name=y", metadata=dict(SPLIT)).metadata) == [keys.NAME, *SPLIT]


def test_a_file_is_read_as_what_its_key_holds(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("5\n")
    edited = set_(f"own.number=@{path}", f"tokenizer.chat_template=@{path}", f"general.tags=@{path}")
    assert edited.metadata["own.number"] == Value.i16(5)
    assert edited.metadata["tokenizer.chat_template"] == Value.string("5\n")
    assert edited.metadata["general.tags"] == Value.strings(["5"])
    with pytest.raises(BadRequest, match=f"'new' is new: say its type, as in new=str@{path}"):
        set_(f"new=@{path}")
    with pytest.raises(BadRequest, match=r"nope: can't be read .* general\.name=str:@nope is that text"):
        set_("general.name=@nope")


def test_a_key_of_a_kind_that_does_not_load_gets_the_right_one() -> None:
    broken = METADATA | {"deepseek2.rope.freq_base": Value.u32(10000)}
    edited = set_("deepseek2.rope.freq_base=1000000", metadata=broken)
    assert edited.metadata["deepseek2.rope.freq_base"] == Value.f32(1e6)


def test_values_that_are_so_already_are_no_change() -> None:
    assert set_("general.name=x", "own.number=i16:-1") == Edited(METADATA)


def test_input_is_left_alone() -> None:
    before = dict(METADATA)
    set_("general.name=y", "new=u8:1")
    remove_keys(METADATA, [keys.NAME])
    rename_keys(METADATA, [("own.number", "n")])
    assert before == METADATA


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("split.no=u16:1", "'split.no' is only for split and merge"),
        ("split.count=2", "is only for split and merge"),
        ("new=1", "'new' is new: say its type, as in new=str:1"),
        ("llama.block_count=1", "is new: say its type"),
        ("own.number=40000", "'40000' is not a number that int16 can hold"),
        ("general.file_type=str:7", "'7' is string, llama.cpp reads uint32; use force=True"),
        ("deepseek2.block_count=i32:3", "3 is int32, llama.cpp reads uint32; use force=True"),
        ("deepseek2.attention.head_count=f32:3", "reads uint32 or array of int32 or array of uint32"),
        ("own.number=i32:5", "5 is int32, the file has int16; use force=True"),
        ("general.architecture=llama", r"no program would read keys like 'deepseek2\.block_count'"),
    ],
)
def test_what_would_break_the_file_is_refused(argument: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        set_(argument)


def test_force_allows_kinds_and_architectures() -> None:
    edited = set_("general.file_type=str:7", "own.number=str:x", "general.architecture=llama", force=True)
    assert edited.metadata["general.file_type"] == Value.string("7")
    assert [change.as_text() for change in edited.changes][1] == "own.number: int16 -1 -> string 'x'"
    with pytest.raises(BadRequest, match="only for split and merge"):
        set_("split.no=u16:1", force=True)


def test_an_architecture_without_keys_of_its_own_may_change() -> None:
    metadata = {keys.ARCHITECTURE: Value.string("a"), "b.block_count": Value.u32(1)}
    assert set_("general.architecture=b", metadata=metadata).metadata[keys.ARCHITECTURE].data == "b"


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"'general\.name' is given twice"):
        set_("general.name=a", "general.name=b")


# --- remove ---------------------------------------------------------------------------------


def test_keys_are_removed() -> None:
    edited = remove_keys(METADATA, ["own.list", keys.NAME, "own.list"])
    assert list(edited.metadata) == [keys.ARCHITECTURE, "deepseek2.block_count", "own.number"]
    assert [change.as_text() for change in edited.changes] == [
        "own.list: removed, was array of float32 [0.5]",
        "general.name: removed, was string 'x'",
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("nope", "no key 'nope'"),
        (keys.ARCHITECTURE, "can't be removed"),
        (keys.SPLIT_COUNT, "only for split and merge"),
    ],
)
def test_needed_and_missing_keys_are_not_removed(key: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        remove_keys(METADATA | SPLIT, [keys.NAME, key])


# --- rename ---------------------------------------------------------------------------------


def test_keys_are_renamed_where_they_are() -> None:
    exchange = [("own.number", "own.list"), ("own.list", "own.number")]
    edited = rename_keys(METADATA, exchange, force=True)
    assert list(edited.metadata) == [
        keys.ARCHITECTURE,
        keys.NAME,
        "deepseek2.block_count",
        "own.list",
        "own.number",
    ]
    assert edited.metadata["own.number"] == Value.f32s([0.5])
    assert [change.as_text() for change in edited.changes] == [
        "key own.number -> own.list",
        "key own.list -> own.number",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nope", "x", "no key 'nope'"),
        ("own.number", keys.NAME, "keys 'general.name' and 'own.number' would both be 'general.name'"),
        ("own.number", "", "key 'own.number' would have no name"),
        ("own.number", "general.file_type", "-1 is int16, llama.cpp reads uint32"),
        (keys.ARCHITECTURE, "x", "can't become 'x': use set and remove-key for general.architecture"),
        ("own.number", keys.ALIGNMENT, "use set and remove-key for general.alignment"),
        ("own.number", "split.no", "only for split and merge"),
    ],
)
def test_bad_new_keys_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        rename_keys(METADATA, [(old, new)])


def test_force_allows_a_key_of_another_kind() -> None:
    edited = rename_keys(METADATA, [("own.number", "general.file_type")], force=True)
    assert edited.metadata["general.file_type"] == Value.i16(-1)


NAMES = ["output.weight", "blk.0.a.weight", "blk.0.b.weight", "blk.10.a.weight"]


def test_tensors_are_renamed_by_pattern() -> None:
    renames = [(r"^blk\.(\d+)\.", r"layers.\1."), ("weight$", "w")]
    edited = rename_tensors(METADATA, NAMES, renames, regex=True)
    assert edited.metadata == METADATA
    assert edited.new_names == {
        "output.weight": "output.w",
        "blk.0.a.weight": "layers.0.a.w",
        "blk.0.b.weight": "layers.0.b.w",
        "blk.10.a.weight": "layers.10.a.w",
    }
    assert edited.changes[0] == Change("rename tensor", "output.weight", new_name="output.w")


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        ("nope", "x", "'nope' matches no tensor"),
        ("(", "x", "not a regular expression"),
        ("blk", r"\2", r"'blk' can't be replaced by .* \(invalid group reference"),
        (r"\.[ab]\.", ".", "tensors 'blk.0.a.weight' and 'blk.0.b.weight' would both be 'blk.0.weight'"),
        (".*", "", "would have no name"),
    ],
)
def test_bad_patterns_are_refused(pattern: str, replacement: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        rename_tensors(METADATA, NAMES, [(pattern, replacement)], regex=True)


def test_an_old_name_given_twice_is_refused() -> None:
    with pytest.raises(BadRequest, match="'a' is given twice"):
        new_names_of(["a"], [("a", "b"), ("a", "c")], "tensor", regex=False)


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.permutations("abcdef"))
def test_any_exchange_of_names_is_done_at_once(names: list[str], order: list[str]) -> None:
    renames = {old: new for old, new in zip("abcdef", order, strict=True) if old in names}
    wanted = [renames[name] for name in names]
    found = new_names_of(names, renames.items(), "tensor", regex=False)
    assert [found.get(name, name) for name in names] == wanted
    assert all(old != new for old, new in found.items())


def test_changes_as_json() -> None:
    edited = set_("own.list=1,2", "general.license=mit")
    assert [change.as_json() for change in edited.changes] == [
        {
            "action": "set",
            "name": "own.list",
            "old": {"type": "array of float32", "value": (0.5,)},
            "new": {"type": "array of float32", "value": (1.0, 2.0)},
        },
        {"action": "add", "name": "general.license", "old": None, "new": {"type": "string", "value": "mit"}},
    ]
    change = rename_tensors(METADATA, NAMES, [("output.weight", "o")]).changes[0]
    assert change.as_json() == {"action": "rename tensor", "name": "output.weight", "new_name": "o"}
