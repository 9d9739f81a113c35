"""Tensors that lie on a grid of 4 bits keep it."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gguf_tools import open_gguf
from gguf_tools.commands.quantize import main
from gguf_tools.errors import BadArgument
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import BF16, F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize import QuantizeOptions, quantize
from quantize.fill.sources import GGUFTensor
from quantize.grids import find_grid, lost_grids
from quantize.importances.entries import Importance
from quantize.pipeline import plan_run
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides

ROWS, COLS = 64, 256
EXACT, ROUNDED, SHIFTED, ANY = (f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down", "gate_shexp"))
METADATA = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}


def grid(seed: int, low: int, high: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    codes = random.integers(low, high, (ROWS, COLS // 32, 32), endpoint=True)
    scales = (0.01 * random.random((ROWS, COLS // 32, 1)) + 0.001).astype(np.float16).astype(np.float32)
    return (codes * scales).reshape(ROWS, COLS).astype(np.float32)


WEIGHTS = {
    EXACT: grid(0, -8, 7),
    ROUNDED: grid(1, -7, 7),
    SHIFTED: grid(2, 0, 15),
    ANY: (0.02 * np.random.default_rng(3).standard_normal((ROWS, COLS))).astype(np.float32),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    infos = [TensorInfo(name, (ROWS, COLS), BF16 if name == ROUNDED else F32) for name in WEIGHTS]
    layout, path = FileLayout.of(METADATA, infos), tmp_path / "model.gguf"
    with GGUFWriter(path, layout) as writer:
        for info in infos:
            values = WEIGHTS[info.name].astype(ml_dtypes.bfloat16 if info.type == BF16 else np.float32)
            writer.write(layout.offset_of(info.name), values.view(np.uint8))
        writer.publish()
    return path


def decoded(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        return GGUFTensor(file, name).read_rows(0, ROWS)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_codes_are_kept_whatever_the_others_become(model: Path, tmp_path: Path, n_threads: int) -> None:
    matrix = {name: Importance(np.ones((1, COLS), np.float32), np.ones(1)) for name in WEIGHTS}
    made = quantize(model, tmp_path / "out.gguf", "Q6_K", keep_grid=True, importances=matrix, verify=True,
                    n_threads=n_threads)  # fmt: skip
    plan = {tensor.name: tensor for tensor in made.preparation.plan.tensors}
    types = {name: tensor.target_type.name for name, tensor in plan.items()}
    assert types == {EXACT: "Q4_0", ROUNDED: "Q4_0", SHIFTED: "Q4_1", ANY: "Q6_K"}
    assert plan[EXACT].reason == "16 rows of 64 lie on a grid of Q4_0, exactly"
    assert "lie on a grid of Q4_0, to 0.1" in plan[ROUNDED].reason
    np.testing.assert_array_equal(decoded(made.paths[0], EXACT), WEIGHTS[EXACT])
    np.testing.assert_allclose(decoded(made.paths[0], ROUNDED), WEIGHTS[ROUNDED], rtol=2.0**-8)
    errors = decoded(made.paths[0], SHIFTED) - WEIGHTS[SHIFTED]
    assert np.linalg.norm(errors) < 0.005 * np.linalg.norm(WEIGHTS[SHIFTED])


def test_without_the_option_bytes_are_those_of_any_weights(model: Path, tmp_path: Path) -> None:
    plain = quantize(model, tmp_path / "plain.gguf", "Q4_0").paths[0]
    kept = quantize(model, tmp_path / "kept.gguf", "Q4_0", keep_grid=True).paths[0]
    assert np.abs(decoded(plain, ROUNDED) - WEIGHTS[ROUNDED]).max() > 1e-3
    np.testing.assert_array_equal(decoded(plain, ANY), decoded(kept, ANY))


def test_types_set_by_hand_go_first(model: Path, tmp_path: Path) -> None:
    types = PlanOptions(overrides=parse_overrides(["ffn_gate=Q5_K"]))
    with plan_run(model, tmp_path / "o.gguf", "Q8_0", QuantizeOptions(types=types, keep_grid=True)) as run:
        found = {tensor.name: tensor.target_type.name for tensor in run.preparation.plan.tensors}
    assert (found[EXACT], found[ROUNDED]) == ("Q5_K", "Q4_0")


def test_what_does_not_go_together(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadArgument, match="keep_grid=True and prune_layers"):
        quantize(model, tmp_path / "o.gguf", "Q8_0", keep_grid=True, types=PlanOptions(prune_layers=(0,)))
    assert main(["--size", "4bpw", "--losses", "x.json", "--keep-grid", str(model)])
    assert "--keep-grid is for a TYPE; a size chooses the types" in capsys.readouterr().err


class Int4:
    """Integers of 4 bits whose groups are scattered over the columns, as a checkpoint has them."""

    name, shape, type, by_rows, stored_as = SHIFTED, (ROWS, COLS), F32, True, "int4 in groups, act-order"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return WEIGHTS[SHIFTED][:, np.random.default_rng(4).permutation(COLS)][start:stop]


def test_integers_that_no_type_holds_are_told_with_their_errors() -> None:
    assert find_grid(Int4()) is None
    (note,) = lost_grids({SHIFTED: Int4()}, ())
    assert re.search(r"^1 tensor \(blk\.0\.ffn_down.*act-order in the checkpoint", note)
    assert re.search(r": Q4_0 [\d.]+ %, Q4_K [\d.]+ %, Q4_1 [\d.]+ %, Q8_0 0\.\d+ %$", note)
    assert not list(lost_grids({SHIFTED: Int4()}, {SHIFTED}))
