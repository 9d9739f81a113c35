"""Type checkers know the names of all types, and those that are none."""

from __future__ import annotations

from typing import get_args

import gguf_tools
from gguf_tools.argument_types import _flat
from quantize.plan.recipes import FILE_TYPES
from scripts.record.type_names import STUB, stub_text


def test_the_stub_lists_the_names_of_the_tables() -> None:
    assert STUB.read_text(encoding="utf-8") == stub_text(), "python -m scripts.record.type_names writes it"
    assert get_args(gguf_tools.FileType) == FILE_TYPES


def test_a_function_checks_names_by_itself_in_any_case() -> None:
    assert _flat(gguf_tools.TypeName) == [str]
    assert _flat(gguf_tools.OutType) == [gguf_tools.OutType]
