"""The `imatrix` command: look into importance matrix files, and turn one form into the other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gguf_tools import __version__, command

DESCRIPTION = """\
Importance matrices: for every weight, which of its columns carry large activations. `quantize --imatrix`
uses them. Two forms of file are read and written: GGUF, and the older .dat."""

EPILOG = """\
examples:
  imatrix show model.imatrix
  imatrix convert model.imatrix.dat model.imatrix.gguf
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return command.run(_parser(), lambda args: args.body(args), argv)


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser("imatrix", DESCRIPTION, epilog=EPILOG, version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser("show", help="entries, sizes, counts", description="List what a file holds.")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--json", action="store_true", help="as one JSON object")
    show.set_defaults(body=_show)
    convert = commands.add_parser(
        "convert",
        help="turn one form into the other",
        description="Write INPUT in the form that OUTPUT's name asks for: .dat, or GGUF for any other.",
    )
    convert.add_argument("input", type=Path, metavar="INPUT")
    convert.add_argument("output", type=Path, metavar="OUTPUT")
    convert.set_defaults(body=_convert)
    for subparser in (show, convert):
        command.add_verbose(subparser)
    return parser


def _show(args: argparse.Namespace) -> None:
    import json

    from imatrix.describe import describe, description_lines
    from imatrix.store import load

    contents = load(args.file)
    lines = [json.dumps(describe(contents))] if args.json else description_lines(contents)
    for line in lines:
        print(line)


def _convert(args: argparse.Namespace) -> None:
    from imatrix.store import format_of, load, not_held, save

    contents = load(args.input)
    save(args.output, contents)
    print(f"wrote {args.output}: {len(contents.entries)} entries, form {format_of(args.output)}")
    for note in not_held(contents, format_of(args.output)):
        print(f"note: {note}")


if __name__ == "__main__":
    raise SystemExit(main())
