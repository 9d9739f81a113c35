"""Numbers for what tensors are made of: what they depend on, and how a file keeps them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import BF16, F16, F32, Q4_0, Q4_K, Q6_K, Q8_0
from gguf_tools.format.shards import FileLayout, layouts_of, open_gguf, shard_paths
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Value
from quantize.fill.chunks import UNKNOWN, RowsDigest
from quantize.fill.encode import RowSources
from quantize.fill.filling import FillJob, Output
from quantize.fill.provenance import (
    PROVENANCE_KEY,
    describe_run,
    digest_importance,
    in_first_form,
    provenance_value,
    read_provenance,
    tensor_provenance,
)
from quantize.importances.entries import Importance, ResolvedImportance
from tests.support import samples

INFO = TensorInfo("blk.0.ffn_up_exps.weight", (2, 4, 64), Q4_0)
CHUNKS = (1, 2**64 - 1, 77)


def digest(*pieces: np.ndarray) -> int:
    state = RowsDigest()
    for piece in pieces:
        state.update(piece)
    return state.value()


def importances(values: np.ndarray, count: float = 1, rows_per_weights: int = 4) -> ResolvedImportance:
    found = Importance(values.astype(np.float32), np.full(len(values), count, np.float32))
    return ResolvedImportance("a", found, rows_per_weights, 0, "")


def test_the_numbers_themselves() -> None:
    """Of any machine, and of the next release: else DIGEST_VERSION, or what it covers, has gone up."""
    rows = np.arange(256, dtype=np.float32).reshape(4, 64)
    assert digest(rows) == 7513583734081495351
    assert digest(rows.astype(ml_dtypes.bfloat16)) == 13875251971115710261
    weights = importances(np.arange(128).reshape(2, 64))
    assert digest_importance(weights, "Q4_0") == 9615488224844830608
    assert tensor_provenance(INFO, BF16, CHUNKS, 5) == 6540560432157893385


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_rows_may_come_in_pieces(sizes: list[int]) -> None:
    rows = samples.rows("normal", (sum(sizes), 32))
    pieces = np.split(rows, np.cumsum(sizes)[:-1])
    assert digest(*pieces) == digest(rows)
    changed = rows.copy()
    changed[-1, -1] += 1
    assert digest(changed) != digest(rows)


@pytest.mark.parametrize(
    "other",
    [
        (TensorInfo(INFO.name, (2, 4, 64), Q8_0), BF16, CHUNKS, 5),
        (TensorInfo(INFO.name, (8, 64), Q4_0), BF16, CHUNKS, 5),
        (INFO, F16, CHUNKS, 5),
        (INFO, BF16, (2**64 - 1, 1, 77), 5),
        (INFO, BF16, CHUNKS[:2], 5),
        (INFO, BF16, CHUNKS, 6),
    ],
)
def test_all_that_decides_the_bytes_counts(other: tuple) -> None:
    assert tensor_provenance(*other) not in (UNKNOWN, tensor_provenance(INFO, BF16, CHUNKS, 5))


def test_the_name_does_not_count() -> None:
    renamed = TensorInfo("other", INFO.shape, INFO.type)
    assert tensor_provenance(renamed, BF16, CHUNKS, 5) == tensor_provenance(INFO, BF16, CHUNKS, 5)


def test_what_is_decoded_counts_as_float32() -> None:
    assert tensor_provenance(INFO, Q6_K, CHUNKS, 5) == tensor_provenance(INFO, F32, CHUNKS, 5)


def test_an_unknown_chunk_makes_the_tensor_unknown() -> None:
    assert tensor_provenance(INFO, BF16, (1, UNKNOWN, 2), 5) == UNKNOWN


def test_importances_count_by_the_weights_that_they_give() -> None:
    values = np.arange(1, 129).reshape(2, 64)
    plain = digest_importance(importances(values), "Q4_K")
    assert plain not in (0, digest_importance(importances(values + 1), "Q4_K"))
    assert plain == digest_importance(importances(values * 4, count=4), "Q4_K")
    assert plain != digest_importance(importances(values, rows_per_weights=2), "Q4_K")
    assert digest_importance(importances(values), "Q8_0") == 0
    assert digest_importance(None, "Q4_K") == 0


# --- in files -------------------------------------------------------------------------------

INFOS = (INFO, TensorInfo("b", (3, 256), Q4_K), TensorInfo("norm", (5,), F32))


def write_set(folder: Path, value: Value | None, n_parts: int = 1) -> Path:
    """Write files without data, and return the path of the last."""
    metadata = {} if value is None else {PROVENANCE_KEY: value}
    groups = [INFOS] if n_parts == 1 else [[info] for info in INFOS]
    paths = shard_paths(folder / "old.gguf", len(groups))
    for path, layout in zip(paths, layouts_of(metadata, groups), strict=True):
        with GGUFWriter(path, layout) as writer:
            writer.publish()
    return paths[-1]


@pytest.mark.parametrize("n_parts", [1, 3])
def test_a_file_keeps_a_number_for_each_tensor(tmp_path: Path, n_parts: int) -> None:
    with open_gguf(write_set(tmp_path, provenance_value([7, 2**64 - 1, UNKNOWN]), n_parts)) as file:
        assert read_provenance(file) == {INFO.name: 7, "b": 2**64 - 1}


FIRST_FORM = Value.array(Kind.UINT64, [7, 2**64 - 1, UNKNOWN])


@pytest.mark.parametrize("n_parts", [1, 3])
def test_files_of_earlier_versions_are_read(tmp_path: Path, n_parts: int) -> None:
    with open_gguf(write_set(tmp_path, FIRST_FORM, n_parts)) as file:
        assert read_provenance(file) == {INFO.name: 7, "b": 2**64 - 1}


def test_no_number_is_too_large_for_javascript() -> None:
    value = provenance_value([7, 2**64 - 1, 2**32])
    assert value == Value.u32s([7, 0, 2**32 - 1, 2**32 - 1, 0, 1])


def test_a_run_of_an_earlier_version_has_the_same_fingerprint() -> None:
    """Its journal and its partial are resumed: the numbers take the same space in both forms."""
    new, old, without = (
        FileLayout.of({"a": Value.u8(1), **metadata, "z": Value.u8(2)}, ())
        for metadata in (
            {PROVENANCE_KEY: provenance_value([1, 2])},
            {PROVENANCE_KEY: Value.array(Kind.UINT64, [1, 2])},
            {},
        )
    )
    assert new.offsets == old.offsets
    of_new, of_old, of_without = (
        describe_run(FillJob((Output(Path("o"), layout),), RowSources({}, {})), InputWatch(()))
        for layout in (new, old, without)
    )
    assert of_new == of_old
    assert of_without["output"] != of_new["output"]
    assert in_first_form(without) is without


@pytest.mark.parametrize(
    "value",
    [
        None,
        provenance_value([7, 8]),
        Value.u32s([7, 8, 9, 10, 11]),
        Value.u32s([7, 8, 9]),
        Value.array(Kind.INT64, [7, 8, 9]),
        Value.u64(7),
        Value.string("abc"),
    ],
)
def test_what_does_not_fit_is_none(tmp_path: Path, value: Value | None) -> None:
    with open_gguf(write_set(tmp_path, value)) as file:
        assert read_provenance(file) is None


def test_the_numbers_do_not_move_what_follows() -> None:
    before, after = (
        FileLayout.of({PROVENANCE_KEY: provenance_value(numbers), "z": Value.u8(1)}, INFOS)
        for numbers in ([0, 0, 0], [1, 2**64 - 1, 5])
    )
    assert before.offsets == after.offsets
    assert len(before.header) == len(after.header)
