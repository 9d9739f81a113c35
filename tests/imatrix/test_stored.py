"""Importances of a file: read when they are asked for, kept by nobody; and a file is whole or not there."""

from __future__ import annotations

import itertools
import os
import struct
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.errors import BadImportance, OutputError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from imatrix.check import as_text, check
from imatrix.merge import merge
from imatrix.repair import repair
from imatrix.stats import description_lines, stats_lines
from imatrix.store import load, save
from quantize.importances.entries import Importance, ImportanceFile, refuse_nonfinite, resolve
from quantize.importances.files import OpenFile, StoredImportance
from quantize.linting import lint
from quantize.pipeline import quantize
from tests.support.killing import in_child, killed_at, without_syncs  # noqa: F401

EXPERTS = TensorInfo("blk.0.ffn_up_exps.weight", (4, 3, 32), F32)
HEADS = TensorInfo("blk.0.attn_k_b.weight", (4, 5, 32), F32)
QUERY = TensorInfo("blk.0.attn_q_a.weight", (7, 32), F32)


def contents(seed: int = 0, n_cols: int = 32, n_experts: int = 4) -> ImportanceFile:
    rng = np.random.default_rng(seed)
    values = rng.random((n_experts, n_cols), np.float32)
    return ImportanceFile(
        {
            HEADS.name: Importance(rng.random((1, 4 * n_cols), np.float32), np.full(1, 9, np.float32)),
            QUERY.name: Importance(rng.random((1, n_cols), np.float32), np.full(1, 9, np.float32)),
            EXPERTS.name: Importance(values, np.arange(n_experts, dtype=np.float32)),
        },
        ("text",),
        chunk_count=1,
        chunk_size=8,
    )


def write(path: Path, form: str) -> Path:
    """Write `contents` as GGUF of either byte order or as .dat."""
    if form != "big":
        save(path, contents(), "dat" if form == "dat" else "gguf")
        return path
    parts = {}
    for name, entry in contents().entries.items():
        parts[f"{name}.in_sum2"], parts[f"{name}.counts"] = entry.values, entry.counts
    infos = [TensorInfo(name, numbers.shape, F32) for name, numbers in parts.items()]
    layout = FileLayout.of({"general.type": Value.string("imatrix")}, infos, endian="big")
    with GGUFWriter(path, layout) as writer:
        for name, numbers in parts.items():
            writer.write(layout.offset_of(name), numbers.astype(">f4").tobytes())
        writer.publish()
    return path


@pytest.mark.parametrize("form", ["little", "big", "dat"])
def test_unread_importances_are_those_that_were_read(tmp_path: Path, form: str) -> None:
    found = load(write(tmp_path / "m", form)).entries
    in_memory = {name: Importance(entry.values, entry.counts) for name, entry in found.items()}
    assert all(isinstance(entry, StoredImportance) for entry in found.values())
    if form != "dat":
        for name, entry in contents().entries.items():
            np.testing.assert_array_equal(in_memory[name].values, entry.values)
    for tensor in (EXPERTS, HEADS, QUERY):
        unread, read = resolve(tensor, found, 4), resolve(tensor, in_memory, 4)
        assert unread is not None
        assert read is not None
        assert (unread.rows_per_weights, unread.n_neutral) == (read.rows_per_weights, read.n_neutral)
        assert unread.matrix.shape == read.matrix.shape
        np.testing.assert_array_equal(unread.weights(), read.weights())
        for row in range(tensor.n_rows):
            ours, theirs = unread.weighting_of_row(row), read.weighting_of_row(row)
            np.testing.assert_array_equal(ours.values, theirs.values)


def test_values_are_a_name_for_users_that_nothing_here_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attribute that hides a file: a user may have it, and what we do with importances goes without."""
    path = write(tmp_path / "m", "gguf")
    entries = load(path).entries
    for name, entry in contents().entries.items():
        np.testing.assert_array_equal(entries[name].values, entry.read())  # type: ignore[attr-defined]

    def refuse(entry: StoredImportance) -> None:
        raise AssertionError("a file was read through an attribute")

    monkeypatch.setattr(StoredImportance, "values", property(refuse))
    found = load(path)
    save(tmp_path / "again.dat", merge([found, load(path)]).importances)
    save(tmp_path / "again", repair(found, n_heads=4).importances)
    assert list(stats_lines(found))
    assert list(description_lines(found))
    assert [as_text(finding) for finding in check(found)] == [
        f"warning: {EXPERTS.name}: 1 of 4 matrices never seen"
    ]
    infos = [EXPERTS, HEADS, QUERY]
    metadata = {
        "general.architecture": Value.string("deepseek2"),
        "deepseek2.block_count": Value.u32(1),
        "deepseek2.attention.head_count": Value.u32(4),
    }
    layout = FileLayout.of(metadata, infos)
    with GGUFWriter(tmp_path / "model.gguf", layout) as writer:
        for info in infos:
            writer.write(layout.offset_of(info.name), np.ones(info.shape, "<f4").tobytes())
        writer.publish()
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    quantize(tmp_path / "model.gguf", first, "Q4_0", importances=found, verify=True)
    quantize(tmp_path / "model.gguf", second, "Q4_0", importances=found, reuse=[first])
    assert second.read_bytes() == first.read_bytes()
    quantize(tmp_path / "model.gguf", second, "Q4_0", importances=str(path))
    assert second.read_bytes() == first.read_bytes()
    report = lint("IQ2_XXS", tmp_path / "model.gguf", importances=path)
    assert not report.stops, report.findings


def test_every_use_of_weights_reads_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load(write(tmp_path / "m", "gguf")).entries[EXPERTS.name]
    n_bytes: list[int] = []
    read = OpenFile.read

    def counted(self: OpenFile, offset: int, n: int, what: str) -> np.ndarray:
        n_bytes.append(n)
        return read(self, offset, n, what)

    monkeypatch.setattr(OpenFile, "read", counted)
    entry.weights()
    assert n_bytes == [4 * 4 * 32]
    entry.row(2).weights()
    assert n_bytes[1:] == [4 * 32]


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_no_more_than_one_entry_is_in_memory(tmp_path: Path, form: str) -> None:
    n_entries, n_experts, n_cols = 12, 64, 2048
    entry = contents(n_cols=n_cols, n_experts=n_experts).entries[EXPERTS.name]
    infos = [TensorInfo(f"blk.{i}.ffn_up_exps.weight", (n_experts, 2, n_cols), F32) for i in range(n_entries)]
    save(tmp_path / "a", ImportanceFile(dict.fromkeys((info.name for info in infos), entry)), form)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        found = load(tmp_path / "a")
        refuse_nonfinite(found.entries)
        resolved = [resolve(info, found.entries) for info in infos]
        for one in resolved:
            assert one is not None
            assert one.weighting_of_row(5).values.shape == (n_cols,)
        save(tmp_path / "again", found, form)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    entry_bytes = 4 * n_experts * n_cols
    assert (tmp_path / "again").stat().st_size > n_entries * entry_bytes
    assert peak < 6 * entry_bytes  # half of the file; what save_dat computes takes four times an entry


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_a_file_may_be_replaced_or_deleted_meanwhile(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "m", form)
    found, again = load(path).entries, load(path).entries
    before = {name: entry.values for name, entry in found.items()}
    save(path, contents(seed=1), force=True)
    assert not np.array_equal(load(path).entries[QUERY.name].values, before[QUERY.name])
    path.unlink()
    for entries in (found, again):
        for name, entry in entries.items():
            np.testing.assert_array_equal(entry.values, before[name])


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_a_file_that_is_cut_meanwhile_is_named(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "m", form)
    entries = load(path).entries
    os.truncate(path, 100)
    with pytest.raises(BadImportance, match=f"m: the values of {EXPERTS.name}: 512 of 512 bytes are missing"):
        entries[EXPERTS.name].values  # noqa: B018


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_a_file_is_closed_with_its_last_entry(tmp_path: Path, form: str) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    path = write(tmp_path / "m", form)
    before = n_open()
    row = load(path).entries[EXPERTS.name].row(0)
    assert n_open() == before + 1
    assert row.values.shape[0] == 1
    del row
    assert n_open() == before
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(Exception, match="m: "):
        load(path)
    assert n_open() == before


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_saving_does_not_destroy_what_it_reads(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "m.partial", form)
    data = path.read_bytes()
    for found in (load(path), repair(load(path)).importances):
        with pytest.raises(OutputError, match=r"m\.partial: is an input of this run"):
            save(tmp_path / "m", found, form)  # type: ignore[arg-type]
        assert path.read_bytes() == data
    os.rename(path, tmp_path / "m")
    save(tmp_path / "m", load(tmp_path / "m"), form, force=True)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_a_file_is_whole_or_not_there(tmp_path: Path, form: str) -> None:
    """Killed at every call of the system, and at every entry."""
    old, new = contents(seed=1), contents(seed=2)
    path, whole = tmp_path / "m", tmp_path / "whole"
    save(whole, new, form)  # type: ignore[arg-type]
    save(path, old, form)  # type: ignore[arg-type]
    before, after = path.read_bytes(), whole.read_bytes()

    class Deadly(Importance):
        def read(self) -> np.ndarray:
            os._exit(9)

    for name in new.entries:
        entries = {**new.entries, name: Deadly(np.ones((1, 32), np.float32), np.ones(1, np.float32))}
        damaged = replace(new, entries=entries)
        code = in_child(lambda damaged=damaged: save(path, damaged, form, force=True))  # type: ignore[misc]
        assert code == 9
        assert path.read_bytes() == before
    for n in itertools.count():
        killed = killed_at(n, partial(save, path, new, form, force=True))
        assert path.read_bytes() in (before, after)
        if not killed:
            break
    assert n >= 3
    assert path.read_bytes() == after
    assert {found.name for found in tmp_path.iterdir()} == {"m", "whole"}


def test_a_row_of_dat_is_little_endian_floats(tmp_path: Path) -> None:
    head = struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 2, 3)
    (tmp_path / "m").write_bytes(head + struct.pack("<3f", 2, 4, 6))
    entry = load(tmp_path / "m").entries["a"]
    assert entry.shape == (1, 3)
    assert entry.values.tolist() == [[2, 4, 6]]
    assert entry.weights().tolist() == [[1, 2, 3]]
