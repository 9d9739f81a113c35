"""Folders and safetensors files: whole ones are read by row ranges, broken ones are named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint.checkpoint import INDEX_NAME, Checkpoint, read_config, read_json_object
from convert.checkpoint.safetensors_file import DTYPE_BITS, NUMPY_DTYPES, SafetensorsFile
from convert.tokenizer.tokenizer import MAX_MEMORY
from gguf_tools.errors import BadConfig, CheckpointError, MissingTensor, UnsupportedCheckpoint
from tests.support.checkpoints import (
    edit_tensors,
    micro_checkpoint,
    read_tensors,
    shard,
    write_checkpoint,
    write_safetensors,
)

TENSORS = {
    "b.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "a.weight": np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16),
    "scalar": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float16),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", {"architectures": ["X"]}, TENSORS)


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file from a header that may be anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ---- reading


def test_a_folder_gives_config_names_and_rows(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.config == {"architectures": ["X"]}
        assert checkpoint.names() == ("a.weight", "b.weight", "empty", "scalar")
        assert "a.weight" in checkpoint
        assert "c.weight" not in checkpoint
        raw = checkpoint.raw("b.weight")
        assert (raw.name, raw.dtype, raw.shape, raw.path) == (
            "b.weight",
            "F32",
            (2, 3, 4),
            folder / "model.safetensors",
        )
        assert (raw.n_rows, raw.n_cols, raw.n_bytes) == (6, 4, 96)
        assert np.array_equal(raw.read_rows(2, 5), TENSORS["b.weight"].reshape(6, 4)[2:5])
        assert raw.read_rows(3, 3).shape == (0, 4)
        assert checkpoint.raw("a.weight").read_rows(1, 2).dtype == ml_dtypes.bfloat16
        assert checkpoint.raw("scalar").read() == 3
        assert checkpoint.raw("empty").read().shape == (0, 4)
        with pytest.raises(MissingTensor, match=r"no tensor c\.weight"):
            checkpoint.raw("c.weight")
        with pytest.raises(IndexError, match=r"rows 5\.\.7 of 6"):
            raw.read_rows(5, 7)


def test_the_offset_is_that_of_the_bytes_in_the_file(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        raw = checkpoint.raw("b.weight")
        data = raw.path.read_bytes()[raw.offset : raw.offset + raw.n_bytes]
    assert data == TENSORS["b.weight"].tobytes()


def test_every_dtype_of_the_format_is_known() -> None:
    assert set(NUMPY_DTYPES) == {name for name, bits in DTYPE_BITS.items() if bits >= 8}
    for name, dtype in NUMPY_DTYPES.items():
        assert dtype.itemsize * 8 == DTYPE_BITS[name]


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = {"x": np.arange(6, dtype=np.int32).reshape(2, 3), "y": np.ones((3, 5), np.float16)}
    numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "model.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert {name: raw.read().tolist() for name, raw in file.tensors.items()} == {
            name: array.tolist() for name, array in tensors.items()
        }


def test_elements_below_a_byte_have_a_size_but_are_not_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.safetensors", {"x": entry("F4", (2, 4), (0, 4))}, bytes(4))
    with SafetensorsFile(path) as file:
        assert file.tensors["x"].n_bytes == 4
        with pytest.raises(UnsupportedCheckpoint, match="x: elements of type F4"):
            file.tensors["x"].read()


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    whole = read_tensors(micro_checkpoint(tmp_path, "v2"))
    with Checkpoint(shard(tmp_path, 4)) as checkpoint:
        assert len(checkpoint.files) == 4
        assert set(checkpoint.names()) == set(whole)
        # By shard, then by name: the order in which llama.cpp's converter reads.
        order = [(checkpoint.raw(name).path.name, name) for name in checkpoint.names()]
        assert order == sorted(order)
        for name, expected in whole.items():
            assert np.array_equal(checkpoint.raw(name).read(), expected)


def test_numbered_shards_need_no_index(tmp_path: Path) -> None:
    whole = read_tensors(micro_checkpoint(tmp_path, "v2"))
    (shard(tmp_path) / INDEX_NAME).unlink()
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(whole)


def test_threads_read_side_by_side(folder: Path) -> None:
    expected = TENSORS["b.weight"].reshape(6, 4)
    with Checkpoint(folder) as checkpoint, ThreadPoolExecutor(8) as pool:
        raw = checkpoint.raw("b.weight")
        ranges = [(i % 6, i % 6 + 1) for i in range(400)]
        for (start, stop), rows in zip(ranges, pool.map(lambda r: raw.read_rows(*r), ranges), strict=True):
            assert np.array_equal(rows, expected[start:stop])


def test_closing_frees_the_files(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint(folder):
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_json_files_are_read_when_there(folder: Path) -> None:
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.read_json("quantize_config.json") == {"bits": 4}
        assert checkpoint.read_json("quant_config.json") is None


# ---- broken folders


def _drop_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _drop_shard_and_index(folder: Path) -> None:
    _drop_shard(folder)
    (folder / INDEX_NAME).unlink()


def _edit_index(edit: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX_NAME).read_text())
        edit(index["weight_map"])
        (folder / INDEX_NAME).write_text(json.dumps(index))

    return apply


def _repeat_tensor(folder: Path) -> None:
    for number in (1, 2):
        write_safetensors(
            folder / f"model-0000{number}-of-00003.safetensors", {"twice": np.ones(2, np.float32)}
        )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_drop_shard,
         r"model-00002-of-00003\.safetensors: missing shard; .*index\.json places \d+ tensors in it"
         r" \(1 of 3 shards are missing\)"),
        (_drop_shard_and_index, r"model-00002-of-00003\.safetensors: missing shard; .* is one of 3"),
        (_edit_index(lambda places: places.update(extra="model-00001-of-00003.safetensors")),
         r"model-00001-of-00003\.safetensors: extra: not in this shard"),
        (_edit_index(lambda places: places.pop("lm_head.weight")),
         r"model-00001-of-00003\.safetensors: lm_head\.weight: not in model\.safetensors\.index\.json"),
        (_edit_index(lambda places: places.update({"lm_head.weight": "model-00003-of-00003.safetensors"})),
         r"lm_head\.weight: found in model-00001-of-00003\.safetensors, expected in model-00003"),
        (_edit_index(lambda places: places.update(x="../model.safetensors")),
         r"index\.json: x: found file '\.\./model\.safetensors', expected the name"),
        (_edit_index(lambda places: places.update(x=3)), r"index\.json: x: found file 3"),
        (_edit_index(lambda places: places.clear()), r"index\.json: no weight_map"),
        (_repeat_tensor,
         r"model-00002-of-00003\.safetensors: twice: is also in model-00001-of-00003\.safetensors"),
        (lambda folder: write_safetensors(folder / "model.safetensors", TENSORS), "remove one of them"),
        (lambda folder: (folder / INDEX_NAME).write_text("{"), r"index\.json: not JSON"),
    ],
)  # fmt: skip
def test_a_broken_set_of_shards_is_named(damage: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    folder = shard(micro_checkpoint(tmp_path, "v2", num_hidden_layers=2))
    damage(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json"),
        ({"config.json": b"{}"}, r"no weights; expected model\.safetensors"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "pytorch_model.bin: a pickle checkpoint"),
        ({"config.json": b"{}", "model.pt": b""}, r"model\.pt: a pickle checkpoint"),
        ({"config.json": b"[]"}, r"config\.json: "),
        ({"config.json": b"{"}, r"config\.json: not JSON"),
        ({"config.json": b"\xff\xfe"}, r"config\.json: not JSON"),
    ],
)  # fmt: skip
def test_a_folder_without_a_checkpoint_says_what_is_missing(
    files: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(BadConfig, match=r"no config\.json"):
        read_config(tmp_path)


# ---- broken files


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"x": entry("F33")}, 8, "x: unknown dtype 'F33', expected one of BOOL"),
        ({"x": entry(["F32"])}, 8, "x: unknown dtype"),  # type: ignore[arg-type]
        ({"x": entry(offsets=(0, 9))}, 9, r"x: 9 bytes of data, expected 8 for F32 of shape \(2,\)"),
        ({"x": entry("F4", (3,), (0, 2))}, 2, r"x: 2 bytes of data, expected 1\.5 for F4"),
        ({"x": entry(shape=(-2,))}, 8, r"x: shape \[-2\] is not a list of sizes"),
        ({"x": entry(shape=(2.0,))}, 8, "x: shape .* is not a list of sizes"),
        ({"x": entry(shape=(1,) * 17)}, 4, "x: shape .* is not a list of sizes"),
        ({"x": entry(shape=(2**62, 2**62))}, 8, "x: 8 bytes of data, expected"),
        ({"x": entry(offsets=(0,))}, 8, r"x: data_offsets \[0\] are not two offsets"),
        ({"x": {"dtype": "F32"}}, 8, "x: the header entry needs dtype, shape and data_offsets"),
        ({"x": 3}, 8, "x: the header entry needs"),
        ({"x": entry(), "y": entry(offsets=(12, 20))}, 20, "y: .* at 12, expected 8: a hole after x"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, 12, "y: .* at 4, expected 8: an overlap after x"),
        ({"x": entry(offsets=(4, 12))}, 12, "x: data begins at 4, expected 0: a hole after the header"),
        ({"x": entry(), "y": entry(offsets=(8, 16))}, 12,
         "y: cut off: the file has 12 bytes of data, expected 16; it is truncated"),
        ({"x": entry()}, 12, "12 bytes of data, expected 8: a tail after x"),
        ({"__metadata__": {"a": 1}, "x": entry()}, 8, "__metadata__ in the header"),
        ([1], 0, "the header is not a JSON object"),
        (b"{", 0, "the header is not JSON"),
        (b"\xff\xff", 0, "the header is not JSON"),
        (b"[" * 100_000, 0, "the header is not JSON"),
        (b'{"x": ' + b"1" * 5000 + b"}", 0, "the header is not JSON"),
        (b'{"x": 1, "x": 2}', 0, "x appears twice in the header"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_in_one_line(header: Any, data: int, words: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=words) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 600


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.safetensors", {"x": entry()}, bytes(8), length=2**60)
    with pytest.raises(
        CheckpointError, match=rf"header is said to take {2**60} bytes, but the file has \d+ bytes"
    ):
        SafetensorsFile(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="3 bytes, too short"):
        SafetensorsFile(path)


def test_a_header_beyond_the_librarys_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="expected at most 100000000"):
        SafetensorsFile(path)


def test_a_file_cut_at_any_byte_is_an_error(tmp_path: Path) -> None:
    whole = write_safetensors(tmp_path / "a.safetensors", {"x": np.ones((3, 5), np.float16)}).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "a.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        raw = checkpoint.raw("b.weight")
        os.truncate(raw.path, raw.offset + 50)
        assert raw.read_rows(0, 3).shape == (3, 4)
        with pytest.raises(CheckpointError, match=r"b\.weight: the file ends at byte \d+.*truncated"):
            raw.read_rows(0, 4)


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        SafetensorsFile(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "nothing.safetensors")


def test_a_failed_open_leaves_no_file_open(tmp_path: Path) -> None:
    folder = shard(micro_checkpoint(tmp_path, "v2", num_hidden_layers=2))
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="too short"):
        Checkpoint(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_editing_a_sharded_folder_makes_it_one_file(tmp_path: Path) -> None:
    folder = shard(micro_checkpoint(tmp_path, "v2", num_hidden_layers=2))
    edit_tensors(folder, lambda tensors: None)
    with Checkpoint(folder) as checkpoint:
        assert [file.path.name for file in checkpoint.files] == ["model.safetensors"]


N_MERGES = 446_189
"""Pairs of merges in gpt-oss's tokenizer.json, which has 27,868,174 bytes."""


def test_a_tokenizer_may_be_as_large_as_gpt_oss_s(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    pair = b'["\\u0120' + b"a" * 25 + b'", "' + b"b" * 21 + b'"], '
    path.write_bytes(b'{"merges": [' + N_MERGES * pair + b"[]]}")
    assert 27_000_000 < path.stat().st_size < 28_000_000
    with pytest.raises(BadConfig, match="would take more than 160 MiB of memory"):
        read_json_object(path)
    assert len(read_json_object(path, most_memory=MAX_MEMORY)["merges"]) == N_MERGES + 1
