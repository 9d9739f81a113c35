"""Functions that become part of kernels."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from numba.core import typed_passes, untyped_passes

from quantize.formats import search
from quantize.simd.kernel import _PASSES_WITHOUT_EFFECT, Kernel

NAMED = "from quantize.formats import search; print(search.{}.py_func.__qualname__)"


def test_symbols_of_two_processes_differ() -> None:
    """Else a kernel from the cache could be given a function that another process made in the same way."""
    name = next(name for name, value in vars(search).items() if type(value).__name__ == "InlinedFunction")
    here = getattr(search, name).py_func.__qualname__
    there = subprocess.run(
        [sys.executable, "-c", NAMED.format(name)], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert here.partition(".")[0] == there.partition(".")[0] == name
    assert here != there


def test_passes_that_are_left_out_are_numba_s() -> None:
    passes = [*vars(typed_passes).values(), *vars(untyped_passes).values()]
    assert {getattr(each, "_name", None) for each in passes} >= _PASSES_WITHOUT_EFFECT


def test_the_collector_goes_on_after_compiling() -> None:
    """It stands still meanwhile; a caller who has stopped it finds it stopped."""
    seen: list[bool] = []

    class Watched(Kernel):
        def get_call_template(self, *args: object) -> object:
            seen.append(gc.isenabled())
            return super().get_call_template(*args)

    called = Watched(lambda a: a + 1, targetoptions={"nopython": True})
    caller = Kernel(lambda a: called(a) + 1, targetoptions={"nopython": True})
    assert caller(1) == 3
    assert gc.isenabled()
    assert seen
    assert not any(seen)
    gc.disable()
    try:
        assert caller(1.5) == 3.5
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_function_that_cannot_be_compiled_leaves_the_collector_on() -> None:
    with pytest.raises(Exception, match="Failed in nopython mode"):
        Kernel(lambda a: a.nothing, targetoptions={"nopython": True})(1)
    assert gc.isenabled()
