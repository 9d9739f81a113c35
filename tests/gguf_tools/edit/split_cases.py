"""Models and command lines for splitting, the same for llama-gguf-split and for ours."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf_tools import TensorInfo, Value
from gguf_tools.format import ggml_types as types
from gguf_tools.format import keys
from tests.gguf_tools.sample_files import METADATA, TENSORS, write_file

Contents = tuple[dict[str, Value], tuple[TensorInfo, ...]]

_SIZED = (100_000, 99_999, 25_000, 25_002, 200_000, 124_999, 125_001, 7, 250_000, 1)
_STALE = {keys.SPLIT_NO: Value.u16(0), keys.SPLIT_TENSORS_COUNT: Value.i32(6), keys.SPLIT_COUNT: Value.u16(0)}

INPUTS: Mapping[str, Contents] = {
    "sample": (METADATA, TENSORS),
    # Sums that meet a limit of a million bytes exactly, and go beyond it only with padding.
    "sized": (METADATA, tuple(TensorInfo(f"t{i}", (n,), types.F32) for i, n in enumerate(_SIZED))),
    "many": (METADATA, tuple(TensorInfo(f"t{i}", (i % 9 + 1,), types.F16) for i in range(300))),
    # As llama-gguf-split merges: with the keys of a set, but the count of none.
    "stale": (_STALE | METADATA, TENSORS),
    "no tensors": (METADATA, ()),
}


@dataclass(frozen=True)
class Case:
    """source: one of INPUTS; the flags are ours, llama-gguf-split has `--split-` in front of max-."""

    source: str
    flags: tuple[str, ...] = ()

    @property
    def their_flags(self) -> list[str]:
        return [flag.replace("--max-", "--split-max-") for flag in self.flags]


CASES: Mapping[str, Case] = {
    "default": Case("sample"),
    "one each": Case("sample", ("--max-tensors", "1")),
    "fours": Case("sample", ("--max-tensors", "4")),
    "exactly all": Case("sample", ("--max-tensors", "6")),
    "empty first, by tensors": Case("sample", ("--no-tensor-first-split", "--max-tensors", "4")),
    "empty first, default": Case("sample", ("--no-tensor-first-split",)),
    "million": Case("sized", ("--max-size", "1M")),
    "empty first, by size": Case("sized", ("--no-tensor-first-split", "--max-size", "1M")),
    "size beyond all": Case("sized", ("--max-size", "1G")),
    "128 by default": Case("many"),
    "tens": Case("many", ("--max-tensors", "10")),
    "stale keys": Case("stale", ("--max-tensors", "3")),
    "no tensors": Case("no tensors"),
}


def make_input(case: Case, path: Path) -> None:
    """Write the file that a case splits."""
    write_file(path, *INPUTS[case.source])


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
