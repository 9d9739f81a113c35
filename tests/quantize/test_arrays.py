"""One array encoded and decoded, and arrays of a file."""

from __future__ import annotations

from html import escape
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import gguf_tools
import quantize
from gguf_tools.errors import NeedsImportance, QuantError, ShapeError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import BF16, F32, Q4_0
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from quantize.formats import get_format
from quantize.importances.entries import Importance, ImportanceFile
from quantize.importances.weighting import ColumnWeights
from quantize.linting import lint
from quantize.pipeline import plan_run
from tests.support import samples

ROWS = samples.rows("normal", (6, 256))
WEIGHTS = np.linspace(0.1, 2, 256, dtype=np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 256), (1, 2, 3, 256)])
def test_any_dtype_and_leading_shape(shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    rows = ROWS.astype(dtype)
    data = quantize.encode(rows.reshape(shape), "q4_0")
    as_read = rows if dtype is not np.float64 else rows.astype(np.float32)
    assert data.shape == (*shape[:-1], 144)
    np.testing.assert_array_equal(data.reshape(6, 144), get_format("Q4_0").encode(as_read, None))
    values = quantize.decode(data, Q4_0)
    assert (values.shape, values.dtype) == (shape, np.float32)
    expected = get_format("Q4_0").decode(data.reshape(6, 144), 256)
    np.testing.assert_array_equal(values.reshape(6, 256), expected)


def test_importances_of_all_rows_or_of_each_matrix() -> None:
    codec = get_format("Q4_0")
    one, other = (codec.encode(ROWS[:3], ColumnWeights(w)) for w in (WEIGHTS, WEIGHTS[::-1].copy()))
    np.testing.assert_array_equal(quantize.encode(ROWS[:3], "Q4_0", WEIGHTS), one)
    twice = np.stack([ROWS[:3], ROWS[:3]])
    np.testing.assert_array_equal(
        quantize.encode(twice, "Q4_0", np.stack([WEIGHTS, WEIGHTS[::-1]])), np.stack([one, other])
    )
    with pytest.raises(ShapeError, match="importances"):
        quantize.encode(twice, "Q4_0", np.stack([WEIGHTS] * 3))


def test_what_cannot_be() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        quantize.encode(ROWS[:, :100], "Q4_0")
    with pytest.raises(ShapeError, match="no row"):
        quantize.encode(1.0, "Q4_0")
    with pytest.raises(ShapeError, match="whole blocks of 18"):
        quantize.decode(np.zeros((2, 17), np.uint8), "Q4_0")
    with pytest.raises(NeedsImportance):
        quantize.encode(ROWS, "IQ2_XXS")
    with pytest.raises(QuantError, match="no codec"):
        quantize.encode(ROWS, "Q9")


@pytest.mark.parametrize("endian", ["little", "big"])
def test_arrays_of_a_file(tmp_path: Path, endian: Endian) -> None:
    arrays = {
        "a": (F32, ROWS),
        "b": (BF16, ROWS.astype(ml_dtypes.bfloat16).reshape(2, 3, 256)),
        "c": (Q4_0, quantize.encode(ROWS, "Q4_0")),
    }
    shapes = {"a": (6, 256), "b": (2, 3, 256), "c": (6, 256)}
    infos = [TensorInfo(name, shapes[name], type_) for name, (type_, _) in arrays.items()]
    layout = FileLayout.of({}, infos, endian=endian)
    with GGUFWriter(tmp_path / "a.gguf", layout) as writer:
        for info in infos:
            data = np.ascontiguousarray(arrays[info.name][1]).reshape(-1).view(np.uint8)
            stored = swap_bytes(info.type, data) if endian == "big" else data
            writer.write(layout.offset_of(info.name), stored.data)
        writer.publish()
    with gguf_tools.open_gguf(tmp_path / "a.gguf") as file:
        for name, (_, expected) in arrays.items():
            found = file.blocks(name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        with pytest.raises(gguf_tools.FormatError):
            file.array("d")
        np.testing.assert_array_equal(file.array("b"), arrays["b"][1])
        with pytest.raises(gguf_tools.FormatError, match=r"'c' is quantized to Q4_0; .*values\('c'\)"):
            file.array("c")
        for name in "abc":
            values = quantize.read_values(file, name)
            assert values.dtype == np.float32
            np.testing.assert_allclose(values.reshape(6, 256), ROWS, atol=0.2 * np.abs(ROWS).max())
        decoded = quantize.decode(arrays["c"][1], "Q4_0")
        np.testing.assert_array_equal(quantize.read_values(file, "c"), decoded)


def test_reprs_are_one_line(tmp_path: Path) -> None:
    tokens = gguf_tools.Value.strings(map(str, range(4096)))
    facts = {
        "general.architecture": gguf_tools.Value.string("llama"),
        "llama.block_count": gguf_tools.Value.u32(1),
    }
    layout = FileLayout.of({**facts, "tokens": tokens}, [TensorInfo("a", (4, 32), F32)])
    with GGUFWriter(tmp_path / "a.gguf", layout) as writer:
        writer.publish()
    with gguf_tools.open_gguf(tmp_path / "a.gguf") as file:
        shown = [file, file.shards[0], file.metadata, file.metadata["tokens"], layout]
        html = file._repr_html_()
        assert file.shards[0]._repr_html_().count("<tr>") == 2
    with plan_run(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0") as run:
        planned = [run, run.preparation, run.preparation.plan, run.execute()]
    for value in planned:
        assert "<td>F32</td><td>1</td><td>512</td>" in value._repr_html_()
    idle = quantize.PlanOptions(overrides=quantize.parse_overrides(["nothing=Q8_0"]))
    report = lint("Q8_0", tmp_path / "a.gguf", options=idle)
    assert f"<td>{escape(report.findings[0].text)}</td>" in report._repr_html_()
    rows = [np.ones((2, 8), np.float32), np.ones(2, np.float32)]
    matrix = ImportanceFile({f"blk.{layer}.a.weight": Importance(*rows) for layer in range(3)})
    assert "<td>blk.0-2.a.weight</td><td>2</td><td>8</td>" in matrix._repr_html_()
    shown += [*planned, report, matrix]
    assert [text for value in shown if len(text := repr(value)) > 300 or "\n" in text] == []
    assert "1 tensors" in repr(file)
    assert "<td>F32</td><td>1</td><td>512</td>" in html
