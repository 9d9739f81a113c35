"""The help of every command, in narrow and wide terminals: lists stay lists, and examples can be pasted."""

from __future__ import annotations

import re
import shlex

import pytest

from gguf_tools.commands.main import parsers
from gguf_tools.commands.roof import COMMANDS
from quantize.plan.recipes import ALIASES, FILE_TYPES

WIDTHS = (60, 80, 120)

LISTS = {
    "quantize": [*sorted({*FILE_TYPES} - {*ALIASES}), "file_type: Q4_K_M", "tensor-type:", "fallback:"],
    "convert-hf-to-gguf": ["split", "both", "none"],
    "evaluate": [
        "PPL", "ln ratio", "KLD", "same top", "flips", "RMS dp", "drift", "--keep DIR",
        "--kl-divergence-base FILE",
    ],
    "gguf-tools scan": ["note", "warning", "bad"],
    "gguf-tools audit": ["bad", "warning", "note"],
    "gguf-tools mla-layout": ["split", "both", "none"],
}  # fmt: skip
"""What lines begin with in the lists of a command's help."""

EXAMPLES = {
    "quantize": 13, "quantize lint": 4, "convert-hf-to-gguf": 9, "imatrix": 10, "imatrix show": 1,
    "imatrix convert": 2, "imatrix merge": 1, "imatrix stats": 2, "imatrix check": 1, "imatrix repair": 1,
    "evaluate": 7, "sensitivity": 2, "gguf-tools": 26, "gguf-tools clean": 2,
    "gguf-tools show": 3, "gguf-tools diff": 2,
    "gguf-tools verify": 3, "gguf-tools hash": 2, "gguf-tools scan": 2,
    "gguf-tools audit": 5, "gguf-tools rederive": 4, "gguf-tools attest": 2,
    "gguf-tools refine": 2, "gguf-tools set": 3,
    "gguf-tools remove-key": 2, "gguf-tools rename": 3, "gguf-tools split": 2, "gguf-tools merge": 1,
    "gguf-tools mla-layout": 3, "gguf-tools repack": 4, "gguf-tools card": 3, "gguf-tools cook": 3,
    "gguf-tools upload": 2, "gguf-tools checkpoint": 2, "gguf-tools completion": 2, "gguf-tools text": 3,
}  # fmt: skip
"""How many examples the help of each command has."""


EXAMPLES |= {command.prog: EXAMPLES[command.alone] for command in COMMANDS}
EXAMPLES |= {f"gguf-tools {name}": count for name, count in EXAMPLES.items() if name.startswith("imatrix ")}

PARSERS = parsers()
ALL = pytest.mark.parametrize("prog", PARSERS)


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def examples_of(text: str) -> list[str]:
    """Return the lines of the examples in a text, commands and comments."""
    block = re.search(r"^examples:\n((?:  .*\n?)+)", text, re.MULTILINE)
    return [] if block is None else block[1].splitlines()


def commands_of(prog: str) -> list[str]:
    """Return the examples of a command as they are written, without what they are for."""
    lines = examples_of(PARSERS[prog].epilog or "")
    return [re.split(r"\s{2,}", line.strip())[0] for line in lines]


def test_every_command_is_known() -> None:
    assert set(PARSERS) == set(EXAMPLES)


@ALL
def test_examples_can_be_pasted(prog: str, width: int) -> None:
    shown = "\n".join(examples_of(PARSERS[prog].format_help()))
    whole = re.sub(r" \\\n +", " ", shown)
    pasted = [shlex.split(line, comments=True) for line in whole.splitlines()]
    assert [words for words in pasted if words] == [shlex.split(command) for command in commands_of(prog)]
    assert len(commands_of(prog)) == EXAMPLES[prog]


@pytest.mark.parametrize("prog", LISTS)
def test_lists_have_a_line_for_each_item(prog: str, width: int) -> None:
    lines = PARSERS[prog].format_help().splitlines()
    for item in LISTS[prog]:
        assert any(re.match(rf" {{2,4}}{re.escape(item)}(\s|$)", line) for line in lines), item


@ALL
def test_no_line_is_wider_than_the_terminal(prog: str, width: int) -> None:
    """A line may stick out if it is a single word, such as a rule that is quoted."""
    for line in PARSERS[prog].format_help().splitlines():
        assert len(line) <= width or " " not in line.strip().removesuffix(" \\"), line


@ALL
def test_no_word_is_broken(prog: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = PARSERS[prog].format_help()
    monkeypatch.setenv("COLUMNS", "1000")
    words = set(PARSERS[prog].format_help().split())
    assert {word for word in shown.split() if word not in words} <= {"\\", "#"}
