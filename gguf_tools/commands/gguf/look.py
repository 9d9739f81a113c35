"""Looking into files without changing them: `gguf-tools show`, `diff`, `verify`, `hash` and `scan`.

`scan` says what is suspicious about a stranger's file, before anyone loads it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.errors import GGUFError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.text import counted, say, say_json

if TYPE_CHECKING:
    from quantize.value_errors import FileErrors

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


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommands of this module, but for `scan`."""
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
        lambda args: diff(filled(_Diff, args)),
        "compare two files or split sets",
        "The exit code is 0 if metadata and tensors are the same, and 1 if anything differs.",
        epilog=_DIFF_EXAMPLES,
        answers=True,
    )
    sub.add_argument("a", metavar="A")
    sub.add_argument("b", metavar="B")
    sub.add_argument(
        "--no-data", dest="data", action="store_false", help="compare headers only, not the tensors' data"
    )
    sub.add_argument(
        "--values",
        action="store_true",
        help="also decode tensors of the same shape, of whatever types, and print the errors of B's values:"
        " root mean square, relative to A's norm, largest",
    )
    command.add_quiet(sub)

    sub = commands.add(
        "verify",
        lambda args: verify(filled(_Verify, args)),
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
class _Diff(command.Asked):
    """Request of `diff`.

    data    compare the tensors' data, too
    values  decode tensors, too, and print errors
    """

    a: str
    b: str
    data: bool
    values: bool


def diff(request: _Diff) -> int:
    """Print what differs between two files; return the exit code."""
    from gguf_tools.look.compare import as_lines, compare

    with open_gguf(request.a) as a, open_gguf(request.b) as b:
        differences = compare(a, b, data=request.data)
        errors = _compare_values(a, b, quiet=request.quiet) if request.values else None
    data = [difference.as_json() for difference in differences]
    if request.json:
        say_json(data if errors is None else {"differences": data, **errors.to_json()})
        return 1 if differences else 0
    say(*as_lines(differences))
    if not differences:
        say("metadata and tensors are the same" if request.data else "headers are the same")
    say(*() if errors is None else errors.lines())
    return 1 if differences else 0


def _compare_values(a: GGUFSet, b: GGUFSet, *, quiet: bool) -> FileErrors:
    from gguf_tools.progress import Bar
    from quantize.value_errors import compare_values

    with Bar("comparing values", show=not quiet) as bar:
        return compare_values(a, b, bar)


@dataclass(frozen=True)
class _Verify(command.Asked):
    """The words of `verify`; against: the file or folder that the file was made of."""

    file: str
    against: str | None
    allow_pickle: bool


def verify(request: _Verify) -> int:
    """Print what is wrong with a file; return the exit code."""
    from gguf_tools.look import verify as checks

    path = request.file
    with open_gguf(path, may_lack_parts=True) as source:
        findings = checks.verify(source)
        if source.missing:
            findings.append(Finding(checks.KIND, source.missing, Level.BAD, file=path))
        if request.against is not None:
            findings += _compare_with_source(source, request.against, request)
        n_tensors = len(source.tensors)
    bad = [finding for finding in findings if finding.is_bad]
    if request.json:
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


def _compare_with_source(file: GGUFSet, against: str, request: _Verify) -> list[Finding]:
    from gguf_tools.progress import Bar
    from quantize.fill.sources import GGUFTensor
    from quantize.value_errors import compare_with_source

    with ExitStack() as opened:
        if Path(against).is_dir():
            from convert.architectures.vision import holds_tower
            from convert.pipeline import open_tensors

            sources = opened.enter_context(open_tensors(
                against, allow_pickle=request.allow_pickle, mmproj=holds_tower(file.metadata)
            ))  # fmt: skip
        else:
            source = opened.enter_context(open_gguf(against))
            sources = {name: GGUFTensor(source, name) for name in source.tensors}
        bar = opened.enter_context(Bar("comparing values", show=not request.quiet))
        return compare_with_source(file, sources, against, bar)


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
    counts = Counter(finding.level for finding in findings)
    nouns = {Level.BAD: "bad finding", Level.WARNING: "warning", Level.NOTE: "note"}
    parts = [counted(counts[level], noun) for level, noun in nouns.items() if counts[level]]
    return ", ".join(parts) or "nothing suspicious"
