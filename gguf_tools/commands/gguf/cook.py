"""`gguf-tools cook`: everything that a maker of quantized files does in an evening, in one command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.card import read_repository
from gguf_tools.commands.arguments.forward import (
    OR_FOLDER,
    add_chunks_argument,
    add_context_argument,
    add_force_of_text,
    add_run_arguments,
    cut_of,
    forward_options,
)
from gguf_tools.commands.arguments.types import refuse_grids_for_sizes
from gguf_tools.errors import BadRequest
from gguf_tools.text import say
from quantize.options import FileOptions

if TYPE_CHECKING:
    from gguf_tools.commands.cook.request import CookRequest

DETAIL = """
FOLDER gets an importance matrix, a file for each type (the source is read once for all of them), their
divergence from MODEL as numbers and as a page, a README.md for the Hub, and checksums.

A type is a file type, a recipe file, or a size (3.2bpw, 12.5GiB), for which types are chosen by the
divergence that each tensor adds. The same command resumes where an interrupted run stopped; with more types,
it adds their files."""

EPILOG = """\
examples:
  gguf-tools cook DeepSeek-V2-Lite -f calibration.txt --types Q2_K,IQ3_XXS,Q4_K_M,3.2bpw -o lite --dry-run
  gguf-tools cook DeepSeek-V2-Lite -f calibration.txt --types Q2_K,Q4_K_M --evaluate wiki.test.raw -o lite
  gguf-tools cook deepseek-ai/DeepSeek-V2-Lite -f calibration.txt --types Q4_K_M --calibrate -o lite
"""


def add_to(commands: command.Subcommands, text: str) -> None:
    """Add the subcommand; `text` is its line in the list of commands."""
    sub = commands.add(
        "cook",
        lambda args: cook(_read(args), dry_run=args.dry_run),
        text,
        DETAIL,
        epilog=EPILOG,
        json=False,
    )
    sub.add_argument("model", metavar="MODEL", help="folder, GGUF file, or OWNER/NAME[@REVISION] on the Hub")
    sub.add_argument(
        "-o",
        "--output",
        dest="folder",
        type=command.output_folder,
        required=True,
        metavar="FOLDER",
        help="folder for everything that is made",
    )
    sub.add_argument(
        "-f", "--file", dest="text", type=command.text_file, action=command.StoreOnce, required=True,
        metavar="TEXT", help=f"calibration text, UTF-8, {OR_FOLDER}",
    )  # fmt: skip
    sub.add_argument(
        "--types",
        required=True,
        metavar="TYPE,SIZE...",
        help="files to make, for instance Q2_K,Q4_K_M,3.2bpw",
    )
    sub.add_argument(
        "--evaluate",
        type=command.text_file,
        metavar="TEXT",
        help="measure divergence on this text, which should differ from the text of -f",
    )
    sub.add_argument(
        "--calibrate", action="store_true",
        help="choose the bytes of every tensor so that predictions on the calibration text stay close to"
        " MODEL's",
    )  # fmt: skip
    command.add_flags(sub, FileOptions, only=["keep_grid"], type="each of TYPE")
    add_context_argument(sub)
    add_chunks_argument(sub, what="use at most N chunks of the text; -1: all")
    add_chunks_argument(sub, "--evaluate-chunks", "the same for the text of --evaluate")
    sub.add_argument("--name", metavar="NAME", help="what the files are called (default: MODEL's name)")
    sub.add_argument("--base-model", metavar="OWNER/NAME", help="for the card: the model on the Hub")
    sub.add_argument("--quantized-by", metavar="NAME", help="for the card: who made the files")
    sub.add_argument("--dry-run", action="store_true", help="print steps, sizes and times; write nothing")
    add_force_of_text(add_run_arguments(sub))


def cook(request: CookRequest, *, dry_run: bool) -> None:
    """Make the files, or print what would be made."""
    from imatrix.forward.options import require_torch

    require_torch("cooking")  # the modules below import it
    from gguf_tools.commands.cook import run

    if dry_run:
        say(*run.plan_lines(request))
        return
    made = run.cook(request)
    if request.progress:
        say(*run.made_lines(request, made))
        say(f"wrote {request.folder}")


def _read(args: argparse.Namespace) -> CookRequest:
    from convert.sources import source_folder
    from gguf_tools.commands.cook.request import CookRequest, model_name, parse_wanted
    from gguf_tools.files.early_checks import nearest_folder, refuse_early
    from imatrix.texts.tokens import Cut

    wanted = parse_wanted(args.types)
    refuse_grids_for_sizes(args.keep_grid, any(each.size is not None for each in wanted))
    repo = read_repository("--base-model", args.base_model)
    is_name = args.name is None or (Path(args.name).name == args.name and args.name.isprintable())
    if not is_name or (args.name or "").startswith("."):
        raise BadRequest(f"--name {args.name}: expected the beginning of a file's name")
    refuse_early([nearest_folder(args.folder)], [args.evaluate])
    refuse_early(texts=[args.text], folders=True)
    opened = source_folder(args.model, dry_run=args.dry_run, quiet=args.quiet)
    source = Path(opened)
    refuse_early(models=[source])
    return filled(
        CookRequest,
        args,
        source=source,
        wanted=wanted,
        name=args.name or model_name(source),
        held_out=args.evaluate,
        cut=cut_of(args),
        held_out_cut=Cut(args.chunk_size, n_chunks=args.evaluate_chunks),
        forward=forward_options(args),
        progress=not args.quiet,
        repo=repo,
        streamed=None if isinstance(opened, Path) else opened,
    )
