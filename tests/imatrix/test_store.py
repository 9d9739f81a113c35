from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import imatrix
from gguf_tools.errors import BadImportance, GGUFError, OutputError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F16, F32
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from imatrix.store import ImportanceFile, load, save, save_dat, save_gguf
from quantize.importances.entries import Importance, resolve
from tests.quantize.plan.recorded_plans import FACTS, tensors_of

GOLDEN = Path(__file__).parents[1] / "golden" / "imatrix"
GGUF, DAT = GOLDEN / "tiny-deepseek-v3.imatrix.gguf", GOLDEN / "tiny-deepseek-v3.imatrix.dat"


def equal(one: ImportanceFile, other: ImportanceFile) -> bool:
    return (
        replace(one, entries={}, path=None) == replace(other, entries={}, path=None)
        and list(one.entries) == list(other.entries)
        and all(
            np.array_equal(a.values, b.values) and np.array_equal(a.counts, b.counts)
            for a, b in zip(one.entries.values(), other.entries.values(), strict=True)
        )
    )


def small() -> ImportanceFile:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
    return ImportanceFile(
        entries={
            "blk.0.attn_q.weight": Importance(values[:1], np.array([1024], np.float32)),
            "blk.0.ffn_up_exps.weight": Importance(values, np.array([700, 0, 324], np.float32)),
        },
        datasets=("a.txt", "b.txt"),
        chunk_count=2,
        chunk_size=512,
    )


def test_the_gguf_form() -> None:
    found = load(GGUF)
    assert len(found.entries) == 35
    assert (found.datasets, found.chunk_count, found.chunk_size) == (("calibration.txt",), 64, 512)
    assert found.entries["blk.0.attn_k_b.weight"].values.shape == (1, 512)
    experts = found.entries["blk.1.ffn_up_exps.weight"]
    assert experts.values.shape == (16, 256)
    assert experts.counts.sum() == 64 * 512 * 4  # 4 of 16 experts per token


def test_the_dat_form() -> None:
    found = load(DAT)
    assert len(found.entries) == 35
    assert (found.datasets, found.chunk_count, found.chunk_size) == (("calibration.txt",), 64, 0)
    assert found.entries["blk.1.ffn_up_exps.weight"].values.shape == (1, 16 * 256)
    assert found.entries["blk.0.attn_q_a.weight"].counts.tolist() == [64]


def test_both_forms_weigh_every_tensor_alike() -> None:
    gguf, dat = load(GGUF).entries, load(DAT).entries
    n_found = 0
    for tensor in tensors_of("tiny-deepseek-v3"):
        one, other = (resolve(tensor, entries, FACTS["tiny-deepseek-v3"].n_heads) for entries in (gguf, dat))
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        n_found += 1
        assert one.rows_per_weights == other.rows_per_weights
        np.testing.assert_allclose(one.weights(), other.weights(), rtol=1e-6)
    assert n_found == 35


def test_written_gguf_is_what_llama_imatrix_wrote(tmp_path: Path) -> None:
    save(tmp_path / "out.gguf", load(GGUF))
    assert (tmp_path / "out.gguf").read_bytes() == GGUF.read_bytes()


def test_written_dat_is_what_llama_imatrix_wrote(tmp_path: Path) -> None:
    save(tmp_path / "out.dat", load(DAT))
    assert (tmp_path / "out.dat").read_bytes() == DAT.read_bytes()


def test_gguf_converted_to_dat_is_what_llama_imatrix_wrote(tmp_path: Path) -> None:
    """The two files come from two runs of llama-imatrix that did the same sums."""
    save(tmp_path / "out.dat", load(GGUF))
    assert (tmp_path / "out.dat").read_bytes() == DAT.read_bytes()


@pytest.mark.parametrize("name", ["a.gguf", "a.dat"])
def test_what_was_saved_loads_the_same(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, small())
    first = load(tmp_path / name)
    save(tmp_path / f"again-{name}", first)
    assert equal(first, load(tmp_path / f"again-{name}"))
    if name == "a.gguf":
        assert equal(first, small())


def test_format_is_by_name_or_by_choice(tmp_path: Path) -> None:
    save(tmp_path / "a.dat", small(), "gguf")
    assert load(tmp_path / "a.dat").format == "gguf"
    save(tmp_path / "a.imatrix", small(), "dat")
    assert load(tmp_path / "a.imatrix").format == "dat"


def test_dat_of_partly_seen_experts(tmp_path: Path) -> None:
    save_dat(tmp_path / "a.dat", small())
    found = load(tmp_path / "a.dat").entries["blk.0.ffn_up_exps.weight"]
    assert found.counts.tolist() == [2]  # 700 rows are begun chunks of 512
    expected = small().entries["blk.0.ffn_up_exps.weight"].weights()
    assert (found.weights().reshape(3, 4) == expected).all()


def test_dat_leaves_out_what_saw_nothing(tmp_path: Path) -> None:
    nothing = Importance(np.zeros((2, 4), np.float32), np.zeros(2, np.float32))
    contents = small()
    save_dat(tmp_path / "a.dat", replace(contents, entries={**contents.entries, "unseen": nothing}))
    assert list(load(tmp_path / "a.dat").entries) == list(contents.entries)


def dat(*entries: tuple[str, int, list[float]], trailer: bytes = b"") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, n_calls, values in entries:
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", n_calls, len(values))
        data += struct.pack(f"<{len(values)}f", *values)
    return data + trailer


def test_dat_without_trailer_or_calls(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(dat(("a", 4, [8.0, 2.0]), ("b", 0, [8.0, 2.0])))
    found = load(tmp_path / "a.dat")
    assert (found.datasets, found.chunk_count) == ((), 0)
    assert found.entries["a"].weights().tolist() == [[2.0, 0.5]]
    assert found.entries["b"].weights().tolist() == [[8.0, 2.0]]
    (tmp_path / "a.dat").write_bytes(dat(("a", 4, [8.0, 2.0]), trailer=struct.pack("<i", 9)))
    assert load(tmp_path / "a.dat").chunk_count == 9


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "the number of entries would take 4 bytes at 0, and 0 are left"),
        (b"hello, this is no matrix", "not an importance matrix: not GGUF, and no .dat"),
        (struct.pack("<i", 0) + bytes(64), "not an importance matrix"),
        (struct.pack("<ii", 1, 2**31 - 1) + bytes(64), "entry 1 of 1 would take 2147483647 bytes"),
        (struct.pack("<ii", 1, -1) + bytes(64), "entry 1 of 1 would take -1 bytes"),
        (dat(("a", 1, [1.0] * 9))[:-1], "the values of a would take 36 bytes at 17, and 35 are left"),
        (dat(("a", 1, []), trailer=bytes(16)), "found 0 as the number of the values of a"),
        (dat(("a", 1, [1.0]), ("a", 1, [1.0])), "a: found twice"),
        (dat(("a", 1, [1.0]), trailer=bytes(3)), "the number of chunks would take 4 bytes"),
    ],
)
def test_damaged_dat(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with pytest.raises(BadImportance, match=complaint) as error:
        load(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_no_cut_or_flipped_byte_of_a_dat_file_is_a_surprise(tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    whole = dat(("a", 4, [8.0, 2.0]), ("b", 1, [8.0]), trailer=struct.pack("<ii", 9, 1) + b"x")
    for end in range(len(whole)):
        for data in (whole[:end], whole[:end] + b"\xff" + whole[end + 1 :]):
            path.write_bytes(data)
            with contextlib.suppress(BadImportance):
                assert set(load(path).entries) <= {"a", "b", "\udcff"}


def write_gguf(
    path: Path, tensors: dict[str, npt.NDArray[np.generic]], metadata: dict[str, Value] | None = None
) -> None:
    types = {"f": F32, "e": F16}
    infos = [TensorInfo(name, data.shape, types[data.dtype.char]) for name, data in tensors.items()]
    layout = FileLayout.of({"general.type": Value.string("imatrix"), **(metadata or {})}, infos)
    with GGUFWriter(path, layout) as writer:
        for name, data in tensors.items():
            writer.write(layout.offset_of(name), data.tobytes())
        writer.publish()


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"token_embd.weight": np.ones((2, 4), np.float32)}, "GGUF without a tensor NAME.in_sum2"),
        ({"a.in_sum2": np.ones(4, np.float32)}, "a: found one of .in_sum2 and .counts, expected both"),
        (
            {"a.in_sum2": np.ones(4, np.float16), "a.counts": np.ones(1, np.float32)},
            "a.in_sum2: found F16, expected F32",
        ),
        (
            {"a.in_sum2": np.ones(4, np.float32), "a.counts": np.ones(3, np.float32)},
            "a: found 4 values and 3 counts",
        ),
    ],
)
def test_gguf_that_is_no_importance_matrix(
    tmp_path: Path, tensors: dict[str, npt.NDArray[np.generic]], complaint: str
) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, tensors)
    with pytest.raises(BadImportance, match=complaint) as error:
        load(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("imatrix.datasets", Value.u32(5)),
        ("imatrix.datasets", Value.i32s([5])),
        ("imatrix.chunk_count", Value.string("5")),
        ("imatrix.chunk_size", Value.i32(-5)),
    ],
)
def test_metadata_of_the_wrong_kind(tmp_path: Path, key: str, value: Value) -> None:
    one = np.ones(1, np.float32)
    write_gguf(tmp_path / "a.gguf", {"a.in_sum2": one, "a.counts": one}, {key: value})
    with pytest.raises(BadImportance, match=f"{key}: found .*5.*, expected"):
        load(tmp_path / "a.gguf")


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    contents = replace(small(), entries={"\udcff": small().entries["blk.0.attn_q.weight"]})
    for name in ("a.dat", "a.gguf"):
        save(tmp_path / name, contents)
        assert list(load(tmp_path / name).entries) == ["\udcff"]


def test_truncated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(GGUF.read_bytes()[:-100])
    with pytest.raises(GGUFError):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadImportance, match="can't be read"):
        load(tmp_path / "a.dat")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.dat"
    save(path, small())
    before = hashlib.sha256(path.read_bytes()).digest()
    with pytest.raises(OutputError):
        save(tmp_path / "missing" / "a.dat", small())
    monkeypatch.setattr(os, "fsync", lambda fd: os.stat(tmp_path / "failed"))
    with pytest.raises(OutputError):
        save(path, small())
    assert list(tmp_path.iterdir()) == [path]
    assert hashlib.sha256(path.read_bytes()).digest() == before


def test_a_loaded_file_can_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    save_gguf(path, small())
    found = load(path)
    save_gguf(path, replace(found, chunk_count=3))
    assert load(path).chunk_count == 3
    assert equal(found, small())


def test_big_endian_gguf(tmp_path: Path) -> None:
    infos = [TensorInfo("a.in_sum2", (2,), F32), TensorInfo("a.counts", (1,), F32)]
    layout = FileLayout.of({"general.type": Value.string("imatrix")}, infos, endian="big")
    with GGUFWriter(tmp_path / "a.gguf", layout) as writer:
        writer.write(layout.offset_of("a.in_sum2"), np.array([6, 9], ">f4").tobytes())
        writer.write(layout.offset_of("a.counts"), np.array([3], ">f4").tobytes())
        writer.publish()
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert file.endian == "big"
    assert load(tmp_path / "a.gguf").entries["a"].weights().tolist() == [[2.0, 3.0]]


def test_public_names() -> None:
    assert imatrix.load is load
    with pytest.raises(AttributeError, match="nothing"):
        imatrix.nothing  # noqa: B018
