"""`gguf-tools card`: the card of quantized files."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gguf_cli import command
from gguf_cli.arguments.card import add_card_facts, read_card_facts
from gguf_cli.outputs import StoreOutput, add_force

DETAIL = """
The card is a README.md with the front matter that the Hub expects (base_model, license, tags), a table of the
files with sizes, bits per weight, types and importances, and their measured quality when there is a report.
What you write below its last line is kept when it is written anew, and so are the commands that `quantize
--card` has noted in it. A README.md that is no such card is replaced with --force alone."""

EPILOG = """\
examples:
  gguf-tools card lite-Q4_K_M.gguf lite-Q2_K.gguf --base-model deepseek-ai/DeepSeek-V2-Lite
  evaluate lite-bf16.gguf -f wiki.test.raw lite-Q*.gguf --json lite.json
  gguf-tools card lite-Q*.gguf --source DeepSeek-V2-Lite --report lite.json --quantized-by me
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "card", card, "write README.md for quantized files, as the Hub expects it", DETAIL,
        epilog=EPILOG, json=False,
    )  # fmt: skip
    sub.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="GGUF file, or a part of a split set"
    )
    sub.add_argument(
        "-o", "--output", type=command.output_file, action=StoreOutput, metavar="README.md",
        help="where to write (default: beside the files)",
    )  # fmt: skip
    sub.add_argument(
        "--source", type=Path, metavar="MODEL",
        help="folder or file that the files were made of: its card has license, languages and tags",
    )  # fmt: skip
    add_card_facts(sub)
    add_force(sub)
    command.add_quiet(sub)


def card(args: argparse.Namespace) -> None:
    from convert.card.write import write_card

    request = replace(read_card_facts(args), source=args.source)
    path = write_card(args.files, request, output=args.output, force=args.force)
    if not args.quiet:
        print(f"wrote {path}")
