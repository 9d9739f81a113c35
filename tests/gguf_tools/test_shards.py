"""Split sets: planned and named as gguf-py does, opened as one, refused when they don't fit together."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_tools import GGUFSet, GGUFWriter, TensorInfo, Value, open_gguf
from gguf_tools.commands.main import main
from gguf_tools.errors import FormatError, TruncatedError
from gguf_tools.format import ggml_types as types
from gguf_tools.format import keys
from gguf_tools.format.shards import group_tensors, layouts_of, shard_paths
from tests.gguf_tools.sample_files import finite_bytes, write_file

METADATA = {"general.architecture": Value.string("deepseek2"), "general.name": Value.string("x")}
TENSORS = [TensorInfo(f"t{i}", (4, 64), types.F16) for i in range(5)]


def write_set(path: Path, metadata: dict[str, Value] = METADATA, **limits: int) -> list[Path]:
    layouts = layouts_of(metadata, group_tensors(TENSORS, **limits))
    paths = shard_paths(path, len(layouts))
    for shard, layout in zip(paths, layouts, strict=True):
        with GGUFWriter(shard, layout) as writer:
            for info in layout.tensors:
                writer.write(layout.offset_of(info.name), finite_bytes(info))
            writer.publish()
    return paths


@pytest.mark.parametrize(
    "limits", [{"max_tensors": 2}, {"max_bytes": 1100}, {"max_bytes": 1}, {"max_tensors": 9}]
)
def test_shards_have_the_names_and_bytes_that_gguf_py_writes(tmp_path: Path, limits: dict[str, int]) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    theirs = gguf.GGUFWriter(
        folder / "m.gguf",
        "deepseek2",
        split_max_tensors=limits.get("max_tensors", 0),
        split_max_size=limits.get("max_bytes", 0),
    )
    theirs.add_name("x")
    for info in TENSORS:
        theirs.add_tensor(info.name, np.frombuffer(finite_bytes(info), np.float16).reshape(info.shape))
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    ours = write_set(tmp_path / "m.gguf", **limits)
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in ours} == expected


def test_tensors_are_dealt_in_order() -> None:
    def sizes(**limits: int) -> list[int]:
        return [len(group) for group in group_tensors(TENSORS, **limits)]

    assert sizes() == [5]
    assert sizes(max_tensors=2) == [2, 2, 1]
    assert sizes(max_bytes=1024) == [2, 2, 1]
    assert sizes(max_bytes=1023) == [1] * 5
    assert sizes(max_bytes=1024, max_tensors=1) == [1] * 5


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_set_opens_as_one_by_any_of_its_files(tmp_path: Path, opened: int) -> None:
    paths = write_set(tmp_path / "m.gguf", max_tensors=2)
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with open_gguf(paths[opened]) as source:
        assert source.paths == paths
        assert source.metadata == METADATA
        assert list(source.tensors.values()) == TENSORS
        assert [source.shard_of(info.name) for info in TENSORS] == [0, 0, 1, 1, 2]
        assert source.size_bytes == sum(path.stat().st_size for path in paths)
        for info in TENSORS:
            assert source.raw(info.name).tobytes() == finite_bytes(info)
            assert source.raw_rows(info.name, 1, 3).tobytes() == finite_bytes(info)[128:384]
            assert source.file_of(info.name).raw(info.name).tobytes() == finite_bytes(info)


def test_single_file_is_a_set_of_one(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as source:
        assert source.paths == [tmp_path / "m.gguf"]
        assert source.get("general.architecture") == "deepseek2"


def test_file_that_says_it_is_the_only_part_needs_no_name(tmp_path: Path) -> None:
    metadata = METADATA | {keys.SPLIT_NO: Value.u16(0), keys.SPLIT_COUNT: Value.u16(1)}
    write_file(tmp_path / "m.gguf", metadata, ())
    with open_gguf(tmp_path / "m.gguf") as source:
        assert source.metadata == metadata


def test_alignment_goes_into_every_shard(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "m.gguf", METADATA | {keys.ALIGNMENT: Value.u32(64)}, max_tensors=2)
    with open_gguf(paths[0]) as source:
        assert [shard.alignment for shard in source.shards] == [64, 64, 64]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "m.gguf", max_tensors=1)
    for path in paths[1:]:
        path.unlink()
    with pytest.raises(TruncatedError, match=r"4 of 5 parts are missing: m-00002-of-.* and 1 more"):
        open_gguf(paths[0])


@pytest.mark.parametrize("part", [0, 2])
def test_a_part_can_be_looked_at_alone(tmp_path: Path, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_set(tmp_path / "m.gguf", max_tensors=2)
    with open_gguf(paths[0], may_lack_parts=True) as whole:
        assert whole.missing == ""
        expected = list(whole.shards[part].tensors)
    for path in paths:
        if path != paths[part]:
            path.unlink()
    with open_gguf(paths[part], may_lack_parts=True) as alone:
        assert list(alone.tensors) == expected
        assert alone.get(keys.SPLIT_NO) == part
        assert "2 of 3 parts are missing" in alone.missing
    assert main(["show", str(paths[part])]) == 0
    said = capsys.readouterr().out
    assert "split.count" in said
    assert "note: this is one part: 2 of 3 parts are missing: m-0000" in said
    assert main(["scan", str(paths[part])]) == 0
    assert "parts are missing" in capsys.readouterr().out
    assert main(["verify", str(paths[part])]) == 1
    assert "2 of 3 parts are missing" in capsys.readouterr().out


def test_renamed_part_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "m.gguf", max_tensors=2)
    for name in ("m.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf"):
        renamed = paths[0].rename(tmp_path / name)
        with pytest.raises(FormatError, match=r"part 1 of 3.* name that ends in -00001-of-00003\.gguf"):
            open_gguf(renamed)
        renamed.rename(paths[0])
        paths = write_set(tmp_path / "m.gguf", max_tensors=2)


def test_foreign_part_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "m.gguf", max_tensors=2)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(FormatError, match=r"00003-of-00003\.gguf: is part 2 of 3 .* expected part 3 of 3"):
        open_gguf(paths[0])


def test_tensor_in_two_parts_is_named(tmp_path: Path) -> None:
    paths = shard_paths(tmp_path / "m.gguf", 2)
    for index, path in enumerate(paths):
        split = {keys.SPLIT_NO: Value.u16(index), keys.SPLIT_COUNT: Value.u16(2)}
        write_file(path, split, (TENSORS[0],))
    with pytest.raises(FormatError, match=r"tensor 't0' is in m-00001-of-00002\.gguf too"):
        GGUFSet(paths[0])


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    paths = shard_paths(tmp_path / "m.gguf", 2)
    for index, path in enumerate(paths):
        split = {
            keys.SPLIT_NO: Value.u16(index),
            keys.SPLIT_COUNT: Value.u16(2),
            keys.SPLIT_TENSORS_COUNT: Value.i32(3),
        }
        write_file(path, split, (TENSORS[index],))
    with pytest.raises(FormatError, match="hold 2 tensors, the metadata say 3"):
        GGUFSet(paths[0])


def test_split_count_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf", {keys.SPLIT_COUNT: Value.string("2")}, ())
    with pytest.raises(FormatError, match=r"'split\.count' is '2', expected a number"):
        GGUFSet(tmp_path / "m.gguf")
