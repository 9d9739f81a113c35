"""Editing files and sets: what is written equals a file laid out anew, and nothing is ever half-done."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_tools import FileLayout, GGUFFile, TensorInfo, Value, open_gguf
from gguf_tools.edit import in_place, rewrite
from gguf_tools.edit.header_edits import Edit, parse_assignment, remove_keys, rename_tensors, set_values
from gguf_tools.edit.model_edits import EditOutcome, edit_model, recover
from gguf_tools.edit.rewrite import copy_range, write_files
from gguf_tools.edit.split import split_files
from gguf_tools.errors import BadRequest, FormatError, OutputError, ToolkitError, TruncatedError
from gguf_tools.format import ggml_types as types
from gguf_tools.format import keys
from gguf_tools.format.header import Endian, align_up, encode_header
from tests.gguf_tools.sample_files import METADATA, TENSORS, finite_bytes, write_file
from tests.support.killing import Mode, killed_at


def setting(*arguments: str, force: bool = False) -> Edit:
    assignments = [parse_assignment(argument) for argument in arguments]
    return lambda metadata, names: set_values(metadata, assignments, force=force)


def removing(*names: str) -> Edit:
    return lambda metadata, _: remove_keys(metadata, names)


def renaming(*renames: tuple[str, str], regex: bool = False) -> Edit:
    return lambda metadata, names: rename_tensors(metadata, names, renames, regex=regex)


def hows(outcome: EditOutcome) -> list[str]:
    return [file.how for file in outcome.files]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_set(folder: Path, max_tensors: int = 2) -> list[Path]:
    """The sample file as a set of three; the second file has the tensors 2 and 3."""
    whole = folder / "whole.gguf"
    write_file(whole)
    with open_gguf(whole) as source:
        files = split_files(source, folder / "m", max_tensors=max_tensors)
        write_files(files, source.paths)
    whole.unlink()
    return [file.path for file in files]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write_file(path)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_set(tmp_path)


# --- one file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "how"),
    [
        (setting("a.u8=7", "a.f32=2.5"), "in place"),
        (setting("general.name=ÄrÖße 深度 🐳"), "in place"),
        (renaming(("output_norm.weight", "norm_output.weight")), "in place"),
        (setting("general.name=a much longer name than the one before, by far"), "rewritten"),
        (removing("a.strings"), "rewritten"),
        (renaming(("output_norm.weight", "x")), "rewritten"),
        (setting("general.alignment=u32:64"), "rewritten"),
        (setting("a.u8=255"), "unchanged"),
        (renaming(("output_norm.weight", "output_norm.weight")), "unchanged"),
    ],
)
def test_the_cheapest_way_is_taken(path: Path, edit: Edit, how: str) -> None:
    before = path.stat()
    assert hows(edit_model(path, edit, dry_run=True)) == [how]
    outcome = edit_model(path, edit)
    assert hows(outcome) == [how]
    assert bool(outcome.changes) == (how != "unchanged")
    after = path.stat()
    assert (after.st_ino == before.st_ino) == (how != "rewritten")
    assert (after.st_mtime_ns == before.st_mtime_ns) == (how == "unchanged")
    assert outcome.files[0].bytes_written == {
        "in place": GGUFFile(path).data_start, "rewritten": after.st_size, "unchanged": 0,
    }[how]  # fmt: skip


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
NAMES = [info.name for info in TENSORS]


@given(
    values=st.dictionaries(st.sampled_from(["general.name", "general.license", "own.key"]), TEXTS),
    removed=st.sets(st.sampled_from(["a.u8", "a.strings", "general.name"])),
    order=st.permutations(NAMES),
    alignment=st.sampled_from([None, 8, 32, 256]),
    endian=st.sampled_from(["little", "big"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_result_is_the_file_laid_out_anew(
    tmp_path: Path,
    values: dict[str, str],
    removed: set[str],
    order: list[str],
    alignment: int | None,
    endian: Endian,
) -> None:
    """Setting, removing and exchanging names, one after the other, each in whatever way it is done."""
    path = tmp_path / "m.gguf"
    data = write_file(path, endian=endian)
    arguments = [f"{key}=str:{text}" for key, text in values.items()]
    edit_model(path, setting(*arguments, *([f"general.alignment={alignment}"] if alignment else [])))
    edit_model(path, removing(*removed))
    edit_model(path, renaming(*zip(NAMES, order, strict=True)))

    metadata = METADATA | {key: Value.string(text) for key, text in values.items()}
    if alignment:
        metadata |= {keys.ALIGNMENT: Value.u32(alignment)}
    metadata = {key: value for key, value in metadata.items() if key not in removed}
    renamed = [replace(info, name=name) for info, name in zip(TENSORS, order, strict=True)]
    expected = bytearray(FileLayout.of(metadata, renamed, endian=endian).header)
    for info in TENSORS:
        expected += data[info.name] + bytes(-len(data[info.name]) % (alignment or 32))
    assert path.read_bytes() == expected


def test_gguf_py_reads_the_result(path: Path) -> None:
    edit_model(path, setting('general.tags=[str]:["a, b"]', "own.key=i64:-5", "general.name=x"))
    edit_model(path, renaming(("token_embd.weight", "t")))
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.tags"].contents() == ["a, b"]
    assert reader.fields["own.key"].contents() == -5
    assert reader.fields["general.name"].contents() == "x"
    assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == {
        "t" if info.name == "token_embd.weight" else info.name: finite_bytes(info) for info in TENSORS
    }


def test_output_is_written_elsewhere(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    outcome = edit_model(path, setting("a.u8=7"), output=tmp_path / "out.gguf")
    assert hows(outcome) == ["written"]
    assert path.read_bytes() == before
    edit_model(path, setting("a.u8=7"))
    assert path.read_bytes() == (tmp_path / "out.gguf").read_bytes()


def test_output_that_is_the_input_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(path)
    os.link(path, tmp_path / "hard.gguf")
    before = content(tmp_path)
    for name in ("m.gguf", "link.gguf", "hard.gguf"):
        with pytest.raises(OutputError, match="is an input of this run"):
            edit_model(path, setting("a.u8=7"), output=tmp_path / name)
    assert content(tmp_path) == before


@pytest.mark.parametrize("value", ["7", "255"])
def test_dry_run_writes_nothing(path: Path, tmp_path: Path, value: str) -> None:
    before = content(tmp_path)
    edit_model(path, setting(f"a.u8={value}"), dry_run=True)
    edit_model(path, removing("a.u8"), dry_run=True)
    edit_model(path, removing("a.u8"), output=tmp_path / "out.gguf", dry_run=True)
    assert content(tmp_path) == before


def test_symbolic_links_stay(path: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blob = path.rename(tmp_path / "blobs" / "0123")
    path.symlink_to(blob)
    for edit in (setting("a.u8=7"), removing("a.strings")):
        edit_model(path, edit)
        assert path.is_symlink()
        assert names(tmp_path / "blobs") == ["0123"]
    with GGUFFile(blob) as file:
        assert file.get("a.u8") == 7
        assert "a.strings" not in file.metadata


def test_permissions_stay(path: Path) -> None:
    path.chmod(0o640)
    assert hows(edit_model(path, removing("a.strings"))) == ["rewritten"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_gaps_between_tensors_are_closed_and_the_rest_is_left(path: Path) -> None:
    """A file that llama.cpp refuses because of a gap is mended by any edit; unused bytes stay otherwise."""
    data = path.read_bytes()
    path.write_bytes(data + b"more")
    assert hows(edit_model(path, setting("a.u8=7"))) == ["in place"]
    assert path.read_bytes().endswith(b"more")
    gap = 768 + 64
    header = encode_header(METADATA, TENSORS[:2], [0, gap])
    header = header.ljust(align_up(len(header), 32), b"\0")
    path.write_bytes(header + finite_bytes(TENSORS[0]).ljust(gap, b"g") + finite_bytes(TENSORS[1]))
    assert hows(edit_model(path, setting("a.u8=7"))) == ["rewritten"]
    write_file(path.with_name("anew"), METADATA | {"a.u8": Value.u8(7)}, TENSORS[:2])
    assert path.read_bytes() == path.with_name("anew").read_bytes()


def test_a_header_without_room_behind_it_is_written_anew(path: Path) -> None:
    header = encode_header(METADATA | {"a.last": Value.u8(1)}, (), ())
    assert len(header) % 32
    path.write_bytes(header)
    assert hows(edit_model(path, setting("a.u8=7"))) == ["rewritten"]
    assert hows(edit_model(path, setting("a.u8=8"))) == ["in place"]


def test_a_terabyte_changes_in_place(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    layout = FileLayout.of(METADATA, [TensorInfo("t", (1 << 20, 1 << 18), types.F32)])
    with open(path, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.total_bytes)
    assert hows(edit_model(path, setting("a.u8=7"))) == ["in place"]
    assert path.stat().st_size == layout.total_bytes > 1 << 40
    with GGUFFile(path) as source:
        assert source.get("a.u8") == 7


# --- sets -----------------------------------------------------------------------------------


def test_metadata_are_in_the_first_file(shards: list[Path]) -> None:
    before = [path.read_bytes() for path in shards]
    assert hows(edit_model(shards[2], removing("a.strings"))) == ["rewritten", "unchanged", "unchanged"]
    assert [path.read_bytes() for path in shards[1:]] == before[1:]
    with open_gguf(shards[0]) as source:
        assert list(source.metadata) == [key for key in METADATA if key != "a.strings"]
        assert {name: source.raw(name).tobytes() for name in source.tensors} == {
            info.name: finite_bytes(info) for info in TENSORS
        }


def test_a_tensor_is_renamed_where_it_is(shards: list[Path]) -> None:
    name = list(open_gguf(shards[0]).tensors)[2]
    before = [path.stat().st_ino for path in shards]
    outcome = edit_model(shards[0], renaming((name, "x")))
    assert hows(outcome) == ["unchanged", "rewritten", "unchanged"]
    after = [path.stat().st_ino for path in shards]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    with open_gguf(shards[1]) as source:
        assert list(source.tensors)[2] == "x"
        assert source.raw("x").tobytes() == finite_bytes(TENSORS[2])


@pytest.mark.parametrize(
    "edit",
    [
        setting("general.name=x", "own.key=u8:1"),
        setting("general.alignment=u32:256", "own.key=u8:1"),
        removing("a.strings", "a.u8"),
        renaming(("weight", "w"), regex=True),
        renaming((NAMES[0], NAMES[1]), (NAMES[1], NAMES[0])),
    ],
    ids=["set", "align", "remove", "rename all", "exchange"],
)
def test_editing_a_set_is_splitting_what_was_edited(tmp_path: Path, edit: Edit) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    edit_model(write_set(ours)[1], edit)
    write_file(theirs / "whole.gguf")
    edit_model(theirs / "whole.gguf", edit)
    with open_gguf(theirs / "whole.gguf") as source:
        write_files(split_files(source, theirs / "m", max_tensors=2), source.paths)
    (theirs / "whole.gguf").unlink()
    assert content(ours) == content(theirs)


def test_alignment_goes_and_comes_in_every_file(shards: list[Path], tmp_path: Path) -> None:
    before = content(tmp_path)
    assert hows(edit_model(shards[0], setting("general.alignment=u32:64"))) == ["rewritten"] * 3
    with open_gguf(shards[0]) as source:
        assert [shard.alignment for shard in source.shards] == [64] * 3
    assert hows(edit_model(shards[0], removing(keys.ALIGNMENT))) == ["rewritten"] * 3
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["out.gguf", "out-00002-of-00003.gguf"])
def test_a_set_is_written_elsewhere_as_a_set(shards: list[Path], tmp_path: Path, name: str) -> None:
    before = content(tmp_path)
    folder = tmp_path / "other"
    folder.mkdir()
    assert hows(edit_model(shards[0], setting("a.u8=7"), output=folder / name)) == ["written"] * 3
    assert names(folder) == [f"out-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert {path.name: path.read_bytes() for path in shards} == before
    edit_model(shards[0], setting("a.u8=7"))
    for ours, theirs in zip(sorted(folder.iterdir()), shards, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    with pytest.raises(OutputError, match="is an input of this run"):
        edit_model(shards[0], setting("a.u8=8"), output=tmp_path / "m.gguf")


def test_a_name_that_another_file_has_is_refused(shards: list[Path], tmp_path: Path) -> None:
    before = content(tmp_path)
    exchange = renaming((NAMES[0], NAMES[5]), (NAMES[5], NAMES[0]))
    with pytest.raises(BadRequest, match=r"while there is one in m-00003-of-00003\.gguf; rename that"):
        edit_model(shards[0], exchange)
    assert content(tmp_path) == before


def test_names_move_on_through_the_files_in_one_run(shards: list[Path], tmp_path: Path) -> None:
    """Each name is free only when the next file has given it up: three rounds."""
    with open_gguf(shards[0]) as source:
        data = {name: source.raw(name).tobytes() for name in NAMES}
    pairs = [(0, NAMES[2]), (2, NAMES[5]), (5, "last"), (4, NAMES[3]), (3, "x")]
    moved = [(NAMES[index], new) for index, new in pairs]
    outcome = edit_model(shards[1], renaming(*moved))
    assert {change.name for change in outcome.changes} == {old for old, _ in moved}
    assert set(hows(outcome)) <= {"in place", "rewritten"}
    with open_gguf(shards[0]) as source:
        assert {name: source.raw(name).tobytes() for name in source.tensors} == {
            dict(moved).get(name, name): content for name, content in data.items()
        }


def test_names_are_exchanged_where_the_files_are_new(shards: list[Path], tmp_path: Path) -> None:
    exchange = renaming((NAMES[0], NAMES[5]), (NAMES[5], NAMES[0]))
    folder = tmp_path / "other"
    folder.mkdir()
    edit_model(shards[0], exchange, output=folder / "out.gguf")
    with open_gguf(shards[0]) as before, open_gguf(folder / "out-00001-of-00003.gguf") as after:
        assert after.raw(NAMES[5]).tobytes() == before.raw(NAMES[0]).tobytes()
        assert after.raw(NAMES[0]).tobytes() == before.raw(NAMES[5]).tobytes()


def test_the_work_of_an_interrupted_run_is_left_alone(path: Path, tmp_path: Path) -> None:
    """It keeps its work under the name that a rewritten file would have for a while."""
    before = path.read_bytes()
    partial, journal = tmp_path / "m.gguf.partial", tmp_path / "m.gguf.journal"
    partial.write_bytes(b"hours of work")
    journal.write_bytes(b"which of it is done")
    with pytest.raises(OutputError, match=r"an interrupted run keeps its work in m\.gguf\.partial; let it"):
        edit_model(path, removing("a.strings"))
    assert (path.read_bytes(), partial.read_bytes()) == (before, b"hours of work")
    assert hows(edit_model(path, setting("a.u8=7"))) == ["in place"]
    journal.unlink()
    with pytest.raises(OutputError, match=r"m\.gguf\.partial: is in the way, and was not made by this"):
        edit_model(path, removing("a.strings"))
    partial.write_bytes(b"PARTS of somebody else's work")
    with pytest.raises(OutputError, match=r"m\.gguf\.partial: is in the way, and was not made by this"):
        edit_model(path, removing("a.strings"))
    partial.write_bytes(b"gguf-tools PART\nof a run whose journal was removed")
    assert hows(edit_model(path, removing("a.strings"))) == ["rewritten"]
    assert not partial.exists()


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (setting("general.alignment=u32:48"), FormatError, r"m\.gguf: .*expected a power of two"),
        (setting("general.alignment=i32:64", force=True), FormatError, "is int32, expected uint32"),
        (renaming(("output_norm.weight", "x" * 64)), FormatError, r"m\.gguf: .*64 bytes, expected at"),
        (renaming(("output_norm.weight", "ü" * 32)), FormatError, "64 bytes, expected at most 63"),
        (renaming(("output_norm.weight", NAMES[0])), BadRequest, r"m\.gguf: tensors .* would both be"),
        (removing("general.architecture"), BadRequest, r"m\.gguf: key .* can't be removed"),
        (setting("general.name=str:\ud800"), FormatError, r"key 'general\.name': can't be written"),
    ],
)
def test_refused_edits_leave_the_file(
    path: Path, tmp_path: Path, edit: Edit, error: type[ToolkitError], message: str
) -> None:
    before = content(tmp_path)
    with pytest.raises(error, match=message):
        edit_model(path, edit)
    assert content(tmp_path) == before


def test_a_name_of_63_bytes_is_fine(path: Path) -> None:
    edit_model(path, renaming(("output_norm.weight", "x" * 63)))
    with open_gguf(path) as source:
        assert "x" * 63 in source.tensors


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 2000])
@pytest.mark.parametrize("edit", [removing("a.strings"), setting("a.u8=7")], ids=["rewritten", "in place"])
def test_a_full_disk_leaves_everything(
    path: Path, tmp_path: Path, edit: Edit, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(tmp_path)
    monkeypatch.setattr(
        "gguf_tools.files.partial_file._fallocate", lambda fd, n_bytes: os.ftruncate(fd, 0) is None
    )
    with file_size_limit(limit), pytest.raises(OutputError, match=r"can't be written.*File too large"):
        edit_model(path, edit)
    assert content(tmp_path) == before


def test_space_that_is_not_there_is_known_before_copying(path: Path, tmp_path: Path) -> None:
    before = content(tmp_path)
    full = pytest.raises(OutputError, match=r"m\.gguf\.partial: can't take .* File too large")
    with file_size_limit(2000), full:
        edit_model(path, removing("a.u8", "a.strings"))
    assert content(tmp_path) == before


def test_a_set_whose_last_file_cannot_be_written_is_left(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(tmp_path)
    copies = iter(range(5))

    def copy(*args: Any, **kwargs: Any) -> None:
        if next(copies, None) is None:
            raise OutputError(f"{args[6]}: full")
        copy_range(*args, **kwargs)

    monkeypatch.setattr(rewrite, "copy_range", copy)
    with pytest.raises(OutputError, match=r"m-00003-of-00003\.gguf\.partial: full"):
        edit_model(shards[0], setting("general.alignment=u32:64"))
    assert content(tmp_path) == before


def test_a_set_of_which_a_header_cannot_be_replaced_keeps_its_old_ones(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(tmp_path)
    replace_header, n_replaced = in_place.replace_header, 0

    def fail(*args: Any) -> None:
        nonlocal n_replaced
        n_replaced += 1
        if n_replaced == 2:
            raise OutputError(f"{args[1]}: full")
        replace_header(*args)

    monkeypatch.setattr(in_place, "replace_header", fail)
    with pytest.raises(OutputError, match=r"gguf: full"):
        edit_model(shards[0], renaming(*((name, f"{name[:-1]}x") for name in NAMES)))
    assert n_replaced == 3
    assert content(tmp_path) == before


def test_an_undo_of_somebody_else_is_left(path: Path, tmp_path: Path) -> None:
    undo = in_place.undo_path(path)
    undo.symlink_to("nowhere")
    with pytest.raises(OutputError, match=r"m\.gguf\.undo: is in the way"):
        edit_model(path, setting("a.u8=7"))
    assert undo.is_symlink()


def test_a_file_that_becomes_shorter_meanwhile_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.copy_file_range

    def shorten(*args: int) -> int:
        os.truncate(path, 3000)
        return whole(*args)

    monkeypatch.setattr(os, "copy_file_range", shorten)
    with pytest.raises(TruncatedError, match=r"m\.gguf: tensor 'blk\.0\.ffn_gate\.weight' ends at byte 3000"):
        edit_model(path, removing("a.strings"))
    assert names(tmp_path) == ["m.gguf"]


def test_one_edit_at_a_time(path: Path, shards: list[Path], tmp_path: Path) -> None:
    before = content(tmp_path)
    with in_place.locked(path), in_place.locked(shards[0]):
        edits = [(path, setting("a.u8=7")), (path, removing("a.u8")), (shards[2], renaming((NAMES[5], "x")))]
        for edited, edit in edits:
            with pytest.raises(OutputError, match="another process is changing it"):
                edit_model(edited, edit)
    assert content(tmp_path) == before


def test_what_another_edit_did_before_the_lock_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = in_place.locked

    def locked(locked_path: Path) -> object:
        monkeypatch.setattr(in_place, "locked", whole)
        edit_model(path, setting("general.name=another"))
        return whole(locked_path)

    monkeypatch.setattr(in_place, "locked", locked)
    edit_model(path, setting("a.u8=7"))
    with open_gguf(path) as source:
        assert (source.get("general.name"), source.get("a.u8")) == ("another", 7)


# --- crashes --------------------------------------------------------------------------------

SET_EDITS = {
    "first in place": setting("a.u8=7"),
    "first rewritten": removing("a.strings"),
    "one in place": renaming((NAMES[2], NAMES[2].upper())),
    "all in place": renaming(("weight", "WEIGHT"), regex=True),
    "all rewritten": setting("general.alignment=u32:64"),
    "both ways": renaming((NAMES[0], NAMES[0].upper()), (NAMES[2], "x"), (NAMES[5], NAMES[5].upper())),
}


def edit_set(path: Path, name: str) -> None:
    edit_model(path, SET_EDITS[name])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "before") for name in SET_EDITS if name != "one in place"),
        ("all in place", "torn"),
        ("both ways", "torn"),
    ],
)
def test_a_set_that_was_being_edited_opens_after_any_kill(tmp_path: Path, name: str, mode: Mode) -> None:
    """Every file is old or new, data and all; setting a key again finishes the work."""
    old, new, work = (tmp_path / which for which in ("old", "new", "work"))
    for folder in (old, new, work):
        folder.mkdir()
    write_set(old)
    edit_model(write_set(new)[0], SET_EDITS[name])
    first = work / "m-00001-of-00003.gguf"
    n = 0
    killed = True
    while killed:
        for path in work.iterdir():
            path.unlink()
        for path in old.iterdir():
            (work / path.name).write_bytes(path.read_bytes())
        killed = killed_at(n, partial(edit_set, first, name), mode)
        recover(work / "m-00003-of-00003.gguf")
        for path in old.iterdir():
            assert (work / path.name).read_bytes() in (path.read_bytes(), (new / path.name).read_bytes())
        with open_gguf(first) as source:
            assert len(source.tensors) == len(TENSORS)
        if name in ("first in place", "all rewritten"):
            edit_model(first, SET_EDITS[name])
            assert {path.name: (work / path.name).read_bytes() for path in new.iterdir()} == content(new)
        n += 1
    assert n > 10


def test_a_torn_set_is_recovered_by_the_name_of_any_file(shards: list[Path], tmp_path: Path) -> None:
    before = content(tmp_path)
    assert any(
        killed_at(n, partial(edit_set, shards[0], "one in place"), "torn")
        and in_place.undo_path(shards[1]).exists()
        and shards[1].read_bytes() != before[shards[1].name]
        for n in range(50)
    )
    with pytest.raises(OutputError, match=r"interrupted; run without dry_run=True to restore it"):
        recover(shards[2], dry_run=True)
    assert recover(shards[2]) == [shards[1]]
    assert recover(shards[2]) == []
    assert {name: data for name, data in content(tmp_path).items() if name in before} == before


@pytest.mark.parametrize("name", ["m-00002-of-9999999.gguf", "m-00000-of-00000.gguf", "-00001-of-00001.gguf"])
def test_odd_names_are_only_names(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / name)
    assert recover(tmp_path / name) == []
    assert hows(edit_model(tmp_path / name, setting("a.u8=7"))) == ["in place"]
