"""Splitting: the shards that llama-gguf-split writes. Merging: the file that was split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_tools import GGUFFile, TensorInfo, Value, open_gguf
from gguf_tools.commands.main import main
from gguf_tools.edit.rewrite import write_files
from gguf_tools.edit.split import merged_file, split_files
from gguf_tools.errors import BadRequest, FormatError, OutputError
from gguf_tools.format import ggml_types as types
from gguf_tools.format import keys
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import group_tensors
from tests.gguf_tools.edit.split_cases import CASES, INPUTS, hashes, make_input
from tests.gguf_tools.sample_files import METADATA, TENSORS, write_file

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "split" / "shards.json").read_text())["cases"]


def split(path: Path, prefix: Path, **limits: int) -> list[Path]:
    with open_gguf(path) as source:
        files = split_files(source, prefix, **limits)
        write_files(files, source.paths)
    return [file.path for file in files]


def merge(path: Path, output: Path) -> Path:
    with open_gguf(path) as source:
        write_files([merged_file(source, output)], source.paths)
    return output


def test_every_case_is_recorded() -> None:
    assert GOLDEN.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_shards_are_those_of_llama_gguf_split(name: str, tmp_path: Path) -> None:
    for folder in ("in", "out", "merged"):
        (tmp_path / folder).mkdir()
    make_input(CASES[name], tmp_path / "in" / "model.gguf")
    assert hashes(tmp_path / "in") == GOLDEN[name]["input"]
    arguments = [tmp_path / "in" / "model.gguf", tmp_path / "out" / "model", *CASES[name].flags]
    assert main(["split", *map(str, arguments)]) == 0
    assert hashes(tmp_path / "out") == GOLDEN[name]["shards"]
    merge(next((tmp_path / "out").iterdir()), tmp_path / "merged" / "model.gguf")
    if CASES[name].source == "stale":
        write_file(tmp_path / "in" / "model.gguf", *INPUTS["sample"])
    assert hashes(tmp_path / "merged") == hashes(tmp_path / "in")


def test_padding_counts_as_llama_gguf_split_counts_it() -> None:
    tensors = INPUTS["sized"][1]
    padded, plain = (group_tensors(tensors, max_bytes=10**6, padded_to=each) for each in (32, 1))
    assert [len(group) for group in padded] != [len(group) for group in plain]


@given(
    sizes=st.lists(st.integers(1, 100), max_size=20),
    max_bytes=st.none() | st.integers(1, 800),
    max_tensors=st.none() | st.integers(1, 8),
)
def test_groups_keep_order_and_limits(
    sizes: list[int], max_bytes: int | None, max_tensors: int | None
) -> None:
    tensors = [TensorInfo(f"t{i}", (size,), types.F32) for i, size in enumerate(sizes)]
    groups = group_tensors(tensors, max_bytes=max_bytes, max_tensors=max_tensors, padded_to=32)
    padded = [[-(-info.n_bytes // 32) * 32 for info in group] for group in groups]
    assert [info for group in groups for info in group] == tensors
    assert all(groups[1:]), "only the first file may be empty"
    for group, next_group in zip(padded, [*padded[1:], None], strict=True):
        assert max_tensors is None or len(group) <= max_tensors
        assert max_bytes is None or len(group) <= 1 or sum(group) <= max_bytes
        if next_group and group:
            full = max_tensors is not None and len(group) == max_tensors
            heavy = max_bytes is not None and sum(group) + next_group[0] > max_bytes
            assert full or heavy, "a file ends only where a limit asks for it"


def test_first_tensor_beyond_the_limit_gets_its_own_file() -> None:
    tensors = [TensorInfo(f"t{i}", (n,), types.F32) for i, n in enumerate((1000, 10, 10))]
    assert [len(group) for group in group_tensors(tensors, max_bytes=500)] == [1, 2]


@pytest.mark.parametrize("alignment", [None, 8, 32, 256])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("version", [2, 3])
def test_merging_gives_the_bytes_that_were_split(
    tmp_path: Path, alignment: int | None, endian: Endian, version: int
) -> None:
    tensors = (*TENSORS, TensorInfo("one_row", (1, 1, 40), types.F16), TensorInfo("number", (), types.F32))
    path = tmp_path / "model.gguf"
    data = write_file(path, METADATA, tensors, alignment=alignment, endian=endian, version=version)
    paths = split(path, tmp_path / "part", max_tensors=3)
    assert [shard.name for shard in paths] == [f"part-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with open_gguf(paths[2]) as source:
        assert {name: source.raw(name).tobytes() for name in source.tensors} == data
        assert [shard.alignment for shard in source.shards] == [alignment or 32] * 3
    assert merge(paths[1], tmp_path / "merged.gguf").read_bytes() == path.read_bytes()


def test_a_set_can_be_split_anew(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf")
    split(tmp_path / "model.gguf", tmp_path / "a", max_tensors=4)
    split(tmp_path / "a-00001-of-00002.gguf", tmp_path / "b", max_tensors=2)
    split(tmp_path / "model.gguf", tmp_path / "c", max_tensors=2)
    for index in (1, 2, 3):
        ours, direct = (tmp_path / f"{name}-0000{index}-of-00003.gguf" for name in "bc")
        assert ours.read_bytes() == direct.read_bytes()


def test_a_set_with_an_alignment_in_its_first_file_alone_is_merged(tmp_path: Path) -> None:
    """The first file is aligned to 128 and says so, the others say nothing and are aligned to 32."""
    tensors = TENSORS[:2]
    for index, info in enumerate(tensors):
        own = METADATA | {keys.ALIGNMENT: Value.u32(128)} if index == 0 else {}
        numbers = {keys.SPLIT_NO: Value.u16(index), keys.SPLIT_COUNT: Value.u16(2)}
        write_file(tmp_path / f"m-0000{index + 1}-of-00002.gguf", own | numbers, (info,))
    whole = write_file(tmp_path / "whole.gguf", METADATA, tensors, alignment=128)
    merged = merge(tmp_path / "m-00001-of-00002.gguf", tmp_path / "merged.gguf")
    assert merged.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    with GGUFFile(merged) as file:
        assert {name: file.raw(name).tobytes() for name in file.tensors} == whole


def test_merging_what_is_whole_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf")
    with pytest.raises(BadRequest, match="not part of a split set; nothing to merge"):
        merge(tmp_path / "model.gguf", tmp_path / "out.gguf")


def test_outputs_that_are_there_are_kept(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf")
    paths = split(tmp_path / "model.gguf", tmp_path / "p", max_tensors=3)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(OutputError, match=r"model\.gguf: exists already"):
        merge(paths[0], tmp_path / "model.gguf")
    with pytest.raises(OutputError, match="is an input of this run"):
        split(paths[0], tmp_path / "p", max_tensors=3)
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 3


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "model.gguf")
    monkeypatch.setattr("gguf_tools.edit.split.MAX_SHARDS", 5)
    with pytest.raises(FormatError, match=r"model\.gguf: would become 6 files, expected at most 5"):
        split(tmp_path / "model.gguf", tmp_path / "p", max_tensors=1)
