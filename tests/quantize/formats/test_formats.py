"""The battery that every codec of the registry goes through.

Bytes are compared with those of ggml itself where its wheel is installed; without it, with bytes recorded
from it (tests/golden/formats, made by scripts/record/format_golden.py) and with the naive twins.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quantize.formats
from gguf_tools.errors import BadWeights, NeedsImportance, QuantError, ShapeError
from gguf_tools.format.block_layouts import EXPONENTS, LAYOUTS, SCALES, count_nonfinite
from gguf_tools.format.ggml_types import TYPES
from quantize.formats import available, get_format
from quantize.formats.base import QuantFormat
from quantize.formats.codecs import CODECS, ignores_importances, requires_importances
from quantize.importances.weighting import ColumnWeights
from tests import naive
from tests.quantize.codecs import OF_LLAMA, block_dtype, decode, encode, told_layout
from tests.support import oracle, samples

needs_oracle = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
every_format = pytest.mark.parametrize("name", available())
every_format_of_ggml = pytest.mark.parametrize("name", OF_LLAMA)

LARGE_GRIDS = ("IQ1_S", "IQ1_M", "IQ2_S")
"""Types whose grids ggml lays out in 4 to 9 seconds, in each process that encodes them. Slow tests do that;
others compare these types with recorded bytes, of every kind of row and of whole files."""

every_format_made_by_ggml = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LARGE_GRIDS else ()) for name in OF_LLAMA],
)

GOLDEN = Path(__file__).parents[2] / "golden" / "formats"
TILE_EDGES = (1, 2, 15, 16, 17, 33)


def importance_kinds(codec: QuantFormat) -> list[str | None]:
    """Return the kinds of importances to try: without any last, and first where there must be some."""
    if requires_importances(codec.type.name):
        return list(samples.IMPORTANCES)
    return [*samples.IMPORTANCES, None]


def columns(codec: QuantFormat) -> int:
    """Return a row length with several blocks a row, not a multiple of what a kernel takes at once."""
    return 3 * max(codec.type.block_elems, 32)


def assert_same_bits(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


# ---- the registry


def test_no_format_module_escapes_the_registry() -> None:
    def defines_a_format(path: Path) -> bool:
        targets = [node.targets for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        return any(isinstance(t, ast.Name) and t.id == "FORMATS" for group in targets for t in group)

    folder = Path(quantize.formats.__file__).parent
    paths = filter(defines_a_format, folder.rglob("*.py"))
    modules = {"." + ".".join(path.relative_to(folder).with_suffix("").parts) for path in paths}
    assert modules == {row.module for row in CODECS.values()}


@every_format
def test_format_is_what_the_registry_says(name: str) -> None:
    codec = get_format(name)
    assert codec.type.name == name
    assert codec.type in TYPES
    assert get_format(codec.type) is get_format(name.lower()) is codec


DESCRIBED_FIELD = re.compile(r"^ *(\d+)(?: \.\. (\d+))? +([a-z_]+)  ?", re.MULTILINE)


@every_format
def test_the_docstring_has_the_fields_of_the_layout(name: str) -> None:
    text = told_layout(name)
    told = {(int(first), field): int(last or first) for first, last, field in DESCRIBED_FIELD.findall(text)}
    if name in ("IQ4_KSS", "Q8_KV"):  # told in sentences
        return
    assert told.keys() >= {(field.offset, field.name) for field in LAYOUTS[name].block}
    assert max(told.values()) + 1 == get_format(name).type.block_bytes


@pytest.mark.parametrize("name", [name for name in available() if name in SCALES and name != "MXFP4"])
def test_kernels_read_scales_where_the_layout_has_them(name: str) -> None:
    """MXFP4's exponent 255 is a number to ggml."""
    codec, scales = get_format(name), SCALES[name]
    in_rows = [(field.kind, field.offset) for field in scales.row]
    in_blocks = [(field.kind, codec.type.row_meta_bytes + field.offset) for field in scales.block]
    for kind, place in in_rows + in_blocks:
        data = np.zeros((1, codec.type.row_bytes(256)), np.uint8)
        assert np.isfinite(decode(name, data)).all()
        for byte, mask in EXPONENTS[kind]:
            data[0, place + byte] |= mask
        assert not np.isfinite(decode(name, data)).all()


def test_unknown_type_is_named() -> None:
    with pytest.raises(QuantError, match="Q8_1: no codec"):
        get_format("q8_1")


@needs_oracle
@every_format_of_ggml
def test_type_is_what_ggml_says(name: str) -> None:
    codec = get_format(name)
    facts = oracle.type_facts(codec.type.id)
    assert facts.name.upper() == name
    assert (facts.block_elems, facts.block_bytes) == (codec.type.block_elems, codec.type.block_bytes)
    assert facts.requires_importance == requires_importances(name)


# ---- bytes of encoded rows


@needs_oracle
@every_format_made_by_ggml
@pytest.mark.parametrize("kind", samples.ROWS)
def test_bytes_equal_ggml(name: str, kind: str) -> None:
    codec = get_format(name)
    rows = samples.rows(kind, (17, columns(codec)))
    for importance_kind in importance_kinds(codec):
        weights = samples.importances(importance_kind, columns(codec))
        try:
            ours = encode(name, rows, weights)
        except BadWeights:
            assert kind in samples.TOO_LARGE
            assert oracle.refuses(codec.type.id, rows, weights)
        else:
            theirs = oracle.quantize(codec.type.id, rows, weights)
            np.testing.assert_array_equal(ours, theirs, f"importances: {importance_kind}")
            assert oracle.is_valid(codec.type.id, theirs)


@needs_oracle
@every_format_made_by_ggml
def test_a_refused_block_is_named(name: str) -> None:
    codec = get_format(name)
    rows = samples.rows("normal", (17, columns(codec)))
    rows[3, codec.type.block_elems :] = samples.rows("largest", (1, columns(codec) - codec.type.block_elems))
    weights = samples.importances("random", columns(codec))
    if oracle.aborts(codec.type.id, rows, weights):
        with pytest.raises(BadWeights, match=rf"{name}: row 3, columns {codec.type.block_elems} to"):
            encode(name, rows, weights)


@pytest.mark.parametrize("name", [name for name in CODECS if name not in ("F32", "F16", "BF16")])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids="in {.__name__}".format)
def test_a_block_that_is_not_finite_is_named(name: str, bad: float, dtype: type) -> None:
    codec = get_format(name)
    n_cols = columns(codec)
    weights = samples.importances("random", n_cols)
    for row, column in ((0, 0), (16, n_cols - 1), (7, n_cols // 2)):
        rows = samples.rows("normal", (17, n_cols)).astype(dtype)
        rows[row, column] = rows[16, -1] = bad
        first = column // codec.type.block_elems * codec.type.block_elems
        message = rf"{name}: row {row}, columns {first} to \d+: a weight is not a finite number"
        for importances in (weights, *([] if requires_importances(codec.type.name) else [None])):
            with pytest.raises(BadWeights, match=message):
                encode(name, rows, importances)


@needs_oracle
@every_format_made_by_ggml
def test_bytes_equal_ggml_at_tile_edges(name: str) -> None:
    codec = get_format(name)
    for n_cols in (codec.type.block_elems, columns(codec)):
        for n_rows in TILE_EDGES:
            rows = samples.rows("heavy_tailed", (n_rows, n_cols), seed=n_rows)
            for importance_kind in importance_kinds(codec)[-2:]:
                weights = samples.importances(importance_kind, n_cols)
                ours, theirs = encode(name, rows, weights), oracle.quantize(codec.type.id, rows, weights)
                np.testing.assert_array_equal(ours, theirs, f"{n_rows} rows of {n_cols}")


@every_format_of_ggml
def test_bytes_equal_recorded_ones(name: str) -> None:
    with np.load(GOLDEN / "samples.npz") as golden, np.load(GOLDEN / f"{name}.npz") as recorded:
        for kind in recorded.files:
            weights = None if kind == "none" else golden[kind]
            for row, theirs in zip(golden["rows"], recorded[kind], strict=True):
                try:
                    ours = encode(name, row[None], weights)[0]
                except BadWeights:  # recorded with a scale that is not finite, or as zeros where ggml aborted
                    if count_nonfinite(get_format(name).type, theirs, theirs.size)[0]:
                        continue
                    ours = np.zeros_like(theirs)
                np.testing.assert_array_equal(ours, theirs, f"importances: {kind}")
        assert recorded.files


@every_format_of_ggml
@pytest.mark.parametrize("kind", ["normal", "mixed_scales", "ties"])
def test_bytes_equal_the_naive_twin(name: str, kind: str) -> None:
    codec = get_format(name)
    row = samples.rows(kind, (1, max(codec.type.block_elems, 32)), seed=5)
    for importance_kind in [None, "random"]:
        weights = samples.importances(importance_kind, row.size)
        if weights is not None or not requires_importances(codec.type.name):
            np.testing.assert_array_equal(
                encode(name, row, weights)[0], naive.TWINS[name].encode(row[0], weights)
            )


@every_format
def test_importances_are_used_as_the_registry_says(name: str) -> None:
    codec = get_format(name)
    rows = samples.rows("normal", (17, columns(codec)))
    weights = [samples.importances("random", columns(codec), seed) for seed in (1, 2)]
    first, second = (encode(name, rows, importances) for importances in weights)
    assert np.array_equal(first, second) == ignores_importances(name)
    if ignores_importances(name):
        np.testing.assert_array_equal(encode(name, rows, None), first)


@every_format
def test_halves_are_read_as_the_floats_they_are(name: str) -> None:
    codec = get_format(name)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        rows = samples.rows("normal", (17, columns(codec))).astype(dtype)
        weights = samples.importances("random", columns(codec))
        same = encode(name, rows.astype(np.float32), weights)
        np.testing.assert_array_equal(encode(name, rows, weights), same)


def test_a_search_with_importances_is_compiled_for_one_kind_of_floats() -> None:
    """It takes seconds to compile, and a checkpoint may have FP8 beside bfloat16."""
    from quantize.formats.k_quants import affine

    weights = samples.importances("random", 256)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        encode("Q4_K", samples.rows("normal", (1, 256)).astype(dtype), weights)
    assert len(affine._quantize_weighted_q4_k.signatures) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "dtype"), [("F32", "f4"), ("F16", "f2"), ("BF16", ml_dtypes.bfloat16)])
def test_rows_of_the_type_itself_are_not_copied(name: str, dtype: npt.DTypeLike) -> None:
    rows = samples.rows("normal", (3, 5)).astype(dtype)
    assert np.shares_memory(encode(name, rows, None), rows)


@needs_oracle
@pytest.mark.parametrize("name", ["F16", "BF16"])
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@settings(deadline=None)
def test_any_float_becomes_the_half_that_ggml_makes(name: str, words: list[int]) -> None:
    codec = get_format(name)
    rows = np.array([words], np.uint32).view(np.float32)
    np.testing.assert_array_equal(codec.make(rows, None), oracle.quantize(codec.type.id, rows, None))


# ---- decoding

SPECIAL_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0xFD55, 0x7E00, 0xFFFF)


@st.composite
def any_blocks(draw: st.DrawFn, codec: QuantFormat) -> npt.NDArray[np.uint8]:
    """Draw a row of random bytes, at times with special numbers where the block has a half."""
    n_blocks = draw(st.integers(1, 3))
    n_bytes = n_blocks * codec.type.block_bytes
    data = np.frombuffer(draw(st.binary(min_size=n_bytes, max_size=n_bytes)), np.uint8).copy()
    block = block_dtype(codec.type.name)
    blocks = data.view(block)
    for field in block.names or ():
        if block[field] == np.dtype("<u2") and draw(st.booleans()):
            blocks[field] = draw(st.sampled_from(SPECIAL_HALVES))
    return data[None]


@every_format_of_ggml
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_any_bytes_decode_as_specified(name: str, data: st.DataObject) -> None:
    codec = get_format(name)
    blocks = data.draw(any_blocks(codec))
    ours = decode(name, blocks)
    if oracle.available():
        assert_same_bits(ours, oracle.dequantize(codec.type.id, blocks))
    else:
        assert_same_bits(ours[0], naive.TWINS[name].decode(blocks[0]))


@needs_oracle
@every_format_of_ggml
def test_many_blocks_decode_as_ggml_decodes_them(name: str) -> None:
    codec = get_format(name)
    n_bytes = 7 * codec.type.block_bytes
    blocks = np.random.default_rng(2).integers(0, 256, (33, n_bytes), np.uint8)
    assert_same_bits(decode(name, blocks), oracle.dequantize(codec.type.id, blocks))


@every_format_of_ggml
def test_naive_twin_decodes_the_same(name: str) -> None:
    codec = get_format(name)
    blocks = np.random.default_rng(3).integers(0, 256, (1, 2 * codec.type.block_bytes), np.uint8)
    assert_same_bits(decode(name, blocks)[0], naive.TWINS[name].decode(blocks[0]))


# ---- what does not fit


@every_format
def test_no_rows_are_no_bytes(name: str) -> None:
    codec = get_format(name)
    data = codec.encode(np.empty((0, 256), np.float32), ColumnWeights(np.ones(256, np.float32)))
    assert data.shape == (0, codec.type.row_bytes(256))
    assert codec.decode(data, 256).shape == (0, 256)


@every_format
def test_row_that_is_no_whole_number_of_blocks(name: str) -> None:
    codec = get_format(name)
    if codec.type.block_elems > 1:
        rows = np.zeros((2, codec.type.block_elems + 1), np.float32)
        with pytest.raises(
            ShapeError, match=rf"{rows.shape[1]} is not a multiple of {codec.type.block_elems}"
        ):
            encode(name, rows, None)


@every_format
def test_importances_that_are_missing(name: str) -> None:
    codec = get_format(name)
    if requires_importances(codec.type.name):
        with pytest.raises(NeedsImportance, match=name):
            codec.encode(np.zeros((2, columns(codec)), np.float32), None)


@every_format
def test_importances_of_another_length(name: str) -> None:
    codec = get_format(name)
    rows = np.zeros((2, columns(codec)), np.float32)
    with pytest.raises(ShapeError, match=name):
        codec.encode(rows, ColumnWeights(np.ones(columns(codec) - 1, np.float32)))


@every_format
def test_rows_that_are_no_matrix_of_floats(name: str) -> None:
    codec = get_format(name)
    with pytest.raises(ShapeError, match="2 dimensions"):
        codec.encode(np.zeros(columns(codec), np.float32), None)
    with pytest.raises(ShapeError, match="float64"):
        codec.encode(np.zeros((1, columns(codec))), None)


@every_format
def test_data_of_another_row_length(name: str) -> None:
    codec = get_format(name)
    data = np.zeros((2, codec.type.row_bytes(columns(codec))), np.uint8)
    for wrong in (data[:, :-1], data[0], data.view(np.int8)):
        with pytest.raises(ShapeError, match=rf"{name}: data of rows of {columns(codec)} must be uint8"):
            codec.decode(wrong, columns(codec))
