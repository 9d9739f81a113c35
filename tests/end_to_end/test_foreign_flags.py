"""Flags of llama.cpp's tools: each of them works here, or is refused by name with what to use instead."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.imatrix
import gguf_tools.commands.quantize

RECORDED: dict[str, list[tuple[str, int]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "flags" / "llama.json").read_text()
)

OURS: dict[str, tuple[Callable[[], argparse.ArgumentParser], list[str]]] = {
    "llama-quantize": (gguf_tools.commands.quantize.make_parser, ["in.gguf", "out.gguf", "Q8_0"]),
    "llama-imatrix": (gguf_tools.commands.imatrix.make_parser, ["-m", "model", "-o", "out.gguf"]),
    "convert_hf_to_gguf.py": (gguf_tools.commands.convert.make_parser, ["folder"]),
}

VALUES = {"--output-format": "gguf", "--outtype": "f16", "--split-max-size": "1G"}
"""Values of flags that a 1 is none for."""


@pytest.mark.parametrize("program", OURS)
def test_every_flag_is_known(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_parser, words = OURS[program]
    parser = make_parser()
    flags = RECORDED[program]
    assert len(flags) > 10
    outcomes = {flag: _outcome(parser, flag, n_values, words, program, capsys) for flag, n_values in flags}
    assert {flag: outcome for flag, outcome in outcomes.items() if outcome} == {}


def _outcome(
    parser: argparse.ArgumentParser, flag: str, n_values: int, words: list[str], program: str,
    capsys: pytest.CaptureFixture[str],
) -> str:  # fmt: skip
    """Return what is wrong with a flag in front of `words`, or behind them if no value follows it."""
    values = [VALUES.get(flag, "1")] * n_values
    try:
        args = parser.parse_args([flag, *values, *words] if n_values else [*words, flag])
    except SystemExit as exit_:
        said = capsys.readouterr().err
        is_refused = exit_.code == 2 and f"{flag} of {program}: " in said and said.count("\n") == 1
        return "" if exit_.code == 0 or is_refused else said
    taken = [*vars(args).get("words", ()), str(vars(args).get("output")), vars(args).get("model")]
    return "" if words[-1] in taken else "has taken one of the words"
