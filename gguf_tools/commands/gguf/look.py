"""Looking into files without changing them: `gguf-tools show`, `diff`, `verify`, `hash` and `scan`.

`scan` says what is suspicious about a stranger's file, before anyone loads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from gguf_tools.commands import command
from gguf_tools.errors import GGUFError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.terminal import say, say_json
from gguf_tools.text import counted


class FileErrors(Protocol):
    """The errors between the values of two files, as `quantize.value_errors` finds them."""

    def lines(self) -> Iterator[str]: ...

    def to_json(self) -> dict[str, Any]: ...


CompareWithSource = Callable[[GGUFSet, "Against"], list[Finding]]
"""Compares the values of a file with those of what it was made of."""

CompareValues = Callable[[GGUFSet, GGUFSet, bool], FileErrors]
"""Compares the values of two files: (A, B, quiet)."""

_SHOW_EXAMPLES = """\
examples:
  gguf-tools show model-Q4_K_M.gguf
  gguf-tools show --full model.gguf | grep chat_template
  gguf-tools show --json model-00001-of-00004.gguf | jq .types      a split set opens by any of its files
"""

_VERIFY_EXAMPLES = """\
examples:
  gguf-tools verify model.gguf
  gguf-tools verify model-00001-of-00004.gguf && echo sound
  gguf-tools verify model-Q4_K_M.gguf --against model-bf16.gguf
"""

_HASH_EXAMPLES = """\
examples:
  gguf-tools hash model.gguf
  gguf-tools hash --json model-00001-of-00004.gguf | jq -r .content     equal to that of the merged file
"""

_DIFF_EXAMPLES = """\
examples:
  gguf-tools diff old.gguf new.gguf
  gguf-tools diff --values model-bf16.gguf model-Q4_K_M.gguf      what quantizing has cost, by tensor
"""


def add_to(
    commands: command.Subcommands, compare_values: CompareValues, compare_with_source: CompareWithSource
) -> None:
    """Add the subcommands of this module. Decoding is the business of a higher floor.

    compare_values       what `diff --values` calls
    compare_with_source  what `verify --against` calls
    """
    sub = commands.add(
        "show",
        lambda args: show(args.file, full=args.full, as_json=args.json),
        "print metadata, tensors and totals",
        "Shapes are rows first; llama.cpp prints columns first. "
        "Only the header is read, so it takes a moment for a file of any size.",
        epilog=_SHOW_EXAMPLES,
        answers=True,
    )
    sub.add_argument("file", help="a GGUF file, or any file of a split set")
    sub.add_argument("--full", action="store_true", help="print long arrays and texts whole")

    sub = commands.add(
        "diff",
        lambda args: diff(_read_diff(args), compare_values),
        "compare two files or split sets",
        "The exit code is 0 if metadata and tensors are the same, and 1 if anything differs.",
        epilog=_DIFF_EXAMPLES,
        answers=True,
    )
    sub.add_argument("a", metavar="A")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--no-data", action="store_true", help="compare headers only, not the tensors' data")
    sub.add_argument(
        "--values",
        action="store_true",
        help="also decode tensors of the same shape, of whatever types, and print the errors of B's values:"
        " root mean square, relative to A's norm, largest",
    )
    command.add_quiet(sub)

    sub = commands.add(
        "verify",
        lambda args: verify(args.file, _read_against(args), compare_with_source, as_json=args.json),
        "check offsets, sizes, and floats and scales for NaN and infinity",
        "All data are read. The exit code is 1 if anything is bad.",
        epilog=_VERIFY_EXAMPLES,
        answers=True,
    )
    sub.add_argument("file", help="a GGUF file, or any file of a split set")
    sub.add_argument(
        "--against",
        metavar="SOURCE",
        help="also compare values of every tensor with the GGUF file or the folder that the file was made of:"
        " their errors must be those that the types make",
    )
    sub.add_argument(
        "--allow-pickle", action="store_true", help="read a SOURCE of .bin and .pt files, as weights only"
    )
    command.add_quiet(sub)

    sub = commands.add(
        "hash",
        lambda args: hash_(args.file, as_json=args.json),
        "print SHA-256 of every tensor's data, of the files, and of the content",
        "The content hash covers names, types, shapes and data of all tensors, not metadata: "
        "it is the same for a file and for the split set made of it.",
        epilog=_HASH_EXAMPLES,
        answers=True,
    )
    sub.add_argument("file", help="a GGUF file, or any file of a split set")


def show(path: str, *, full: bool, as_json: bool) -> None:
    """Print what a file's header says; `full`: long arrays and texts whole."""
    from gguf_tools.look.listing import describe, show_text

    with open_gguf(path, may_lack_parts=True) as source:
        if as_json:
            lacking = {"missing": source.missing} if source.missing else {}
            say_json(describe(source, full=full) | lacking)
        else:
            say(*show_text(source, full=full))
            if source.missing:
                say(f"note: this is one part: {source.missing}")


@dataclass(frozen=True)
class _Diff:
    """Request of `diff`.

    data    compare the tensors' data, too
    values  decode tensors, too, and print errors
    """

    a: str
    b: str
    data: bool
    values: bool
    json: bool
    quiet: bool


def _read_diff(args: argparse.Namespace) -> _Diff:
    return _Diff(args.a, args.b, not args.no_data, args.values, args.json, args.quiet)


def diff(request: _Diff, compare_values: CompareValues) -> int:
    """Print what differs between two files; return the exit code."""
    from gguf_tools.look.compare import as_lines, compare

    with open_gguf(request.a) as a, open_gguf(request.b) as b:
        differences = compare(a, b, data=request.data)
        errors = compare_values(a, b, request.quiet) if request.values else None
    data = [difference.as_json() for difference in differences]
    if request.json:
        say_json(data if errors is None else {"differences": data, **errors.to_json()})
        return 1 if differences else 0
    say(*as_lines(differences))
    if not differences:
        say("metadata and tensors are the same" if request.data else "headers are the same")
    say(*() if errors is None else errors.lines())
    return 1 if differences else 0


@dataclass(frozen=True)
class Against:
    """Source that `verify` compares a file with: the file or folder that it was made of."""

    source: str
    allow_pickle: bool
    quiet: bool


def _read_against(args: argparse.Namespace) -> Against | None:
    return None if args.against is None else Against(args.against, args.allow_pickle, args.quiet)


def verify(
    path: str, against: Against | None, compare_with_source: CompareWithSource, *, as_json: bool
) -> int:
    """Print what is wrong with a file; return the exit code."""
    from gguf_tools.look import verify as checks

    with open_gguf(path, may_lack_parts=True) as source:
        findings = checks.verify(source)
        if source.missing:
            findings.append(Finding(checks.KIND, source.missing, Level.BAD, file=path))
        if against is not None:
            findings += compare_with_source(source, against)
        n_tensors = len(source.tensors)
    bad = [finding for finding in findings if finding.is_bad]
    if as_json:
        data = {
            "ok": not bad,
            "tensors": n_tensors,
            "findings": [checks.as_json(finding) for finding in findings],
        }
        say_json(data)
    else:
        for finding in findings:
            say(checks.as_text(finding))
        found = counted(len(bad), "bad finding") if bad else "all good"
        say(f"{path}: {counted(n_tensors, 'tensor')}, {found}")
    return 1 if bad else 0


def hash_(path: str, *, as_json: bool) -> None:
    """Print the hashes of a file's tensors, of its parts and of its content."""
    from gguf_tools.look.verify import hash_source

    with open_gguf(path) as source:
        hashes = hash_source(source)
    if as_json:
        say_json(hashes.as_json())
        return
    for name, digest in hashes.tensors.items():
        say(f"{digest}  {name}")
    for part, digest in hashes.files.items():
        say(f"{digest}  {part}")
    say(f"{hashes.content}  content")


_SCAN_EXAMPLES = """\
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


def add_scan(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "scan",
        lambda args: scan(args.file, strict=args.strict, data=args.data, as_json=args.json),
        "look for what is suspicious in a stranger's file, before it is loaded",
        "Hidden bytes, deceiving texts, sizes\nthat contradict each other or the tensors, and chat templates "
        "that do more than make a prompt.",
        epilog=_SCAN_EXAMPLES, answers=True,
    )  # fmt: skip
    sub.add_argument("file", help="a GGUF file, or any file of a split set")
    sub.add_argument("--strict", action="store_true", help="warnings count as bad")
    sub.add_argument("--data", action="store_true", help="read all tensor data too, as verify does")


def scan(path: str, *, strict: bool, data: bool, as_json: bool) -> int:
    """Print what is suspicious about a file; return the exit code.

    strict  warnings count as bad
    data    read all tensor data, too
    """
    from gguf_tools import scan as scanner

    try:
        with open_gguf(path, may_lack_parts=True) as source:
            findings = scanner.scan(source, data=data)
    except GGUFError as error:
        if not as_json:
            raise
        refused = {"level": "bad", "check": "refused", "file": "", "where": "", "text": str(error)}
        say_json({"ok": False, "findings": [refused]})
        return 1
    least = Level.WARNING if strict else Level.BAD
    is_bad = any(finding.level >= least for finding in findings)
    if as_json:
        say_json({"ok": not is_bad, "findings": [scanner.as_json(each) for each in findings]})
    else:
        for finding in findings:
            say(scanner.as_text(finding))
        say(f"{path}: {_summary(findings)}")
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
