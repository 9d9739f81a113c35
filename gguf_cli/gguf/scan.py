"""`gguf-tools scan`: what is suspicious about a stranger's file, before anyone loads it."""

from __future__ import annotations

import argparse
from typing import Any

from gguf_cli import command
from gguf_tools.errors import GGUFError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.shards import open_gguf
from gguf_tools.text import json_text, printable

_EPILOG = """\
examples:
  gguf-tools scan model.gguf
  gguf-tools scan --strict --data model-00001-of-00004.gguf && echo clean

levels:
  note     common in honest files, and worth knowing: links, paths, types of ik_llama.cpp
  warning  rare in honest files: look at it before you load the file
  bad      made to do harm, or so broken that llama.cpp stops

Chat templates are parsed, and tried on a few conversations, in a sandbox of jinja2 inside a process that
has 2 seconds, 512 MiB and no files. Without jinja2 they are only searched: pip install 'gguf-tools[scan]'.
Tensor data are not read; with --data they are, and what `gguf-tools verify` finds (NaN, gaps) is added.

The exit code is 1 if anything is bad (with --strict: or a warning), or if the file can't be opened at all.
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "scan", scan, "look for what is suspicious in a stranger's file, before it is loaded",
        "Hidden bytes, deceiving texts, sizes\nthat contradict each other or the tensors, and chat templates "
        "that do more than make a prompt.",
        epilog=_EPILOG,
    )  # fmt: skip
    sub.add_argument("file", help="a GGUF file, or any file of a split set")
    sub.add_argument("--strict", action="store_true", help="warnings count as bad")
    sub.add_argument("--data", action="store_true", help="read all tensor data too, as verify does")


def scan(args: argparse.Namespace) -> int:
    from gguf_tools.scan import as_json, as_text
    from gguf_tools.scan import scan as all_findings

    try:
        with open_gguf(args.file) as source:
            findings = all_findings(source, data=args.data)
    except GGUFError as error:
        if not args.json:
            raise
        refused = {"level": "bad", "check": "refused", "file": "", "where": "", "text": str(error)}
        print(json_text({"ok": False, "findings": [refused]}))
        return 1
    least = Level.WARNING if args.strict else Level.BAD
    is_bad = any(finding.level >= least for finding in findings)
    if args.json:
        data: dict[str, Any] = {"ok": not is_bad, "findings": [as_json(finding) for finding in findings]}
        print(json_text(data))
    else:
        for finding in findings:
            print(as_text(finding))
        print(f"{printable(args.file)}: {_summary(findings)}")
    return 1 if is_bad else 0


def _summary(findings: list[Finding]) -> str:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    parts = [
        f"{counts[level]} {word if counts[level] == 1 else several}"
        for level, word, several in (
            (Level.BAD, "bad finding", "bad findings"),
            (Level.WARNING, "warning", "warnings"),
            (Level.NOTE, "note", "notes"),
        )
        if counts[level]
    ]
    return ", ".join(parts) if parts else "nothing suspicious"
