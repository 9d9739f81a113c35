"""The commands that have two names: one of their own, and one under `gguf-tools`.

Each is a module with `make_parser(prog)` and `main(argv, prog)`. A module is imported when its command is
called, so a command starts as fast under the roof as alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gguf_tools.lazy import late

ROOF = "gguf-tools"


@dataclass(frozen=True)
class Command:
    """A command with two names.

    alone   the words that call it by its own name
    name    the word that calls it under the roof
    module  where it is
    text    its line in the list of commands
    """

    alone: str
    name: str
    module: str
    text: str

    @property
    def prog(self) -> str:
        """The words that call it under the roof."""
        return f"{ROOF} {self.name}"

    def make_parser(self, prog: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = late(self.module).make_parser(prog)
        return parser

    def main(self, argv: Sequence[str]) -> int:
        """Run the command under the roof; return its exit code."""
        code: int = late(self.module).main(argv, self.prog)
        return code


COMMANDS = (
    Command(
        "convert-hf-to-gguf",
        "convert",
        "gguf_tools.commands.convert",
        "turn a Hugging Face folder into a GGUF file",
    ),
    Command(
        "quantize",
        "quantize",
        "gguf_tools.commands.quantize",
        "quantize a GGUF file, or a folder in one pass",
    ),
    Command("quantize lint", "lint", "gguf_tools.commands.lint", "say what a file type would do to a model"),
    Command(
        "imatrix", "imatrix", "gguf_tools.commands.imatrix", "collect importances, and work with their files"
    ),
    Command(
        "evaluate", "evaluate", "gguf_tools.commands.evaluate", "measure how far files are from their base"
    ),
    Command(
        "sensitivity",
        "sensitivity",
        "gguf_tools.commands.sensitivity",
        "measure what each tensor costs at each type",
    ),
)

_NAMES = {command.alone: command.prog for command in COMMANDS}
_EXAMPLE = re.compile(rf"^  ({'|'.join(sorted(_NAMES, reverse=True))})(?= )", re.MULTILINE)


def called_by(prog: str, text: str) -> str:
    """Write the examples of a help text in the way in which `prog` is called."""
    if not prog.startswith(f"{ROOF} "):
        return text
    return _EXAMPLE.sub(lambda match: f"  {_NAMES[match[1]]}", text)
