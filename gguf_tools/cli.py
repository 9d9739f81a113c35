"""The `gguf-tools` command: look at GGUF files, compare them, check them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gguf_tools import __version__, command
from gguf_tools.shards import open_gguf
from gguf_tools.text import json_text, printable

_EXAMPLES = """\
examples:
  gguf-tools show model.gguf                 metadata, tensors, totals by type, KV cache per token
  gguf-tools show model.gguf --json | jq .types
  gguf-tools show model-00001-of-00004.gguf  a split set opens as one, by any of its files
  gguf-tools diff old.gguf new.gguf          what differs, down to the tensors' data
  gguf-tools diff --no-data old.gguf new.gguf
  gguf-tools verify model.gguf               finds NaN scales, gaps, stray bytes
  gguf-tools hash model.gguf                 SHA-256 of every tensor, the file and the content
  gguf-tools checkpoint DeepSeek-V3          weights of a Hugging Face folder, and how they are stored

Each subcommand explains itself: gguf-tools show --help
"""


def show(args: argparse.Namespace) -> None:
    from gguf_tools.listing import describe, show_text

    with open_gguf(args.file) as source:
        if args.json:
            print(json_text(describe(source, full=args.full)))
        else:
            print("\n".join(show_text(source, full=args.full)))


def diff(args: argparse.Namespace) -> int:
    from gguf_tools.compare import compare

    with open_gguf(args.a) as a, open_gguf(args.b) as b:
        found = compare(a, b, data=not args.no_data)
    if args.json:
        print(json_text([difference.as_json() for difference in found]))
    else:
        for difference in found:
            print(difference.as_text())
        if not found:
            print("headers are the same" if args.no_data else "metadata and tensors are the same")
    return 1 if found else 0


def verify(args: argparse.Namespace) -> int:
    from gguf_tools import verify as checks

    with open_gguf(args.file) as source:
        findings = checks.verify(source)
        n_tensors = len(source.tensors)
    bad = [finding for finding in findings if finding.is_bad]
    if args.json:
        data = {
            "ok": not bad,
            "tensors": n_tensors,
            "findings": [finding.as_json() for finding in findings],
        }
        print(json_text(data))
    else:
        for finding in findings:
            print(finding.as_text())
        print(f"{args.file}: {n_tensors} tensors, {f'{len(bad)} bad findings' if bad else 'all good'}")
    return 1 if bad else 0


def hash_(args: argparse.Namespace) -> None:
    from gguf_tools.hashes import hash_source

    with open_gguf(args.file) as source:
        hashes = hash_source(source)
    if args.json:
        print(json_text(hashes.as_json()))
        return
    for name, digest in hashes.tensors.items():
        print(f"{digest}  {printable(name)}")
    for path, digest in hashes.files.items():
        print(f"{digest}  {path}")
    print(f"{hashes.content}  content")


def checkpoint(args: argparse.Namespace) -> None:
    from convert import open_checkpoint
    from convert.listing import checkpoint_text, describe

    with open_checkpoint(args.folder, allow_pickle=args.allow_pickle) as weights:
        print(json_text(describe(weights)) if args.json else "\n".join(checkpoint_text(weights)))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `gguf-tools` and its subcommands."""
    parser = command.make_parser(
        "gguf-tools", "Look at GGUF files, compare them, check them.", epilog=_EXAMPLES, version=__version__
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, body: command.Body, text: str, detail: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {detail}")
        sub.set_defaults(body=body)
        sub.add_argument("--json", action="store_true", help="print one JSON value instead of text")
        command.add_verbose(sub)
        return sub

    sub = add(
        "show", show, "print metadata, tensors and totals",
        "Shapes are rows first; llama.cpp prints columns first. "
        "Only the header is read, so it takes a moment for a file of any size.",
    )
    sub.add_argument("file", help="a GGUF file, or any file of a split set")
    sub.add_argument("--full", action="store_true", help="print long arrays and texts whole")

    sub = add(
        "diff", diff, "compare two files or split sets",
        "The exit code is 0 if metadata and tensors are the same, and 1 if anything differs.",
    )
    sub.add_argument("a", metavar="A")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--no-data", action="store_true", help="compare headers only, not the tensors' data")

    sub = add(
        "verify", verify, "check offsets, sizes, and floats and scales for NaN and infinity",
        "All data are read. The exit code is 1 if anything is bad.",
    )
    sub.add_argument("file", help="a GGUF file, or any file of a split set")

    sub = add(
        "hash", hash_, "print SHA-256 of every tensor's data, of the files, and of the content",
        "The content hash covers names, types, shapes and data of all tensors, not metadata: "
        "it is the same for a file and for the split set made of it.",
    )
    sub.add_argument("file", help="a GGUF file, or any file of a split set")

    sub = add(
        "checkpoint", checkpoint, "print the weights of a Hugging Face folder",
        "Of each: name, shape, bits per weight with scales and all, and how it is stored. Those of a "
        "quantized checkpoint are listed as the model has them, not as the files do. Only headers and a few "
        "small tensors are read.",
    )
    sub.add_argument("folder", metavar="FOLDER", help="folder with config.json")
    sub.add_argument(
        "--allow-pickle", action="store_true",
        help="read .bin and .pt checkpoints, with torch 2.10 or newer and as weights only",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(make_parser(), lambda args: args.body(args), argv)


if __name__ == "__main__":
    raise SystemExit(main())
