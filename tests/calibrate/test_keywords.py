"""The functions that compute a model take the words of the command line as keywords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import calibrate

pytest.importorskip("torch")

import quality
from forward.options import ForwardChoices, ForwardOptions
from forward.text.tokens import Cut, CutChoices
from quality.options import EvaluateChoices


@pytest.mark.parametrize(
    ("choices", "options"),
    [
        (CutChoices, [Cut()]),
        (ForwardChoices, [ForwardOptions()]),
        (EvaluateChoices, [quality.EvaluateOptions(), Cut(), ForwardOptions()]),
    ],
)
def test_choices_are_all_fields(choices: Any, options: list[Any]) -> None:
    fields = [name for value in options for name in value.__dataclass_fields__]
    assert len(set(fields)) == len(fields)
    assert choices.__annotations__.keys() == set(fields)


def test_an_evaluation_takes_keywords(made: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    found = quality.evaluate(
        made("F32"), text, [made("Q8_0")], n_chunks=2, chunk_size=32, n_threads=1, work=str(tmp_path / "w")
    )
    assert (found.text.n_chunks, found.text.chunk_size) == (2, 32)


def test_unknown_keywords_are_refused_with_what_is_known(text: Path) -> None:
    with pytest.raises(TypeError, match=r"'chunks'; did you mean n_chunks\?; .*chunk_size, .*n_chunks"):
        quality.evaluate("base", text, ["quant"], chunks=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'ctx_size'.*expected .*chunk_size"):
        calibrate.sensitivity("base", text, "out", ctx_size=4)
