"""Command line arguments of a card, shared by the commands that write models and `gguf-tools card`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.errors import BadRequest

if TYPE_CHECKING:
    from convert.card.write import CardRequest


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --card and what it says."""
    group = parser.add_argument_group("the card of the files, for the Hub")
    group.add_argument(
        "--card", action="store_true",
        help="write README.md beside the output: front matter, table of files, the command; an older card's"
        " other files stay in it",
    )  # fmt: skip
    add_card_facts(group)


def add_card_facts(group: argparse._ActionsContainer) -> None:
    """Add what a card can't know from the files."""
    group.add_argument(
        "--base-model",
        metavar="OWNER/NAME",
        help="the model on the Hub (default: that of the source, if known)",
    )
    group.add_argument("--quantized-by", metavar="NAME", help="who has made the files")
    group.add_argument(
        "--report", type=Path, metavar="FILE.json", help="what `evaluate --json` has measured of the files"
    )


def card_request(args: argparse.Namespace, source: Path | None) -> CardRequest:
    """Return what the arguments say; raises BadRequest for a model that is no name on the Hub."""
    from convert.card.measured import read_report
    from convert.card.write import CardRequest
    from gguf_tools.hub.names import parse_hub_name

    repo = None
    if args.base_model is not None:
        name = parse_hub_name(args.base_model)
        if name is None:
            raise BadRequest(f"--base-model {args.base_model}: expected OWNER/NAME")
        repo = name.repo
    if args.report is not None:
        read_report(args.report)
    return CardRequest(source, repo, args.quantized_by, args.report)


def prepare_card(args: argparse.Namespace, source: Path, outputs: Sequence[Path]) -> CardRequest | None:
    """Return what the card is to say, None without --card; refuse, before the work, what can't become one."""
    if not args.card:
        if args.base_model or args.quantized_by or args.report:
            raise BadRequest("--base-model, --quantized-by and --report are for the card: --card is missing")
        return None
    from convert.card.write import CARD_NAME, refuse_foreign

    for folder in {output.parent for output in outputs}:
        refuse_foreign(folder / CARD_NAME)
    return card_request(args, source)


def finish_card(request: CardRequest | None, args: argparse.Namespace, outputs: Sequence[Path]) -> None:
    """Write the card of outputs that the command has made, if there is to be one, and say where."""
    if request is None:
        return
    from convert.card.write import write_card

    path = write_card(outputs, request, {output.name: args.typed for output in outputs})
    if not args.quiet and not getattr(args, "json", False):
        print(f"wrote {path}")
