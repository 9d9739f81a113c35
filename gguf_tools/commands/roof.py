"""The commands that have two names: one of their own, and one under `gguf-tools`.

Each is a module with `make_parser(prog)` and `main(argv, prog)`. A module is imported when its command is
called, so a command starts as fast under the roof as alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from gguf_tools.lazy import late

ROOF = "gguf-tools"


@dataclass(frozen=True)
class Command:
    """A command with two names.

    alone  the words that call it by its own name
    name   the word that calls it under the roof, and its module
    text   its line in the list of commands
    """

    alone: str
    name: str
    text: str

    @property
    def prog(self) -> str:
        """The words that call it under the roof."""
        return f"{ROOF} {self.name}"

    def make_parser(self, prog: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = self._module().make_parser(prog)
        return parser

    def main(self, argv: Sequence[str]) -> int:
        """Run the command under the roof; return its exit code."""
        code: int = self._module().main(argv, self.prog)
        return code

    def _module(self) -> ModuleType:
        return late(f"gguf_tools.commands.{self.name}")


COMMANDS = (
    Command("convert-hf-to-gguf", "convert", "turn a Hugging Face folder into a GGUF file"),
    Command("quantize", "quantize", "quantize a GGUF file, or a folder in one pass"),
    Command("quantize lint", "lint", "say what a file type would do to a model"),
    Command("imatrix", "imatrix", "collect importance matrices, and work with their files"),
    Command("evaluate", "evaluate", "measure how far files are from their base"),
    Command("sensitivity", "sensitivity", "measure how much divergence each tensor adds at each type"),
)

_NAMES = {command.alone: command.prog for command in COMMANDS}
_EXAMPLE = re.compile(rf"^  ({'|'.join(sorted(_NAMES, reverse=True))})(?= )", re.MULTILINE)


def called_by(prog: str, text: str) -> str:
    """Write the examples of a help text in the way in which `prog` is called."""
    if not prog.startswith(f"{ROOF} "):
        return text
    return _EXAMPLE.sub(lambda match: f"  {_NAMES[match[1]]}", text)
