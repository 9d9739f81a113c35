"""Settings of the whole process that several hold at once."""

from __future__ import annotations

import pytest

from gguf_tools.system import settings
from gguf_tools.system.settings import ONE_BLAS_THREAD, shared_setting


def test_the_last_who_leaves_restores_what_was_before() -> None:
    now = ["before"]
    setting = shared_setting(lambda: now[-1], now.append, "held")
    for _ in range(2):  # two who enter, and leave in the order in which they came
        setting.__enter__()
        assert now[-1] == "held"
    setting.__exit__()
    assert now == ["before", "held"]
    setting.__exit__()
    assert now == ["before", "held", "before"]


def test_blas_has_one_thread_for_the_time_being() -> None:
    get, put = settings._blas("get"), settings._blas("set")
    before = get()
    put(3)
    try:
        if get() != 3:
            pytest.skip("numpy has another library than OpenBLAS here")
        with ONE_BLAS_THREAD:
            assert get() == 1
        assert get() == 3
    finally:
        put(before)
