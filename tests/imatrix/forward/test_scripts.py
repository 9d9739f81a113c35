"""Texts in one script are told."""

from __future__ import annotations

import pytest

from imatrix.texts.quality import script_findings

ENGLISH = "Rows that share statistics are a group: a matrix, one head's rows, one expert's. " * 20


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (ENGLISH, "Latin"),
        (ENGLISH + "çàéß", "Latin"),
        ("Матрица хранится как строки блоков.", "Cyrillic"),
        ("矩阵以块行的形式存储。", "Cjk"),
        (ENGLISH + "Матрица хранится как строки блоков. 矩阵以块行的形式存储。", None),
        ("0123 456 +-*/", None),
        ("", None),
    ],
)
def test_a_text_in_one_script_is_told(text: str, script: str | None) -> None:
    found = [finding.text for finding in script_findings(text)]
    assert len(found) == (script is not None)
    assert script is None or f"letters are {script}:" in found[0]
