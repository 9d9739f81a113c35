"""Options as keyword arguments of a front."""

from __future__ import annotations

import pytest

import quantize
from gguf_tools.choices import with_choices
from quantize.options import QuantizeOptions
from quantize.run_options import RunOptions


def test_choices_replace_fields() -> None:
    options, run = with_choices(
        {"provenance": False, "verify": True}, QuantizeOptions(keep_split=True), RunOptions(n_threads=3)
    )
    assert options == QuantizeOptions(keep_split=True, provenance=False)
    assert run == RunOptions(n_threads=3, verify=True)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'threads'; did you mean n_threads\?; expected .*, n_threads, "):
        quantize.quantize("in.gguf", "out.gguf", "Q8_0", threads=3)  # type: ignore[call-arg]
