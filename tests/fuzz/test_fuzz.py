"""A few hundred nearly valid inputs for every reader; scripts/check/fuzz_readers.py reads a million."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_tools.errors import ToolkitError
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_what_inputs_are_made_of_is_valid(name: str) -> None:
    TARGETS[name].warm_up()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_nearly_valid_input_is_read_or_refused(name: str, rng: random.Random) -> None:
    data = TARGETS[name].make(rng)
    with contextlib.suppress(ToolkitError):
        TARGETS[name].one_input(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    with contextlib.suppress(ToolkitError):
        TARGETS[name].one_input(data)


@pytest.mark.parametrize("name", TARGETS)
def test_some_inputs_are_read_and_some_are_refused(name: str) -> None:
    """Inputs that all fail the first check would show nothing."""
    n_read = 0
    for seed in range(100):
        with contextlib.suppress(ToolkitError):
            TARGETS[name].one_input(TARGETS[name].make(random.Random(seed)))
            n_read += 1
    assert n_read >= 3
