"""A front's keyword arguments are the fields of its options: each is typed once and none is forgotten."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import quantize
from quantize.mla_layout.pipeline import LayoutChoices, LayoutOptions
from quantize.options import QuantizeOptions
from quantize.repack.pipeline import RepackChoices
from quantize.repack.rules import RepackOptions
from quantize.run_options import QuantizeChoices, RunOptions, merge_choices


@pytest.mark.parametrize(
    ("choices", "options"),
    [(QuantizeChoices, QuantizeOptions), (LayoutChoices, LayoutOptions), (RepackChoices, RepackOptions)],
)
def test_choices_are_the_fields_of_both(choices: Any, options: Any) -> None:
    own = {field.name: field.type for field in fields(options)}
    shared = {field.name: field.type for field in fields(RunOptions)}
    assert not own.keys() & shared.keys()
    declared = {name: hint.__forward_arg__ for name, hint in choices.__annotations__.items()}
    assert declared == own | shared


def test_choices_replace_fields() -> None:
    options, run = merge_choices(
        QuantizeOptions(keep_split=True), RunOptions(n_threads=3), {"provenance": False, "verify": True}
    )
    assert options == QuantizeOptions(keep_split=True, provenance=False)
    assert run == RunOptions(n_threads=3, verify=True)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'threads'; did you mean n_threads\?; expected .*, n_threads, "):
        quantize.quantize("in.gguf", "out.gguf", "Q8_0", threads=3)  # type: ignore[call-arg]
