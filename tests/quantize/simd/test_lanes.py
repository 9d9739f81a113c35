"""Lanes compute what scalar C computes: each operation against numpy, bit for bit, on awkward numbers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite.binding import get_host_cpu_features
from numba.core.errors import TypingError

from quantize.simd.floats import IN_RANGE, clamp, nearest_float, nearest_int
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import (
    beside,
    float_tile,
    gather,
    int_tile,
    load,
    store,
    tail,
    tile_like,
    zero_like,
)
from quantize.simd.lanes import (
    LANES,
    absolute,
    all_lanes,
    any_lane,
    bits,
    from_bits,
    lane_numbers,
    maximum,
    minimum,
    select,
    shift_right_logical,
    splat,
    square_root,
    to_float,
    to_int,
)

Array = npt.NDArray[Any]
HAS_AVX2 = get_host_cpu_features().get("avx2", False)
REPOSITORY = Path(__file__).parents[3]

AWKWARD = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        1e-45,
        -1e-40,
        3.4e38,
        -3.4e38,
        8388609.0,
        np.inf,
        -np.inf,
        np.nan,
    ],
    np.float32,
)


def float_pairs() -> tuple[Array, Array]:
    """Return two float32 arrays: every pair of awkward numbers, and random ones of all magnitudes."""
    rng = np.random.default_rng(1)
    first, second = np.meshgrid(AWKWARD, AWKWARD)
    random = rng.standard_normal((2, 32 * LANES)) * 10.0 ** rng.uniform(-40, 38, (2, 32 * LANES))
    with np.errstate(over="ignore"):
        pairs = np.concatenate([[first.ravel(), second.ravel()], random], axis=1).astype(np.float32)
    return pairs[0], pairs[1]


def int_pairs() -> tuple[Array, Array]:
    pairs = np.random.default_rng(2).integers(-(2**31), 2**31, (2, 8 * LANES)).astype(np.int32)
    pairs[:, :4] = [[0, -1, 2**31 - 1, -(2**31)], [-1, 1, 1, -1]]
    return pairs[0], pairs[1]


def binary(operation: Callable[..., Any]) -> Any:
    """Return a kernel that applies an operation on two vectors to whole arrays."""

    @inlinable
    def run(a: Array, b: Array, out: Array) -> None:
        for i in range(0, out.size, LANES):
            store(out, i, operation(load(a, i), load(b, i)))

    return run


def assert_same(ours: Array, expected: Array) -> None:
    """Assert equal bits; all NaNs are one."""
    assert ours.dtype == expected.dtype
    if ours.dtype == np.float32:
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(expected))
        ours, expected = (np.where(np.isnan(x), 0, x).view(np.int32) for x in (ours, expected))
    np.testing.assert_array_equal(ours, expected)


FLOAT_OPERATIONS: dict[str, tuple[Any, Callable[[Array, Array], Array]]] = {
    "add": (inlinable(lambda a, b: a + b), np.add),
    "subtract": (inlinable(lambda a, b: a - b), np.subtract),
    "multiply": (inlinable(lambda a, b: a * b), np.multiply),
    "divide": (inlinable(lambda a, b: a / b), np.divide),
    "product and sum, not fused": (
        inlinable(lambda a, b: a * b + b),
        lambda a, b: (a * b).astype(np.float32) + b,
    ),
    "negative": (inlinable(lambda a, b: -a), lambda a, _b: -a),
    "absolute": (inlinable(lambda a, b: absolute(a)), lambda a, _b: np.abs(a)),
    "square root": (inlinable(lambda a, b: square_root(a)), lambda a, _b: np.sqrt(a)),
    "minimum": (inlinable(lambda a, b: minimum(a, b)), lambda a, b: np.where(a < b, a, b)),
    "maximum": (inlinable(lambda a, b: maximum(a, b)), lambda a, b: np.where(a > b, a, b)),
    "scalar on the left": (inlinable(lambda a, b: np.float32(3) / a), lambda a, _b: np.float32(3) / a),
    "scalar on the right": (inlinable(lambda a, b: a - np.float32(3)), lambda a, _b: a - np.float32(3)),
    "bits there and back": (inlinable(lambda a, b: from_bits(bits(a))), lambda a, _b: a),
}

ONE = np.float32(1)
TWO = np.float32(2)

COMPARISONS: dict[str, tuple[Any, Callable[[Array, Array], Array]]] = {
    "<": (inlinable(lambda a, b: select(a < b, splat(ONE), TWO)), np.less),
    "<=": (inlinable(lambda a, b: select(a <= b, splat(ONE), TWO)), np.less_equal),
    ">": (inlinable(lambda a, b: select(a > b, splat(ONE), TWO)), np.greater),
    ">=": (inlinable(lambda a, b: select(a >= b, splat(ONE), TWO)), np.greater_equal),
    "==": (inlinable(lambda a, b: select(a == b, splat(ONE), TWO)), np.equal),
    "!=": (inlinable(lambda a, b: select(a != b, splat(ONE), TWO)), np.not_equal),
    "& ~": (
        inlinable(lambda a, b: select((a < b) & ~(a < ONE), splat(ONE), TWO)),
        lambda a, b: (a < b) & ~(a < 1),
    ),
    "| ^": (
        inlinable(lambda a, b: select((a < b) | (b < ONE) ^ (a < ONE), splat(ONE), TWO)),
        lambda a, b: (a < b) | (b < 1) ^ (a < 1),
    ),
}

INT_OPERATIONS: dict[str, tuple[Any, Callable[[Array, Array], Array]]] = {
    "add": (inlinable(lambda a, b: a + b), np.add),
    "subtract": (inlinable(lambda a, b: a - b), np.subtract),
    "multiply": (inlinable(lambda a, b: a * b), np.multiply),
    "and, or, xor, not": (inlinable(lambda a, b: a & b | ~a ^ b), lambda a, b: a & b | ~a ^ b),
    "shift left": (inlinable(lambda a, b: a << 5), lambda a, _b: a << 5),
    "shift right": (inlinable(lambda a, b: a >> 5), lambda a, _b: a >> 5),
    "logical shift": (
        inlinable(lambda a, b: shift_right_logical(a, 5)),
        lambda a, _b: (a.view(np.uint32) >> 5).view(np.int32),
    ),
    "minimum": (inlinable(lambda a, b: minimum(a, b)), np.minimum),
    "maximum": (inlinable(lambda a, b: maximum(a, b)), np.maximum),
    "clamp": (inlinable(lambda a, b: clamp(a, -8, 7)), lambda a, _b: np.clip(a, -8, 7)),
    "compare and select": (inlinable(lambda a, b: select(a < b, a, 7)), lambda a, b: np.where(a < b, a, 7)),
    "negative": (inlinable(lambda a, b: -a), lambda a, _b: -a),
    "to float and back": (
        inlinable(lambda a, b: to_int(to_float(a >> 8))),
        lambda a, _b: a >> 8,
    ),
    "lane numbers": (inlinable(lambda a, b: lane_numbers() + a), lambda a, _b: a + np.arange(a.size) % LANES),
}


@pytest.mark.parametrize("name", FLOAT_OPERATIONS)
def test_float_operation(name: str) -> None:
    operation, expected = FLOAT_OPERATIONS[name]
    a, b = float_pairs()
    out = np.empty_like(a)
    binary(operation)(a, b, out)
    with np.errstate(all="ignore"):
        assert_same(out, expected(a, b))


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison(name: str) -> None:
    operation, expected = COMPARISONS[name]
    a, b = float_pairs()
    out = np.empty_like(a)
    binary(operation)(a, b, out)
    assert_same(out, np.where(expected(a, b), ONE, TWO))


@pytest.mark.parametrize("name", INT_OPERATIONS)
def test_int_operation(name: str) -> None:
    operation, expected = INT_OPERATIONS[name]
    a, b = int_pairs()
    out = np.empty_like(a)
    binary(operation)(a, b, out)
    with np.errstate(all="ignore"):
        assert_same(out, expected(a, b).astype(np.int32))


def test_float64_is_refused() -> None:
    a, b = float_pairs()
    with pytest.raises(TypingError):
        binary(inlinable(lambda a, b: a * 0.5))(a, b, a.copy())


def test_a_sum_runs_in_index_order() -> None:
    @inlinable
    def total(x: Array, out: Array) -> None:
        tile = float_tile(64)
        for i in range(64):
            tile[i] = splat(x[i])
        lanes = splat(np.float32(0))
        for i in range(64):
            lanes += tile[i]
        store(out, 0, lanes)

    x = (10.0 ** np.random.default_rng(3).uniform(-8, 8, 64)).astype(np.float32)
    expected = np.float32(0)
    for value in x:
        expected = np.float32(expected + value)
    out = np.empty(LANES, np.float32)
    total(x, out)
    assert_same(out, np.full(LANES, expected))


def test_any_and_all() -> None:
    @inlinable
    def count(x: Array, out: Array) -> None:
        positive = load(x, 0) > np.float32(0)
        out[0] = any_lane(positive)
        out[1] = all_lanes(positive)

    for n_positive, expected in ((0, [0, 0]), (1, [1, 0]), (LANES - 1, [1, 0]), (LANES, [1, 1])):
        out = np.zeros(2, np.int32)
        count(np.where(np.arange(LANES) < n_positive, 1, -1).astype(np.float32), out)
        assert out.tolist() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_gather(dtype: npt.DTypeLike) -> None:
    @inlinable
    def run(table: Array, index: Array, out: Array) -> None:
        store(out, 0, gather(table, load(index, 0)))

    rng = np.random.default_rng(4)
    table, index = rng.integers(0, 99, 300).astype(dtype), rng.integers(0, 300, LANES).astype(np.int32)
    out = np.empty(LANES, dtype)
    run(table, index, out)
    assert_same(out, table[index])


def test_a_tail_shares_its_tile() -> None:
    @inlinable
    def run(out: Array) -> None:
        tile = int_tile(4)
        for i in range(4):
            tile[i] = splat(i)
        last = tail(tile, 2)
        last[1] = last[0] * 10
        for i in range(4):
            store(out, i * LANES, tile[i])

    out = np.empty(4 * LANES, np.int32)
    run(out)
    assert out[::LANES].tolist() == [0, 1, 2, 20]


def test_beside_joins_stretches_of_a_tile() -> None:
    @inlinable
    def run(out: Array) -> None:
        tile = int_tile(8)
        for i in range(8):
            tile[i] = splat(i)
        pairs = beside(tile, 2)
        pairs[0] = pairs[0] * 10 + pairs[1]  # vectors 0 and 2 become 1 and 23
        fours = beside(beside(tile, 1), 4)
        copy = tile_like(fours, 1)
        copy[0] = fours[0] + zero_like(fours)  # vectors 0, 1, 4 and 5: 1, 1, 4, 5
        fours[1] = copy[0]  # go to vectors 1, 2, 5 and 6
        for i in range(8):
            store(out, i * LANES, tile[i])

    out = np.empty(8 * LANES, np.int32)
    run(out)
    assert (out.reshape(8, LANES) == out[::LANES, None]).all()
    assert out[::LANES].tolist() == [1, 1, 1, 3, 4, 4, 5, 7]


# ---- rounding


def reference_nearest_int(x: Array) -> Array:
    """Return ggml's nearest_int: the fraction of x + 1.5 * 2**23, less its middle."""
    with np.errstate(all="ignore"):
        return ((x + np.float32(12582912)).view(np.int32) & 0x007FFFFF) - 0x00400000


def test_nearest_int_is_that_of_ggml_also_out_of_range() -> None:
    a, b = float_pairs()
    a = np.where(np.isnan(a), np.float32(np.nan), a)
    out = np.empty(a.size, np.int32)
    binary(inlinable(lambda a, b: nearest_int(a)))(a, b, out)
    assert_same(out, reference_nearest_int(a))


def test_nearest_float_is_nearest_int_where_it_may_be_used() -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate(
        [rng.uniform(-40, 40, 4096), np.arange(-40, 40, 0.5), rng.uniform(-1, 1, 96) * IN_RANGE]
    )
    x = x.astype(np.float32)
    out = np.empty_like(x)
    binary(inlinable(lambda a, b: nearest_float(a, -32, 31)))(x, x, out)
    np.testing.assert_array_equal(out, np.clip(reference_nearest_int(x), -32, 31))


# ---- the code LLVM makes of it

KERNEL = """
import numpy as np
from quantize.formats import get_format
from quantize.formats.k_quants import affine
from quantize.importances.weighting import ColumnWeights
rows = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
blocks = get_format("Q4_K").encode(rows, ColumnWeights(np.ones(256, np.float32)))
stats = affine._quantize_weighted_q4_k.stats
print(blocks.tobytes().hex(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@dataclass(frozen=True)
class Installed:
    """A copy of the packages, and the folder of its compiled kernels."""

    site: Path
    cache: Path

    def run(self, **environment: str) -> list[str]:
        """Return what KERNEL prints in a process of its own: its bytes, cache hits and misses."""
        run = subprocess.run(
            [sys.executable, "-c", KERNEL],
            env={**os.environ, "NUMBA_CACHE_DIR": str(self.cache), **environment},
            cwd=self.site,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    site = tmp_path_factory.mktemp("site")
    for package in ("gguf_tools", "quantize"):
        shutil.copytree(REPOSITORY / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    return Installed(site, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def first_run(installed: Installed) -> list[str]:
    """Return what the run that filled the cache printed."""
    return installed.run()


def test_a_kernel_is_loaded_from_the_cache_by_another_process(
    installed: Installed, first_run: list[str]
) -> None:
    compiled, *counts = first_run
    assert counts == ["0", "1"]
    assert installed.run() == [compiled, "1", "0"]


def test_an_upgrade_that_leaves_the_kernels_alone_compiles_nothing(
    installed: Installed, first_run: list[str]
) -> None:
    init = installed.site / "gguf_tools" / "__init__.py"
    before = init.read_text()
    init.write_text(re.sub(r'__version__ = "[^"]*"', '__version__ = "99.0"', before))
    assert init.read_text() != before
    for source in installed.site.rglob("*.py"):
        os.utime(source, (1, 1))
    assert installed.run()[1:] == ["1", "0"]


@pytest.mark.slow
def test_a_change_of_what_a_kernel_is_made_of_makes_it_stale(
    installed: Installed, first_run: list[str]
) -> None:
    lanes = installed.site / "quantize" / "simd" / "lanes.py"
    before = lanes.read_text()
    try:
        lanes.write_text(before + "\n# changed\n")
        assert installed.run()[1:] == ["0", "1"]
    finally:
        lanes.write_text(before)


INSTRUCTION_SETS = [
    "",
    pytest.param(
        "+fma,+avx2", marks=[pytest.mark.slow, pytest.mark.skipif(not HAS_AVX2, reason="needs AVX2")]
    ),
]


@pytest.mark.parametrize("features", INSTRUCTION_SETS)
def test_bytes_do_not_depend_on_the_instruction_set(
    installed: Installed, first_run: list[str], features: str
) -> None:
    other = installed.run(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=features)
    assert other == [first_run[0], "0", "1"]


def test_no_instruction_is_free_to_reassociate_or_fuse() -> None:
    a, b = float_pairs()
    run = binary(inlinable(lambda a, b: (a * b + b - a) / b))
    run(a, b, a.copy())
    (code,) = run.inspect_llvm().values()
    found = re.findall(r"\b(f(?:add|sub|mul|div)\b[^%<]*)<", code)
    assert sorted({" ".join(words.split()) for words in found}) == ["fadd", "fdiv", "fmul", "fsub"]
