"""Arguments of a card, shared by the commands that write models and `gguf-tools card`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.commands.command import TakesArguments
from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import write_whole
from gguf_tools.findings import Finding, Level, Tell, log, teller
from gguf_tools.text import say

if TYPE_CHECKING:
    from convert.card.write import CardRequest


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --card and what it says."""
    group = parser.add_argument_group("the card of the files, for the Hub")
    group.add_argument(
        "--card", action="store_true",
        help="write README.md beside the output: front matter, table of files, the command; files that an"
        " older card lists stay listed",
    )  # fmt: skip
    add_card_facts(group)


def add_card_facts(group: TakesArguments) -> None:
    """Add what a card can't know from the files."""
    group.add_argument(
        "--base-model",
        metavar="OWNER/NAME",
        help="the original model on the Hub (default: the name that the source gives, if any)",
    )
    group.add_argument("--quantized-by", metavar="NAME", help="who made the files")
    group.add_argument(
        "--repository", metavar="OWNER/NAME",
        help="where the files will be on the Hub, for the card's commands that get them",
    )  # fmt: skip
    group.add_argument(
        "--report", type=Path, metavar="FILE.json",
        help="measurements of the files, as written by `evaluate --json`",
    )  # fmt: skip


def read_card(args: argparse.Namespace) -> CardRequest | None:
    """Read --card and its facts; None without it. Raises BadRequest for facts without a card."""
    if args.card:
        return read_card_facts(args)
    if args.base_model or args.quantized_by or args.report or args.repository:
        raise BadRequest(
            "--base-model, --quantized-by, --repository and --report are for the card: --card is missing"
        )
    return None


def read_card_facts(args: argparse.Namespace) -> CardRequest:
    """Read the facts of a card; raises BadRequest for a model that is no name on the Hub."""
    from convert.card.facts import read_report
    from convert.card.write import CardRequest

    base_model, home = (
        read_repository(option, text)
        for option, text in (("--base-model", args.base_model), ("--repository", args.repository))
    )
    if args.report is not None:
        read_report(args.report)
    return CardRequest(None, base_model, args.quantized_by, args.report, home=home)


def read_repository(option: str, text: str | None) -> str | None:
    """Read OWNER/NAME of a model on the Hub, without a revision; raises BadRequest for anything else."""
    from gguf_tools.hub.names import parse_hub_name

    name = None if text is None else parse_hub_name(text)
    if text is not None and name is None:
        raise BadRequest(f"{option} {text}: expected OWNER/NAME")
    return None if name is None else name.repo


def with_chart(card: CardRequest, folder: Path, tell: Tell) -> CardRequest:
    """Draw the files of the card's report beside it, and show that on it; the same without matplotlib.

    tell  hears of a file under the chart's name that is none of ours, which stays
    """
    from importlib.util import find_spec

    if card.report is None or find_spec("matplotlib") is None:
        return card
    from convert.card.markdown import as_address
    from imatrix.evaluate.report.standalone import may_be_written, size_chart_file

    chart = folder / f"{card.report.stem}.svg"
    if not may_be_written(chart):
        found = f"{chart}: not a chart of gguf-tools, so it stays, and the card has no chart"
        tell(Finding("chart", found, Level.NOTE))
        return card
    write_whole(chart, size_chart_file(card.report).encode())
    shown = f"![Mean divergence of each file against its size]({as_address(chart.name)})"
    return replace(card, remarks=(shown, *card.remarks))


def write_charted_card(
    files: Sequence[Path],
    card: CardRequest,
    output: Path | None = None,
    *,
    commands: Mapping[str, Sequence[str]] | None = None,
    force: bool = False,
    tell: Tell = log,
) -> Path:
    """Write the card of files, and the chart of its report beside it; return the card's path.

    output, commands, force, tell  as `write_card` takes them
    raises  BadRequest as `write_card`, and nothing is drawn then for a card that is not ours
    """
    from convert.card.write import CARD_NAME, refuse_foreign, write_card

    place = files[0].parent / CARD_NAME if output is None else output
    if not force:
        refuse_foreign(place)
    card = with_chart(card, place.parent, tell)
    return write_card(files, card, commands, output=place, force=force, tell=tell)


def refuse_foreign_cards(card: CardRequest | None, outputs: Sequence[Path]) -> None:
    """Raise BadRequest, before the work, for a README.md in the place of the card that is not ours."""
    if card is not None:
        from convert.card.write import CARD_NAME, refuse_foreign

        for folder in {output.parent for output in outputs}:
            refuse_foreign(folder / CARD_NAME)


def write_card_of(
    outputs: Sequence[Path], card: CardRequest | None, source: Path, typed: Sequence[str], *, quiet: bool
) -> None:
    """Write the card of outputs that were made of `source`, if there is to be one, and say where."""
    if card is None:
        return
    commands = {output.name: typed for output in outputs}
    card = replace(card, source=source)
    path = write_charted_card(outputs, card, commands=commands, tell=teller(quiet=quiet))
    if not quiet:
        say(f"wrote {path}")
