"""`gguf-tools card` and `gguf-tools upload`: the card of quantized files, and files to the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.card import add_card_facts, read_card_facts, write_charted_card
from gguf_tools.commands.command import StoreOutput, add_force
from gguf_tools.errors import BadRequest
from gguf_tools.findings import teller
from gguf_tools.text import has_terminal, say, say_aside, shown, size_text

if TYPE_CHECKING:
    from convert.card.write import CardRequest
    from gguf_tools.hub.names import HubName

_CARD_DETAIL = """
The card is a README.md with the front matter that the Hub expects (base_model, license, tags), a table of the
files with sizes, bits per weight, types and importances, and their measured quality when there is a report.
What you write below its last line is kept when the card is written again, and so are the commands that
`quantize --card` has noted in it. Only --force replaces a README.md that is not such a card."""

_CARD_EXAMPLES = """\
examples:
  gguf-tools card lite-Q4_K_M.gguf lite-Q2_K.gguf --base-model deepseek-ai/DeepSeek-V2-Lite
  evaluate lite-bf16.gguf -f wiki.test.raw lite-Q*.gguf --json lite.json
  gguf-tools card lite-Q*.gguf --source DeepSeek-V2-Lite --report lite.json --quantized-by me
"""


def add_card(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "card",
        lambda args: _card(
            filled(_Card, args, facts=replace(read_card_facts(args), source=args.source))
        ),
        "write README.md for quantized files, as the Hub expects it",
        _CARD_DETAIL,
        epilog=_CARD_EXAMPLES, json=False,
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


@dataclass(frozen=True)
class _Card(command.Asked):
    """Request of `card`; `output` None: beside the files."""

    files: Sequence[Path]
    output: Path | None
    facts: CardRequest


def _card(request: _Card) -> None:
    tell = teller(quiet=request.quiet)
    path = write_charted_card(request.files, request.facts, request.output, force=request.force, tell=tell)
    if not request.quiet:
        say(f"wrote {path}")


_UPLOAD_DETAIL = """
Each file is one commit, small files first, and the card last. FILE may be a folder, such as that of
`gguf-tools cook`: files with the usual names of a model's files are uploaded, and the others are listed and
left out. After an interruption, the same command does not send again what is stored already. Only --force
replaces an existing file with other content. You must be logged in (`hf auth login`, or HF_TOKEN)."""

_UPLOAD_EXAMPLES = """\
examples:
  gguf-tools upload lite-Q4_K_M.gguf README.md me/lite-GGUF --private
  gguf-tools upload lite me/lite-GGUF --dry-run       which files of a folder belong to a model
"""


def add_upload(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "upload",
        lambda args: _upload(_read_upload(args)),
        "upload files to a repository on the Hub",
        _UPLOAD_DETAIL,
        epilog=_UPLOAD_EXAMPLES, json=False,
    )  # fmt: skip
    sub.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="file, part of a split set, or folder"
    )
    sub.add_argument("repository", metavar="OWNER/NAME", help="a repository, created if it doesn't exist")
    sub.add_argument("--private", action="store_true", help="make a new repository private")
    sub.add_argument("--revision", metavar="BRANCH", help="branch, created if missing (default: main)")
    sub.add_argument(
        "--include", metavar="PATTERN", action="append", default=[],
        help="also take files of a folder that match, as in '*.txt' (repeatable). Names with a leading dot"
        " need a pattern with a leading dot; keys, tokens and passwords are taken only by their full name",
    )  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="print what would be uploaded, and stay offline")
    command.add_timeout(sub)
    add_force(sub)
    command.add_quiet(sub)


@dataclass(frozen=True)
class _Upload(command.Asked):
    """Request of `upload`.

    name     repository, and the branch
    include  patterns of more files to take from folders
    """

    files: Sequence[Path]
    name: HubName
    include: Sequence[str]
    private: bool


def _read_upload(args: argparse.Namespace) -> _Upload:
    from gguf_tools.hub.names import HubName, parse_hub_name

    name = parse_hub_name(args.repository)
    if name is None or (name.revision is not None and args.revision is not None):
        raise BadRequest(f"{args.repository}: expected OWNER/NAME, the repository, as the last word")
    return filled(_Upload, args, name=HubName(name.repo, args.revision or name.revision))


def _upload(request: _Upload) -> None:
    from gguf_tools.hub.upload import Upload, plan_upload, upload

    uploads, left_out = plan_upload(request.files, request.include)
    if left_out and (request.dry_run or not request.quiet):
        names = ", ".join(map(shown, left_out))
        how = "--include PATTERN takes files like these; what may be a secret needs its full name"
        say_aside(f"left out: {names} ({how})")
    if not uploads:
        raise BadRequest(f"{request.files[0]}: nothing to upload; --include PATTERN names other files")
    if request.dry_run:
        for each in uploads:
            say(f"{each.name}  {size_text(each.n_bytes)}")
        total = size_text(sum(each.n_bytes for each in uploads))
        plural = "s" * (len(uploads) != 1)
        say(f"would upload {len(uploads)} file{plural}, {total}, to {request.name}")
        return

    def done(each: Upload, is_new: bool) -> None:
        if not request.quiet:
            how = "uploaded" if is_new else "there already"
            say(f"{each.name}: {how}, {size_text(each.n_bytes)}")

    bars = not request.quiet and has_terminal()
    upload(uploads, request.name, private=request.private, force=request.force, bars=bars, done=done)
