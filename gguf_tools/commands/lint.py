"""The `quantize lint` command: what a file type or a recipe file would do to a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.commands import command
from gguf_tools.commands.arguments.types import (
    add_matrix_arguments,
    add_requantize_argument,
    add_type_arguments,
    is_type,
    plan_options,
    read_importances,
)
from gguf_tools.commands.parser import completes
from gguf_tools.text import json_line, say
from quantize.plan.recipes import FILE_TYPES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from convert.sources import SourceOptions
    from quantize.padding import PadChoice
    from quantize.plan.recipe_files import Mixture
    from quantize.run import Run

DESCRIPTION = """\
Say what TYPE (a file type or a recipe file) would do to a model, without reading a weight. The report lists
rules that match nothing or come too late, tensors whose rows don't fit their type, the types that these
tensors get instead and what --pad would change, tensors that need importances and have none, and the exact
size. The exit code is 1 if something would stop a run."""

EPILOG = """\
examples:
  quantize lint model-bf16.gguf Q4_K_M
  quantize lint --imatrix model.imatrix model-bf16.gguf mine.yaml
  quantize lint --json --fallback attn_k_b=Q8_0 model-bf16.gguf IQ2_XXS
  quantize lint deepseek-ai/DeepSeek-V2-Lite Q4_K_M       a folder or a model of the Hub, as converted
"""


def main(argv: Sequence[str] | None = None, prog: str = "quantize lint") -> int:
    """Run the command; return its exit code."""
    return command.run(make_parser(prog), lambda args: _lint(_read(args)), argv)


def make_parser(prog: str = "quantize lint") -> argparse.ArgumentParser:
    parser = command.make_parser(prog, DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "model", metavar="MODEL", help="GGUF file, folder, or OWNER/NAME[@REVISION] on the Hub"
    )
    parser.set_defaults(answers=True)
    completes(parser.add_argument("type", metavar="TYPE", help="file type, or recipe file"), FILE_TYPES)
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    command.add_timeout(parser)
    add_matrix_arguments(parser)
    add_type_arguments(parser)
    add_requantize_argument(parser)
    return parser


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line: what TYPE would do to MODEL."""

    file_type: str
    named: str
    options: SourceOptions


def _read(args: argparse.Namespace) -> _Request:
    from convert.sources import SourceOptions

    options = SourceOptions(importances=read_importances(args), types=plan_options(args))
    type_, model = args.type, args.model
    if not is_type(type_) and (is_type(model) or (_is_model(type_) and not _is_model(model))):
        type_, model = model, type_  # the order that this command had at first
    return _Request(type_, model, options, json=args.json)


def _is_model(word: str) -> bool:
    """Whether a word looks like a model rather than a type, rightly or wrongly typed."""
    return "/" in word or word.endswith(".gguf") or Path(word).exists()


def _lint(request: _Request) -> int:
    from convert.sources import plan_source, source_folder
    from quantize.linting import lint_lines, lint_plan

    source = source_folder(request.named, dry_run=True)

    def plan(
        mixture: Mixture, pad: PadChoice | None = None, *, hidden: bool = False
    ) -> AbstractContextManager[Run]:
        options = replace(request.options, pad=pad, pad_hidden=hidden)
        return plan_source(source, None, mixture, options, allow_problems=True)

    report = lint_plan(request.file_type, plan)
    say(*[json_line(report.to_json())] if request.json else lint_lines(report))
    return 1 if report.stops else 0
