"""Files with sizes made longer, and made shorter again."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import open_gguf
from gguf_tools.commands.quantize import main
from gguf_tools.errors import BadRequest, ExecutionError
from gguf_tools.format.ggml_types import BF16, F16, F32, Q8_0, Q8_0_R8, GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize import quantize
from quantize.fill.sources import GGUFTensor
from quantize.formats import get_decoder, get_format
from quantize.formats.codecs import CODECS
from quantize.importances.entries import Importance, ImportanceFile
from quantize.importances.weighting import ColumnWeights
from quantize.options import QuantizeOptions
from quantize.padding import PadChoice
from quantize.padding.counterparts import fit_importances
from quantize.padding.inner_sizes import UNPADDED
from quantize.padding.resized import Extent, Resize, ResizedTensor
from quantize.pipeline import plan_run
from quantize.run import execute_together
from tests.quantize.padding.ffn_files import (
    DENSE,
    HIDDEN,
    KEY,
    METADATA,
    ROUTED,
    SHAPES,
    values_of,
    write_ffn_file,
)


def rows_of(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        tensor = GGUFTensor(file, name)
        return tensor.read_rows(0, int(np.prod(tensor.shape[:-1]))).reshape(tensor.shape)


def padded_values(name: str) -> np.ndarray:
    """The obvious way: the values in the corner of zeros, matrix by matrix."""
    values, shape = values_of(name, SHAPES[name]), list(SHAPES[name])
    inner = {160: 256, 96: 256, 192: 512}
    axis = -1 if "down" in name else -2
    if re.search(r"ffn_(gate|up|down)(_exps|_shexp)?\.", name):
        shape[axis] = inner[shape[axis]]
    padded = np.zeros(shape, np.float32)
    padded[tuple(slice(n) for n in values.shape)] = values
    return padded


@pytest.mark.parametrize("n_threads", [1, 3])
def test_every_weight_is_where_it_was_and_the_rest_is_zero(tmp_path: Path, n_threads: int) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    quantize(source, tmp_path / "out.gguf", "F32", pad="256", n_threads=n_threads)
    for name in SHAPES:
        np.testing.assert_array_equal(rows_of(tmp_path / "out.gguf", name), padded_values(name))
    with open_gguf(tmp_path / "out.gguf") as file:
        assert (file.get(KEY), file.get(UNPADDED + KEY)) == (256, ROUTED)


def test_off_takes_the_zeros_away_again(tmp_path: Path) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    plain = quantize(source, tmp_path / "plain.gguf", "F32").paths[0]
    padded = quantize(source, tmp_path / "padded.gguf", "F32", pad="256").paths[0]
    back = quantize(padded, tmp_path / "back.gguf", "F32", pad="off").paths[0]
    assert back.read_bytes() == plain.read_bytes()
    again = quantize(padded, tmp_path / "again.gguf", "F32", pad="256").paths[0]
    assert again.read_bytes() == padded.read_bytes()


@pytest.mark.parametrize("key", [KEY, KEY.removeprefix("deepseek2.")])
def test_a_size_is_padded_alone(tmp_path: Path, key: str) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    some = quantize(source, tmp_path / "some.gguf", "F32", pad=(key,)).paths[0]
    assert rows_of(some, "blk.1.ffn_down_exps.weight").shape[-1] == 256
    assert rows_of(some, "blk.0.ffn_down.weight").shape[-1] == DENSE
    whole = quantize(source, tmp_path / "whole.gguf", "F32", pad="256").paths[0]
    again = quantize(whole, tmp_path / "again.gguf", "F32", pad=(key,)).paths[0]
    assert again.read_bytes() == some.read_bytes()


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ("expert_length", "--pad expert_length: expected auto, 256, off, or some of deepseek2.feed_forward"),
        ("of", "'of', expected auto, 256, off, or keys such as feed_forward_length"),
    ],
)
def test_a_size_that_is_none(
    tmp_path: Path, pad: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    assert main(["--dry-run", "--pad", pad, str(source), "Q2_K"])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_padded_file_keeps_its_sizes_unless_it_is_asked(tmp_path: Path) -> None:
    padded = quantize(write_ffn_file(tmp_path / "in.gguf"), tmp_path / "p.gguf", "F32", pad="256").paths[0]
    kept = quantize(padded, tmp_path / "kept.gguf", "Q8_0").paths[0]
    assert rows_of(kept, "blk.1.ffn_down_exps.weight").shape == (3, HIDDEN, 256)


def test_off_refuses_values_where_zeros_should_be(tmp_path: Path) -> None:
    metadata = {**METADATA, UNPADDED + KEY: Value.u32(ROUTED - 8)}
    source = write_ffn_file(tmp_path / "in.gguf", metadata=metadata)
    with pytest.raises(ExecutionError, match=r"blk.1.ffn_\w+.weight: row \d+ has values where"):
        quantize(source, tmp_path / "out.gguf", "F32", pad="off")
    assert not (tmp_path / "out.gguf").exists()


def test_one_pass_is_two_passes(tmp_path: Path) -> None:
    """Padding while quantizing gives the bytes of quantizing the padded file."""
    source = write_ffn_file(tmp_path / "in.gguf")
    padded = quantize(source, tmp_path / "padded.gguf", "F32", pad="256").paths[0]
    twice = quantize(padded, tmp_path / "twice.gguf", "Q3_K_M").paths[0]
    once = quantize(source, tmp_path / "once.gguf", "Q3_K_M", pad="256").paths[0]
    assert once.read_bytes() == twice.read_bytes()
    with open_gguf(once) as file:
        assert "Q4_0" not in {info.type.name for info in file.tensors.values()}


@pytest.mark.parametrize("type_", [F16, BF16, Q8_0], ids=str)
def test_blocks_stay_blocks(tmp_path: Path, type_: GGMLType) -> None:
    source = write_ffn_file(tmp_path / "in.gguf", type_=type_)
    padded = quantize(source, tmp_path / "padded.gguf", "COPY", pad="256").paths[0]
    for name in SHAPES:
        before, after = rows_of(source, name), rows_of(padded, name)
        np.testing.assert_array_equal(after[tuple(slice(n) for n in before.shape)], before)
        assert np.count_nonzero(after) == np.count_nonzero(before)
    back = quantize(padded, tmp_path / "back.gguf", "COPY", pad="off").paths[0]
    for name in SHAPES:
        np.testing.assert_array_equal(rows_of(back, name), rows_of(source, name))


def test_blocks_are_not_cut(tmp_path: Path) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    padded = quantize(source, tmp_path / "q4.gguf", "Q4_K_M", pad="256").paths[0]
    with pytest.raises(BadRequest, match=r"blk.0.ffn_down.weight is Q\d_K, and row 160 ends inside a block"):
        quantize(padded, tmp_path / "out.gguf", "COPY", pad="off")


def test_a_size_set_by_hand_is_refused(tmp_path: Path) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    overrides = [(KEY, Value.u32(ROUTED))]
    with pytest.raises(BadRequest, match=f"kv_overrides {KEY}"):
        quantize(source, tmp_path / "out.gguf", "Q8_0", pad="256", kv_overrides=overrides)


def test_interleaved_rows_are_not_cut() -> None:
    info = TensorInfo("blk.0.ffn_up.weight", (16, 32), Q8_0_R8)
    with pytest.raises(BadRequest, match="more than blocks"):
        Resize(rows=Extent(16, 256)).refuse(info, "m")


class Stored:
    """A tensor in memory."""

    by_rows, type = True, F32

    def __init__(self, values: np.ndarray) -> None:
        self.name, self.shape, self._rows = "t", values.shape, values.reshape(-1, values.shape[-1])

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self._rows[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


@pytest.mark.parametrize(
    ("rows", "cols"), [((5, 8), None), (None, (6, 9)), ((5, 7), (6, 11)), ((10, 16), None)]
)
def test_any_range_of_rows(rows: tuple[int, int] | None, cols: tuple[int, int] | None) -> None:
    values = np.arange(1, 181, dtype=np.float32).reshape(3, 10, 6)
    resize = Resize(rows and Extent(*rows), cols and Extent(*cols))
    tensor = ResizedTensor(Stored(values), resize)
    run = rows[0] if rows else 30
    runs = values.reshape(-1, run, 6)
    expected = np.zeros((len(runs), rows[1] if rows else run, cols[1] if cols else 6), np.float32)
    expected[:, :run, :6] = runs
    expected = expected.reshape(-1, expected.shape[-1])
    assert tensor.shape == resize.shape(values.shape)
    for start in range(len(expected)):
        for stop in range(start + 1, len(expected) + 1):
            np.testing.assert_array_equal(tensor.read_rows(start, stop), expected[start:stop])
    back = Resize(resize.rows and Extent(rows[1], rows[0]), resize.cols and Extent(cols[1], cols[0]))
    shrunk = ResizedTensor(tensor, back)
    np.testing.assert_array_equal(shrunk.read_rows(3, 29), values.reshape(30, 6)[3:29])


SAY_NO_ZERO = {
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0",
    "IQ1_KT", "IQ2_KT", "IQ3_K", "IQ4_KS", "IQ4_KSS", "IQ5_KS",
}  # fmt: skip
"""Types that have something else than 0 in columns of zeros beside others; rows of zeros they can say."""


@pytest.mark.parametrize("name", CODECS)
def test_rows_of_zeros_are_zeros_in_every_type(name: str) -> None:
    """So nothing comes through the padding, whatever a type makes of columns of zeros."""
    type_ = by_name(name)
    for weighting in (None, ColumnWeights(np.linspace(0, 2, 512, dtype=np.float32))):
        if weighting is None and CODECS[name].use.value == "required":
            continue
        data = get_format(type_).encode(np.zeros((2, 512), np.float32), weighting)
        assert not get_decoder(type_)(data.reshape(2, -1), 512).any()


@pytest.mark.parametrize("name", CODECS)
def test_columns_of_zeros_stay_zeros_where_a_type_can_say_it(name: str) -> None:
    type_, n_real = by_name(name), 352
    rows = np.zeros((8, 512), np.float32)
    rows[:, :n_real] = np.random.default_rng(0).standard_normal((8, n_real))
    weights = np.zeros(512, np.float32)
    weights[:n_real] = 1
    found = False
    for weighting in (None, ColumnWeights(weights)):
        if weighting is not None or CODECS[name].use.value != "required":
            decoded = get_decoder(type_)(get_format(type_).encode(rows, weighting).reshape(8, -1), 512)
            found |= bool(decoded[:, n_real:].any())
    assert found == (name in SAY_NO_ZERO)


# ---- importances


def entries(n_inner: int, flat: bool = False) -> ImportanceFile:
    random = np.random.default_rng(1)
    values = np.zeros((3, n_inner), np.float32)
    values[:, :ROUTED] = random.uniform(1, 9, (3, ROUTED))
    down = Importance(values.reshape(1, -1), np.ones(1)) if flat else Importance(values, np.ones(3))
    others = {
        name: Importance(np.ones((1, HIDDEN), np.float32), np.ones(1)) for name in SHAPES if "up" in name
    }
    return ImportanceFile({"blk.1.ffn_down_exps.weight": down, **others})


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("type_name", ["Q4_K_S", "Q4_0"])
def test_matrices_of_the_model_and_of_the_padded_one_serve_both(
    tmp_path: Path, type_name: str, flat: bool
) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    padded = quantize(source, tmp_path / "padded.gguf", "F32", pad="256").paths[0]
    for pad, path in (("256", source), (None, padded), (None, source), ("off", padded)):
        names = {n: tmp_path / f"{path.stem}-{pad}-{n}.gguf" for n in (ROUTED, 256)}
        made = [
            quantize(path, name, type_name, importances=entries(n, flat), pad=pad).paths[0]
            for n, name in names.items()
        ]
        assert made[0].read_bytes() == made[1].read_bytes()
    plain = quantize(source, tmp_path / "plain.gguf", type_name, pad="off").paths[0]
    down = "blk.1.ffn_down_exps.weight"
    assert (rows_of(plain, down) != rows_of(made[0], down)).any()


def test_experts_whose_values_together_fill_a_padded_row_are_kept_apart() -> None:
    """8 experts of 32 columns have as many values as one row of 256."""
    down = TensorInfo("blk.1.ffn_down_exps.weight", (8, 4, 256), F32)
    metadata = {**METADATA, KEY: Value.u32(256), UNPADDED + KEY: Value.u32(32)}
    model = {down.name: Importance(np.ones((8, 32), np.float32), np.ones(8))}
    assert fit_importances(model, metadata, [down])[down.name].n_values == 8 * 256


# ---- what is told


def test_the_plan_says_what_padding_does(tmp_path: Path) -> None:
    source = write_ffn_file(tmp_path / "in.gguf")
    with plan_run(source, tmp_path / "out.gguf", "Q2_K") as without:
        plain = without.preparation
    with plan_run(source, tmp_path / "out.gguf", "Q2_K", QuantizeOptions(pad="256")) as run:
        plan = run.preparation.plan
    note = plan.notes[0]
    assert f"{KEY} 96 -> 256" in note
    assert f"{plan.total_bytes:,} bytes of tensors with it, {plain.plan.total_bytes:,} without" in note
    assert re.search(r"2 tensors Q3_K instead of Q4_0", note) or "instead of Q4_0" in note
    (down,) = [tensor for tensor in plan.tensors if tensor.name == "blk.1.ffn_down_exps.weight"]
    assert down.reason.endswith("padded, Q4_0 of 3 x 256 x 96 without")
    assert run.preparation.source_bytes == plain.source_bytes


def test_files_with_and_without_padding_are_made_from_one_walk(tmp_path: Path) -> None:
    """Rows of the same numbers are others where matrices are longer."""
    source = write_ffn_file(tmp_path / "in.gguf")
    ways: tuple[PadChoice | None, ...] = (None, "256")
    alone = [quantize(source, tmp_path / f"{pad}.gguf", "Q4_0", pad=pad).paths[0] for pad in ways]
    with ExitStack() as stack:
        plans = [
            stack.enter_context(
                plan_run(source, tmp_path / f"{pad}-2.gguf", "Q4_0", QuantizeOptions(pad=pad))
            )
            for pad in ways
        ]
        together = [result.paths[0] for result in execute_together(plans)]
    assert [path.read_bytes() for path in together] == [path.read_bytes() for path in alone]
