"""Looking into files without changing them: `gguf-tools show`, `diff`, `verify`, `hash` and `scan`.

`scan` says what is suspicious about a stranger's file, before anyone loads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.errors import GGUFError
from gguf_tools.format.shards import open_gguf
from gguf_tools.text import say, say_json

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
    from gguf_tools.look import listing

    description = listing.show(path)
    if as_json:
        say_json(description.to_json(full=full))
    else:
        say(*description.lines(full=full))


@dataclass(frozen=True)
class _Diff(command.Asked):
    """Request of `diff`; see gguf_tools/commands/looking.py."""

    a: str
    b: str
    data: bool
    values: bool


def diff(request: _Diff) -> int:
    """Print what differs between two files; return the exit code."""
    from gguf_tools.commands import looking

    a, b = request.a, request.b
    result = looking.diff(a, b, data=request.data, values=request.values, progress=not request.quiet)
    if request.json:
        data = result.to_json()
        say_json(data if request.values else data["differences"])
    else:
        say(*result.lines())
    return 1 if result.found else 0


@dataclass(frozen=True)
class _Verify(command.Asked):
    """Request of `verify`; see gguf_tools/commands/looking.py."""

    file: str
    against: str | None
    allow_pickle: bool


def verify(request: _Verify) -> int:
    """Print what is wrong with a file; return the exit code."""
    from gguf_tools.commands import looking

    result = looking.verify(
        request.file,
        against=request.against,
        allow_pickle=request.allow_pickle,
        progress=not request.quiet,
    )
    if request.json:
        say_json(result.to_json())
    else:
        say(*result.lines())
    return 1 if result.bad else 0


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
    from gguf_tools.scanning import report

    try:
        result = report.scan(path, data=data)
    except GGUFError as error:
        if not as_json:
            raise
        refused = {"level": "bad", "check": "refused", "file": "", "where": "", "text": str(error)}
        say_json({"ok": False, "findings": [refused]})
        return 1
    if as_json:
        say_json(result.to_json(strict=strict))
    else:
        say(*result.lines())
    return 1 if result.is_bad(strict=strict) else 0
