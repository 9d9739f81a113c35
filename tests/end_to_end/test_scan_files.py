"""`gguf-tools scan` on what this project writes."""

from __future__ import annotations

from pathlib import Path

import convert
from convert.architectures.deepseek2.family import RULES
from gguf_tools import open_gguf
from gguf_tools.scanning import as_text, scan
from gguf_tools.scanning.header import PLACES
from tests.support.trained_model import EXAMPLE


def test_what_this_project_writes_is_not_suspicious(tmp_path: Path) -> None:
    convert.convert(EXAMPLE, tmp_path / "tiny.gguf", outtype="bf16")
    with open_gguf(tmp_path / "tiny.gguf") as source:
        assert [as_text(finding) for finding in scan(source)] == []


def test_all_tensors_that_a_conversion_writes_have_a_place() -> None:
    outside, in_layer = PLACES["deepseek2"]
    for rule in RULES:
        for output in rule.outputs:
            name = output.name
            assert (name.removeprefix("blk.{layer}.") in in_layer) if "{" in name else (name in outside)
