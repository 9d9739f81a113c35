"""A new type is a module and two rows: a toy codec goes through everything that a real one does."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quantize
from gguf_tools import open_gguf
from gguf_tools.commands.quantize import main
from gguf_tools.errors import BadTensor, BadWeights, QuantError, ShapeError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32, Q8_0
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.fill import encode as filling
from quantize.fill.sources import GGUFTensor
from quantize.formats import available, get_format
from quantize.formats.codecs import CODECS, DECODERS, REGROUPED
from quantize.importances.entries import Importance
from quantize.plan import recipe as language
from quantize.plan import recipes
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides
from quantize.plan.recipe import Recipe
from quantize.roles import Role
from tests.contract.import_graph import PACKAGES, ROOT, files_of, tree_of
from tests.quantize import toy_codec
from tests.quantize.codecs import decode, encode

NAME = toy_codec.TYPE.name
STACK = TensorInfo("blk.0.ffn_down_exps.weight", (2, 24, 64), F32)
MATRIX = TensorInfo("blk.0.attn_output.weight", (40, 64), F32)
ODD_ROWS = TensorInfo("blk.0.ffn_up.weight", (20, 64), F32)
TENSORS = (STACK, MATRIX, ODD_ROWS)
OPTIONS = PlanOptions(overrides=parse_overrides([f"blk.*={NAME}"]))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, NAME, toy_codec.ROW)
    monkeypatch.delitem(DECODERS, NAME)
    monkeypatch.delitem(REGROUPED, NAME)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file of TENSORS."""
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}
    layout = FileLayout.of(metadata, TENSORS)
    with GGUFWriter(tmp_path / "in.gguf", layout) as writer:
        for info in TENSORS:
            writer.write(layout.offset_of(info.name), rows_of(info))
        writer.publish()
    return tmp_path / "in.gguf"


def rows_of(info: TensorInfo) -> np.ndarray:
    return np.random.default_rng(info.n_rows).standard_normal((info.n_rows, info.n_cols), np.float32)


def data_for(info: TensorInfo) -> Importance:
    """Return importances, one row per matrix, with columns that do not count."""
    rng = np.random.default_rng(3)
    values = rng.gamma(0.5, 2, (info.n_mats, info.n_cols)) * (rng.random((info.n_mats, info.n_cols)) < 0.8)
    return Importance(values.astype(np.float32), np.ones(info.n_mats, np.float32))


def test_the_registry_finds_it_by_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NAME in available()
    assert get_format(NAME) is toy_codec.FORMATS[0]
    monkeypatch.delitem(CODECS, NAME)
    with pytest.raises(QuantError, match=f"{NAME}: no codec"):
        get_format(NAME)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("strip_elems", [64, 11 * 64, 1 << 20])
def test_a_file_is_quantized_verified_and_read_back(
    model: Path, n_threads: int, is_weighted: bool, strip_elems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "STRIP_ELEMS", strip_elems)
    data = {STACK.name: data_for(STACK)} if is_weighted else None
    output = model.with_name("out.gguf")
    result = quantize.quantize(
        model, output, "Q4_0", options=OPTIONS, importances=data, verify=True, n_threads=n_threads
    )
    assert result.written.verification is not None
    assert result.written.verification.n_tensors == 3
    with open_gguf(output) as file:
        assert {name: info.type.name for name, info in file.tensors.items()} == {
            STACK.name: NAME, MATRIX.name: NAME, ODD_ROWS.name: "Q8_0",
        }  # fmt: skip
        weights = [*data[STACK.name].weights()] if data else [None, None]
        matrices = zip(rows_of(STACK).reshape(2, 24, 64), weights, strict=True)
        expected = np.concatenate([encode(NAME, rows, w) for rows, w in matrices])
        assert bytes(file.raw(STACK.name)) == expected.tobytes()
        np.testing.assert_array_equal(
            GGUFTensor(file, STACK.name).read_rows(8, 32), decode(NAME, expected[8:32])
        )
        assert bytes(file.raw(MATRIX.name)) == encode(NAME, rows_of(MATRIX), None).tobytes()


def test_it_is_a_source_like_any_other(model: Path) -> None:
    quantize.quantize(model, model.with_name("toy.gguf"), "Q4_0", options=OPTIONS)
    back = PlanOptions(allow_requantize=True, overrides=parse_overrides([".*=Q8_0"]))
    quantize.quantize(model.with_name("toy.gguf"), model.with_name("back.gguf"), "Q4_0", options=back)
    rows = decode(NAME, encode(NAME, rows_of(MATRIX), None))
    with open_gguf(model.with_name("back.gguf")) as file:
        assert bytes(file.raw(MATRIX.name)) == encode(Q8_0, rows, None).tobytes()


def test_a_dry_run_names_it_and_what_it_falls_back_to(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", "--tensor-type", f"blk.*={NAME}", str(model), "Q4_0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{MATRIX.name}        40 x 64  F32 -> {NAME}" in lines[0]
    assert lines[2].endswith(f"20 rows are no multiple of 8: {NAME} -> Q8_0")
    assert f"note: Q8_0 instead of {NAME}, because 20 rows can't be cut into groups of 8" in lines[-1]


def test_its_error_range_is_what_verification_holds_it_to(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(toy_codec.ROW, error_range=replace(toy_codec.ROW.error_range, relative=1e-4))
    monkeypatch.setitem(CODECS, NAME, strict)
    with pytest.raises(BadTensor, match=rf"as {NAME}, .* expected at most 0\.01%"):
        quantize.quantize(model, model.with_name("out.gguf"), "Q4_0", options=OPTIONS, verify=True)


def test_rows_that_do_not_fill_its_groups_are_refused() -> None:
    with pytest.raises(ShapeError, match=f"{NAME}: 20 rows are no multiple of 8"):
        encode(NAME, rows_of(ODD_ROWS), None)
    with pytest.raises(ShapeError, match=f"{NAME}: 4 rows are no multiple of 8"):
        toy_codec.decode(encode(NAME, rows_of(MATRIX), None)[:4], 64)


def test_what_it_refuses_is_named() -> None:
    rows = rows_of(MATRIX)
    rows[3, 5] = np.nan
    with pytest.raises(BadWeights, match=f"{NAME}: row 3, column 5"):
        encode(NAME, rows, None)


# ---- the pages that say how to add a type and a file type

DOCS = ROOT / "docs"


def read(page: str) -> str:
    return (DOCS / page).read_text()


def code_of(page: str) -> str:
    """Return the one block of code of a page."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    return str(code)


def test_the_code_of_the_page_is_the_toy() -> None:
    assert code_of("add-a-type.md") in Path(toy_codec.__file__).read_text()


def test_the_file_type_of_the_page_is_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = eval(code_of("add-a-file-type.md"), vars(language) | {"Recipe": Recipe, "Role": Role})
    monkeypatch.setitem(recipes._BY_NAME, recipe.name, recipe)
    assert main(["--dry-run", str(model), recipe.name]) == 0
    lines = capsys.readouterr().out.splitlines()
    types = {line.split()[1]: line.split("-> ")[1].split()[0] for line in lines[:3]}
    assert types == {STACK.name: "Q5_1", MATRIX.name: "Q8_0", ODD_ROWS.name: "Q4_0"}


def test_no_table_of_types_is_missing_on_the_page() -> None:
    """Modules that name many types, but those of file types, are the places of the page."""
    page = read("add-a-type.md")
    assert "A type is told in three places, and in a fourth if" in page
    table = page.split("|---|---|---|\n")[1].split("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()]
    assert len(rows) == 4
    told = set(re.findall(r"`([\w/]+\.py)`", " ".join(rows)))
    modules = [path for package in PACKAGES for path in files_of(package)]
    assert told == {str(path) for path in modules if len(types_in(path)) >= 7 and path.parent.name != "plan"}


def types_in(path: Path) -> set[str]:
    """Return the types with a codec that a module names, but for those of floats."""
    nodes = list(ast.walk(tree_of(path)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (names | texts) & (set(CODECS) - {"F32", "F16", "BF16"})


@pytest.mark.parametrize("page", ["add-a-type.md", "add-a-file-type.md"])
def test_what_the_pages_name_is_there(page: str) -> None:
    text = read(page)
    for path in re.findall(r"`((?:quantize|gguf_tools|tests|scripts|calibrate)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`(_?[A-Z_]{4,})` in `([\w/]+/[\w/.]+\.py)`", text):
        assert re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)
