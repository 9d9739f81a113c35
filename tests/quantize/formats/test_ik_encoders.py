"""Encoders of ik_llama.cpp's own types: what they lose, and what they refuse."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools.errors import BadWeights
from quantize.formats import get_format
from quantize.formats.codecs import CODECS
from quantize.formats.ik.levels import iq4_kss
from quantize.formats.ik.levels.levels import (
    LEVEL_PAIRS,
    LEVELS_2,
    LEVELS_3,
    LEVELS_4,
    LEVELS_5,
    LEVELS_6,
    cut,
)
from tests.naive.ik_scales import EvenSearch, LevelSearch, PairSearch, ScaleSearch
from tests.quantize.codecs import OF_IK, decode, encode
from tests.support import samples

GOLDEN = Path(__file__).parents[2] / "golden"
LEVELS = {
    "IQ2_K": LEVELS_2,
    "IQ2_KS": LEVELS_2,
    "IQ3_K": LEVELS_3,
    "IQ3_KS": LEVELS_3,
    "IQ4_K": LEVELS_4,
    "IQ4_KS": LEVELS_4,
    "IQ5_K": LEVELS_5,
    "IQ5_KS": LEVELS_5,
    "IQ6_K": LEVELS_6,
}
"""Both sets of levels of the types that take the nearest one."""

NOT_TRELLIS = [name for name in OF_IK if not name.endswith("_KT")]

every_type = pytest.mark.parametrize("name", NOT_TRELLIS)


@cache
def vectors() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the recorded rows and their importances."""
    with np.load(GOLDEN / "ik" / "vectors.npz") as file:
        return file["x"], file["importance"]


def lost(
    rows: npt.NDArray[np.float32], decoded: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | float
) -> float:
    """Return the weighted squared error as a share of the weighted squares."""
    exact = rows.astype(np.float64)
    costs = np.broadcast_to(weights, rows.shape).astype(np.float64)
    return float((costs * (exact - decoded) ** 2).sum() / (costs * exact**2).sum())


@pytest.mark.parametrize("name", OF_IK)
def test_no_more_is_lost_than_by_ik_llama_cpp(name: str) -> None:
    rows, weights = vectors()
    recorded = json.loads((GOLDEN / "ik_types.json").read_text())[name]["weighted_nmse"]
    assert lost(rows, decode(name, encode(name, rows, weights)), weights) <= recorded


@pytest.mark.parametrize("name", [name for name in NOT_TRELLIS if name != "Q8_KV"])
def test_importances_decide_what_is_kept(name: str) -> None:
    """In Q8_KV they move the scale by so little that either may win."""
    rows, weights = vectors()
    weighed = decode(name, encode(name, rows, weights))
    plain = decode(name, encode(name, rows, None))
    assert lost(rows, weighed, weights) < lost(rows, plain, weights)
    assert lost(rows, plain, 1) < lost(rows, weighed, 1)


def twin_of(name: str) -> ScaleSearch:
    search = getattr(import_module(CODECS[name].module, "quantize.formats"), f"_{name}_SEARCH")
    if name == "IQ4_KSS":
        return EvenSearch(search, cut(LEVELS_4[:16]), LEVELS_4, iq4_kss.SHIFT)
    if name == "IQ2_KL":
        return PairSearch(search, LEVEL_PAIRS.reshape(-1, 2))
    both = LEVELS[name]
    first = both[: len(both) // 2]
    return LevelSearch(search, cut(first), both, float(both[len(first)] - both[0]))


@pytest.mark.parametrize("name", [*LEVELS, "IQ4_KSS", "IQ2_KL"])
@pytest.mark.parametrize("kind", ["normal", "heavy_tailed", "sparse", "mixed_scales"])
def test_decoded_rows_equal_those_of_the_naive_twin(name: str, kind: str) -> None:
    twin = twin_of(name)
    rows = samples.rows(kind, (1, 256), seed=11)
    weights = samples.importances("random", 256)
    with np.errstate(all="ignore"):
        expected = twin.values(rows[0], (weights / weights.max()).astype(np.float32))
    np.testing.assert_array_equal(decode(name, encode(name, rows, weights))[0], expected)


@every_type
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-30, 3),
    kind=st.sampled_from(list(samples.IMPORTANCES)),
)
@settings(deadline=None, max_examples=8)
def test_any_rows_lose_little_and_none_depends_on_the_others(
    name: str, seed: int, exponent: int, kind: str
) -> None:
    n_cols = 2 * max(get_format(name).type.block_elems, 32)
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((19, n_cols)) * 10.0 ** (exponent / 2)).astype(np.float32)
    weights = samples.importances(kind, n_cols, seed=seed)
    data = encode(name, rows, weights)
    decoded = decode(name, data)
    assert np.isfinite(decoded).all()
    limits = CODECS[name].error_range
    allowed = limits.relative**2 * (weights * rows.astype(np.float64) ** 2).sum()
    allowed += limits.absolute**2 * weights.sum(dtype=np.float64) * len(rows)
    assert (weights * (rows.astype(np.float64) - decoded) ** 2).sum() <= 1.2 * allowed
    pick = int(rng.integers(19))
    np.testing.assert_array_equal(encode(name, rows[pick : pick + 1], weights)[0], data[pick])


@every_type
@pytest.mark.parametrize("kind", ["zero", "denormal", "least_normal", "single_outlier", "constant"])
def test_rows_of_any_size_are_encoded(name: str, kind: str) -> None:
    rows = samples.rows(kind, (17, 2 * max(get_format(name).type.block_elems, 32)))
    decoded = decode(name, encode(name, rows, None))
    assert np.isfinite(decoded).all()
    if kind == "zero":
        assert not decoded.any()


@every_type
def test_weights_that_are_too_large_are_refused_in_one_line(name: str) -> None:
    rows = samples.rows("normal", (17, 2 * max(get_format(name).type.block_elems, 32)))
    rows[5, 40] = 3e38
    with pytest.raises(BadWeights, match=rf"{name}: row 5, columns \d+ to \d+: a weight beyond 8.51e\+37$"):
        encode(name, rows, None)
    rows[5, 40] = 8e37
    if CODECS[name].error_range.absolute > 2.0**-60:
        with pytest.raises(BadWeights, match=rf"{name}: row 5: weights are so large .* no float16"):
            encode(name, rows, None)
    else:
        assert np.isfinite(decode(name, encode(name, rows, None))).all()


@every_type
def test_importances_of_zero_leave_a_sub_block_its_weights(name: str) -> None:
    n_cols = max(get_format(name).type.block_elems, 64)
    rows = samples.rows("normal", (3, n_cols))
    weights = np.ones(n_cols, np.float32)
    weights[:32] = 0
    decoded = decode(name, encode(name, rows, weights))
    assert lost(rows[:, :32], decoded[:, :32], 1) < (2 * CODECS[name].error_range.relative) ** 2
