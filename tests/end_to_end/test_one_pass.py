"""From a folder to a quantized file in one pass: the same bytes as converting to F32 and quantizing that.

Only provenance differs: F32 and BF16 are different sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.quantize
import imatrix
import quantize
from gguf_tools import open_gguf
from tests.end_to_end.conftest import GOLDEN
from tests.support.checkpoints import micro_checkpoint, shard, to_fp8, to_older_spelling
from tests.support.tokenizer_files import copy_tokenizer

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q2_K", "Q3_K_L", "Q5_0", "Q8_0", "BF16"])
def test_one_pass_equals_two(
    file_type: str, tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    data = imatrix.load(MATRIX)
    quantize.quantize(tiny_gguf("f32"), tmp_path / "two.gguf", file_type, importances=data, provenance=False)
    convert.convert(tiny_folder, tmp_path / "one.gguf", outtype=file_type, importances=data, provenance=False)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


SOURCES: dict[str, Callable[[Path], Path]] = {
    "v3 in FP8": lambda folder: to_fp8(micro_checkpoint(folder, "v3", vocab_size=4096)),
    "v3 sharded": lambda folder: shard(micro_checkpoint(folder, "v3", vocab_size=4096)),
    "v2 in F16": lambda folder: to_older_spelling(
        micro_checkpoint(folder, "v2", vocab_size=4096, dtype=np.float16)
    ),
    "v2 in F32": lambda folder: micro_checkpoint(folder, "v2", vocab_size=4096, dtype=np.float32),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mla", ["split", "both", "none"])
def test_one_pass_from_every_source_and_layout(source: str, mla: str, tmp_path: Path) -> None:
    folder = copy_tokenizer("tiny", SOURCES[source](tmp_path / "hf"))
    convert.convert(folder, tmp_path / "f32.gguf", outtype="f32", mla=mla)
    quantize.quantize(tmp_path / "f32.gguf", tmp_path / "two.gguf", "Q4_0", provenance=False)
    convert.convert(folder, tmp_path / "one.gguf", outtype="Q4_0", mla=mla, provenance=False)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_the_commands_with_options_by_hand(
    tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    words = [
        "--imatrix",
        str(MATRIX),
        "--tensor-type",
        "attn_v_b=Q8_0",
        "--leave-output-tensor",
        "--no-provenance",
    ]
    two, one, folder = tmp_path / "two.gguf", tmp_path / "one.gguf", tmp_path / "folder.gguf"
    assert gguf_tools.commands.quantize.main([*words, str(tiny_gguf("f32")), str(two), "Q3_K_M"]) == 0
    assert (
        gguf_tools.commands.convert.main(
            [*words, str(tiny_folder), "--outtype", "q3_k_m", "--outfile", str(one)]
        )
        == 0
    )
    assert gguf_tools.commands.quantize.main([*words, str(tiny_folder), str(folder), "Q3_K_M"]) == 0
    assert one.read_bytes() == two.read_bytes() == folder.read_bytes()


def test_in_parts(tiny_folder: Path, tmp_path: Path) -> None:
    whole = convert.convert(tiny_folder, tmp_path / "whole.gguf", outtype="Q4_K_M")
    parts = convert.convert(tiny_folder, tmp_path / "parts.gguf", outtype="Q4_K_M", split_max_tensors=20)
    assert len(parts.paths) == 3
    with open_gguf(parts.paths[0]) as split, open_gguf(whole.paths[0]) as file:
        assert split.metadata == file.metadata
        assert all((split.raw(name) == file.raw(name)).all() for name in file.tensors)


def test_the_converter_s_plan_and_outcome(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sums alone, as JSON, and with the older file that a run could reuse."""
    words = [str(tiny_folder), "--outfile", str(tmp_path / "m.gguf"), "--outtype", "Q8_0"]
    assert gguf_tools.commands.convert.main([*words, "--dry-run", "--summary"]) == 0
    summary = capsys.readouterr().out.splitlines()
    assert gguf_tools.commands.convert.main([*words, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert gguf_tools.commands.convert.main([*words, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["paths"] == [str(tmp_path / "m.gguf")]
    assert {key: done[key] for key in planned} == planned
    assert any(f"({planned['total_bytes']:,} bytes)" in line for line in summary)
    assert len(summary) < 10
    older = ["--dry-run", "--summary", "--reuse", str(tmp_path / "m.gguf")]
    assert gguf_tools.commands.convert.main([*words, *older]) == 0
    assert "m.gguf may serve 52 of 52 tensors" in capsys.readouterr().out
    older[-1] = str(tmp_path / "none.gguf")
    assert gguf_tools.commands.convert.main([*words, *older]) == 1
    assert gguf_tools.commands.convert.main([*words, "--summary"]) == 2


def test_dry_run_shows_stored_types_and_what_would_stop_a_run(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_folder), "--outfile", str(tmp_path / "m.gguf"), "--dry-run"]
    assert gguf_tools.commands.convert.main([*words, "--outtype", "Q4_K_M"]) == 0
    assert "BF16 -> Q4_K" in capsys.readouterr().out
    assert gguf_tools.commands.convert.main([*words, "--outtype", "Q2_K_S"]) == 0
    assert "importance matrix" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["--pure", "--outtype", "bf16"], ["--outtype", "Q9_X"], ["--imatrix", str(MATRIX)]]
)
def test_options_that_make_no_sense(words: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    assert gguf_tools.commands.convert.main(
        [*words, str(tiny_folder), "--outfile", str(tmp_path / "m.gguf")]
    ) in (1, 2)
    assert list(tmp_path.iterdir()) == []
