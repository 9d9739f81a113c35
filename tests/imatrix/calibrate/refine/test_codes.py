"""Codes on their way: where they start, which of them move, and what becomes of a layer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gguf_tools.commands.main import main
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.sources import DescribedTensor
from quantize.formats import get_decoder, get_format
from quantize.formats.base import Bytes, Floats32
from quantize.importances.weighting import ColumnWeights

pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.calibrate.refine import layers
from imatrix.calibrate.refine.cells import _GRIDS as GRIDS
from imatrix.calibrate.refine.cells import _LEVELS as LEVELS
from imatrix.calibrate.refine.cells import GridCells, LevelCells, has_cells
from imatrix.calibrate.refine.codes import MovingCodes, RecodedTensor
from imatrix.calibrate.refine.layers import KeptCodes, LayerByLayer, WeightGradients
from imatrix.calibrate.refine.pipeline import refine
from imatrix.forward.options import ForwardOptions
from imatrix.forward.run import ForwardPass
from quantize.rounding.grids.rounders import GridRounder

N_ROWS, FORWARD = 3, ForwardOptions(n_threads=1)


class Stored(DescribedTensor):
    """Rows in memory as a tensor."""

    def __init__(self, info: TensorInfo, rows: Bytes) -> None:
        super().__init__(info)
        self._rows = rows

    def raw_rows(self, start: int, stop: int) -> Bytes:
        return self._rows[start:stop].reshape(-1)

    def read_rows(self, start: int, stop: int) -> Floats32:
        return get_decoder(self.type)(self._rows[start:stop], self.shape[-1])


def tensor_of(name: str) -> tuple[Stored, Stored]:
    """Make a tensor of a type, and the floats that it was made of."""
    type_ = by_name(name)
    n_cols = 2 * type_.block_elems
    weights = np.random.default_rng(0).standard_normal((N_ROWS, n_cols)).astype(np.float32)
    rows = get_format(name).encode(weights, ColumnWeights(np.ones(n_cols, np.float32)))
    shape = (N_ROWS, n_cols)
    original = Stored(TensorInfo("a", shape, by_name("F32")), weights.view(np.uint8))
    return Stored(TensorInfo("a", shape, type_), np.asarray(rows).reshape(N_ROWS, -1)), original


of_all_types = pytest.mark.parametrize("name", sorted({*LEVELS, *GRIDS}))


def test_what_has_codes() -> None:
    names = ("Q2_K", "Q6_K", "IQ4_XS", "Q4_0", "MXFP4", "IQ1_S", "IQ2_XS", "IQ3_XXS")
    assert all(has_cells(by_name(name)) for name in names)
    assert not any(has_cells(by_name(name)) for name in ("F32", "BF16", "IQ1_KT"))


@of_all_types
def test_without_steps_bytes_are_those_of_the_file(name: str) -> None:
    tensor, original = tensor_of(name)
    moving = MovingCodes(tensor, original)
    before = moving.current().copy()
    np.testing.assert_array_equal(before, tensor.raw_rows(0, N_ROWS).reshape(N_ROWS, -1))
    moving.step(np.zeros(tensor.shape, np.float32), 0.01)
    np.testing.assert_array_equal(moving.current(), before)


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_weights_go_against_their_derivative(name: str) -> None:
    """Downhill of sum(s * w) is -s for each weight; in twenty steps of a tenth all move a level or more."""
    tensor, original = tensor_of(name)
    signs = np.random.default_rng(1).choice([-1, 1], tensor.shape).astype(np.float32)
    moving = MovingCodes(tensor, original)
    before = tensor.read_rows(0, N_ROWS)
    for _ in range(20):
        moving.step(signs, 0.1)
    moved = RecodedTensor(tensor, moving.current).read_rows(0, N_ROWS) - before
    assert np.all(moved * signs <= 0)
    layout = LEVELS[name]
    blocks = layout.read(tensor.raw_rows(0, N_ROWS).reshape(-1, tensor.type.block_bytes))
    slopes = np.repeat(layout.lines(blocks)[0], layout.sub_elems, axis=1)
    may_move = (blocks.codes > 0) & (blocks.codes < len(layout.levels) - 1) & (slopes != 0)
    assert np.all(moved.reshape(may_move.shape)[may_move] != 0)


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_points_of_grids_go_against_the_derivative(name: str) -> None:
    """Their weights can't all move the same way, but most do, and so does their sum."""
    tensor, original = tensor_of(name)
    signs = np.random.default_rng(1).choice([-1, 1], tensor.shape).astype(np.float32)
    moving = MovingCodes(tensor, original)
    before = tensor.read_rows(0, N_ROWS)
    for _ in range(20):
        moving.step(signs, 0.1)
    moved = (RecodedTensor(tensor, moving.current).read_rows(0, N_ROWS) - before) * signs
    assert (moved < 0).mean() > 3 * (moved > 0).mean()


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_the_nearest_point_is_found(name: str) -> None:
    tensor, _ = tensor_of(name)
    cells = GridCells(GRIDS[name], tensor.raw_rows(0, 1).reshape(-1, tensor.type.block_bytes))
    rng = np.random.default_rng(2)
    places = (rng.standard_normal(cells.shape) * cells.highest / 2).astype(np.float32)
    assert cells.take(places) is not None
    distances = np.square(places.reshape(-1, 8) - cells._points().reshape(-1, 8)).sum(axis=1)
    together = 4 if name == "IQ1_S" else 1  # octets that share a shift
    expected = nearest_distances(GRIDS[name], places.reshape(-1, 8), together)
    np.testing.assert_allclose(distances.reshape(-1, together).sum(axis=1), expected, rtol=1e-4)
    assert cells.take(places) is None


@of_all_types
def test_weights_start_as_near_to_the_original_as_their_cells_allow(name: str) -> None:
    """Every other 32 weights of the original are other ones, so that cells are not where they are wanted."""
    tensor, original = tensor_of(name)
    weights = original.read_rows(0, N_ROWS).view(np.float32).reshape(N_ROWS, -1, 32).copy()
    weights[:, 1::2] = np.random.default_rng(3).standard_normal(weights[:, 1::2].shape)
    info = TensorInfo("a", tensor.shape, by_name("F32"))
    moving = MovingCodes(tensor, Stored(info, weights.reshape(N_ROWS, -1).view(np.uint8)))
    cells = moving._cells
    assert cells.take(moving._places) is None
    lows = 0.0 if isinstance(cells, GridCells) else cast(LevelCells, cells)._lows
    started = (moving._places * cells.slopes - lows).reshape(weights.shape)
    stored = tensor.read_rows(0, N_ROWS).reshape(weights.shape)
    before, after = np.square(stored - weights).sum(axis=2), np.square(started - weights).sum(axis=2)
    assert np.all(after <= before + 1e-6)
    assert after[:, ::2].sum() < 0.5 * before[:, ::2].sum()
    assert after[:, 1::2].sum() < before[:, 1::2].sum()


def nearest_distances(rounder: GridRounder, places: Floats32, together: int) -> Floats32:
    """Compute squared distances to the nearest point by trying all: a slow twin."""
    grid, values = rounder.grid, np.array(rounder.grid.values, np.float32)
    size = 8 // rounder.form.codes
    shifts = np.arange(size) * grid.code_bits
    points = values[grid.codes[:, None] >> shifts & (1 << grid.code_bits) - 1]
    if rounder.type.name.startswith("IQ1"):
        by_octet = [np.square(places[:, None] - points - shift).sum(axis=2) for shift in (0.125, -0.125)]
        by_shift = [each.min(axis=1).reshape(-1, together).sum(axis=1) for each in by_octet]
        return np.minimum(*by_shift)
    patterns = 1 - 2 * (np.arange(256)[:, None] >> np.arange(8) & 1)
    if rounder.type.name.endswith("XS") or rounder.type.name.endswith("XXS"):
        patterns = patterns[patterns.prod(axis=1) == 1]
    least = np.full(len(places), np.inf, np.float32)
    for pattern in patterns:
        groups = (places * pattern).reshape(len(places), -1, 1, size)
        least = np.minimum(least, np.square(groups - points).sum(axis=3).min(axis=2).sum(axis=1))
    return least


def test_what_lies_between_two_levels_moves_first() -> None:
    tensor, original = tensor_of("Q4_K")
    moving = MovingCodes(tensor, original)
    weights, before = original.read_rows(0, N_ROWS).view(np.float32), tensor.read_rows(0, N_ROWS)
    lost = weights.reshape(before.shape) - before
    moving.step(-np.sign(lost), 0.05)
    moved = RecodedTensor(tensor, moving.current).read_rows(0, N_ROWS) != before
    assert 0 < moved.mean() < 0.3
    assert np.abs(lost[moved]).mean() > 1.5 * np.abs(lost).mean()


@pytest.mark.slow
def test_a_file_with_moved_codes_diverges_less(made: Path, tmp_path: Path) -> None:
    inputs = made / "file.gguf", made / "base.gguf", made / "text.txt"
    choices = {"chunk_size": 64, "n_chunks": 24, "steps": 1, "rate": 1e-9, "forward": FORWARD}
    done = refine(*inputs, tmp_path / "out.gguf", passes=4, code_rate=0.02, **choices)
    assert done.before is not None
    assert done.after is not None
    assert done.after.value < 0.95 * done.before.value
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    n_changed = 0
    with open_gguf(made / "file.gguf") as before, open_gguf(tmp_path / "out.gguf") as after:
        for name, info in before.tensors.items():
            old, new = (file.raw(name).reshape(-1, info.type.block_bytes) for file in (before, after))
            is_other = not np.array_equal(old, new)
            assert not is_other or name.startswith("blk.")
            if is_other and info.type.name in LEVELS:
                read = LEVELS[info.type.name].read
                n_changed += not np.array_equal(read(old).codes, read(new).codes)
                np.testing.assert_array_equal(read(old).scales, read(new).scales)
    assert n_changed > 6


@pytest.mark.slow
def test_an_interrupted_run_makes_the_same_file(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = made / "file.gguf", made / "base.gguf", made / "text.txt"
    choices = {"chunk_size": 64, "n_chunks": 16, "steps": 2, "passes": 1, "forward": FORWARD}
    refine(*inputs, tmp_path / "whole.gguf", **choices)
    compute, n_calls = ForwardPass.compute, []

    def interrupted(self: ForwardPass, layer: int, observer: object) -> None:
        n_calls.append(layer)
        if len(n_calls) == 4:  # the file's pass through layer 1, whose codes are found
            raise KeyboardInterrupt
        compute(self, layer, observer)

    monkeypatch.setattr(ForwardPass, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refine(*inputs, tmp_path / "out.gguf", **choices)
    refine(*inputs, tmp_path / "out.gguf", **choices)
    assert n_calls == [0, 0, 1, 1, 1]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not list(tmp_path.glob("*.work"))


def test_codes_that_are_of_no_use_stay(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a rate at which codes fly about every layer gets worse, on the chunks held back too."""
    inputs = made / "file.gguf", made / "base.gguf", made / "text.txt"
    choices = {"chunk_size": 64, "n_chunks": 16, "steps": 1, "rate": 1e-9, "forward": FORWARD}
    tuned: list[tuple[float | None, dict[str, Bytes]]] = []
    tune = LayerByLayer._tune

    def noted(self: LayerByLayer, layer: int, rate: float | None) -> tuple[float | None, dict[str, Bytes]]:
        tuned.append(tune(self, layer, rate))
        return tuned[-1]

    monkeypatch.setattr(LayerByLayer, "_tune", noted)
    monkeypatch.setattr(
        LayerByLayer, "_try_rates", lambda self, layer, names: self._move(layer, names, self.rate)
    )
    refine(*inputs, tmp_path / "out.gguf", passes=1, code_rate=1.0, **choices)
    assert tuned == [(1.0, {}), (1.0, {})]


@pytest.mark.parametrize(("first", "n_tried"), [(0.01, 3), (0.03, 4), (0.09, 5), (0.001, 4), (0.1, 5)])
def test_the_best_of_rates_is_found(first: float, n_tried: int) -> None:
    """Errors have one minimum, at 0.01."""
    tried: list[tuple[float, bool]] = []

    def move(layer: int, names: object, rate: float, *, is_counted: bool = True) -> Any:
        tried.append((rate, is_counted))
        return SimpleNamespace(rate=rate, error=abs(np.log(rate / 0.01)))

    steps = cast(Any, SimpleNamespace(rate=first, _move=move))
    best = LayerByLayer._try_rates(steps, 0, ["a"])
    assert best.rate == pytest.approx(min((rate for rate, _ in tried), key=lambda r: abs(np.log(r / 0.01))))
    assert 0.01 / np.sqrt(3) <= best.rate <= 0.01 * np.sqrt(3)
    assert len(tried) == n_tried
    assert [is_counted for _, is_counted in tried] == [True] * 3 + [False] * (n_tried - 3)


def test_memory_decides_what_moves(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(layers, "_BYTES", 1 << 30)
    args = ["--base", str(made / "base.gguf"), "-f", str(made / "text.txt"), "-c", "64", "--chunks", "16"]
    args += ["-o", str(tmp_path / "out.gguf"), "--codes", "1", "--steps", "1", "-t", "1"]
    assert main(["refine", str(made / "file.gguf"), *args]) == 0
    assert "the codes of 14 tensors stay: more --memory is needed to move them" in capsys.readouterr().err


def test_threads_that_read_different_layers_get_their_own_codes() -> None:
    def arrays(layer: int) -> dict[str, np.ndarray]:
        time.sleep(1e-4)
        return {"a": np.full((1, 1), layer, np.uint8)}

    kept = KeptCodes(cast(Any, SimpleNamespace(arrays=arrays)))
    readers = [kept._reader(layer, "a") for layer in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: int(readers[number % 4]()[0, 0]), range(400)))
    assert found == [number % 4 for number in range(400)]


@pytest.mark.parametrize("n_blocks", [1, 3])
def test_derivatives_by_weights_are_summed_over_chunks(n_blocks: int) -> None:
    import torch

    rng = torch.Generator().manual_seed(0)
    x = torch.randn((7, 1, 4), generator=rng)
    gradient = torch.randn((7, n_blocks, 5), generator=rng)
    whole = WeightGradients(["a"])
    for part in (slice(0, 3), slice(3, 7)):
        each = whole.fresh()
        each.gradient("a", 0, n_blocks, x[part], gradient[part])
        each.gradient("b", 0, n_blocks, x[part], gradient[part])
        whole.merge(each)
    expected = np.einsum("tbr,tc->brc", gradient.numpy(), x[:, 0].numpy())
    assert list(whole.sums) == ["a"]
    np.testing.assert_allclose(whole.sums["a"].numpy(), expected, rtol=1e-5, atol=1e-6)
