"""JSON files beside weights: how much memory what they say may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.checkpoint.json_files import read_json_object
from convert.tokenizer.tokenizer import MAX_MEMORY
from gguf_tools.errors import BadConfig

N_MERGES = 446_189
"""Pairs of merges in gpt-oss's tokenizer.json, which has 27,868,174 bytes."""


def test_a_tokenizer_may_be_as_large_as_gpt_oss_s(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    pair = b'["\\u0120' + b"a" * 25 + b'", "' + b"b" * 21 + b'"], '
    path.write_bytes(b'{"merges": [' + N_MERGES * pair + b"[]]}")
    assert 27_000_000 < path.stat().st_size < 28_000_000
    with pytest.raises(BadConfig, match="would take more than 160 MiB of memory"):
        read_json_object(path)
    assert len(read_json_object(path, most_memory=MAX_MEMORY)["merges"]) == N_MERGES + 1
