"""Models whose padded plans llama-quantize recorded are those that padding makes.

tests/quantize/plan/test_any_architecture.py compares their plans, for every file type.
"""

from __future__ import annotations

import pytest

from quantize.padding.counterparts import whole_padding
from quantize.plan.plan import in_file_order
from tests.quantize.plan import any_architecture
from tests.quantize.plan.odd_models import odd_model


@pytest.mark.parametrize(
    ("model", "padded", "hidden"),
    [
        ("v2-lite", "deepseek-v2-lite-padded", False),
        ("glm-4.5-air", "glm-4.5-air-padded", False),
        ("gpt-oss-20b", "gpt-oss-20b-padded", True),
        ("qwen2.5-72b", "qwen2.5-72b-padded", False),
    ],
)
def test_llama_quantize_planned_what_padding_makes(model: str, padded: str, hidden: bool) -> None:
    metadata, tensors = odd_model(model)
    padding = whole_padding(metadata, tensors, hidden=hidden)
    assert tuple(in_file_order(padding.infos(tensors))) == any_architecture.tensors_of(padded)
    recorded = any_architecture.metadata_of(padded)
    assert {change.key: change.after for change in padding.changes}.items() <= recorded.items()
