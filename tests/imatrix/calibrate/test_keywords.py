"""The functions that compute a model take the words of the command line as keywords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gguf_tools

pytest.importorskip("torch")

from gguf_tools.choices import with_choices
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut


@pytest.mark.parametrize(
    "options",
    [gguf_tools.EvaluateOptions(), gguf_tools.SensitivityOptions()],
    ids=["evaluate", "sensitivity"],
)
def test_choices_are_all_fields(options: Any) -> None:
    values = (options, Cut(), ForwardOptions())
    fields = [(name, getattr(value, name)) for value in values for name in value.__dataclass_fields__]
    assert len(dict(fields)) == len(fields)
    assert with_choices(dict(fields), options) == options


def test_an_evaluation_takes_keywords(made: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    found = gguf_tools.evaluate(
        made("F32"), text, [made("Q8_0")], n_chunks=2, chunk_size=32, n_threads=1, work=str(tmp_path / "w")
    )
    assert (found.alone.text.n_chunks, found.alone.text.chunk_size) == (2, 32)


def test_unknown_keywords_are_refused_with_what_is_known(text: Path) -> None:
    with pytest.raises(TypeError, match=r"'chunks'; did you mean n_chunks\?; .*chunk_size, .*n_chunks"):
        gguf_tools.evaluate("base", text, ["quant"], chunks=4)
    with pytest.raises(TypeError, match=r"'ctx_size'.*expected .*chunk_size"):
        gguf_tools.sensitivity("base", text, "out", ctx_size=4)
