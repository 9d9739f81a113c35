"""`gguf-tools set`, `remove-key`, `rename`, `split` and `merge`: changing files without touching weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.argument_types import COUNT, metric_bytes
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.command import add_force
from gguf_tools.edit.header_edits import Assignment, parse_assignment
from gguf_tools.errors import BadRequest
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.format.shards import open_gguf
from gguf_tools.text import bytes_text, counted, say, say_aside, say_json

if TYPE_CHECKING:
    from gguf_tools.edit.header_edits import Edit
    from gguf_tools.edit.model_edits import FileEdit
    from gguf_tools.edit.rewrite import NewFile

_IN_PLACE = """\
Weights are never decoded. A file is changed in place if
its new header fits exactly, else written anew beside the old one; an interruption leaves it old or new.
Of a split set only the files that change are written."""
_SET_EXAMPLES = """\
types: u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 bool str, and arrays of them: [i32]:1,2,3 or [str]:["a, b", "c"]

Without a type the value gets that of the key, or the one that llama.cpp expects.
@FILE in place of a value is the text of a file.

examples:
  gguf-tools set model.gguf "general.name=DeepSeek V3" general.license=mit
  gguf-tools set model.gguf deepseek2.context_length=u32:65536
  gguf-tools set model.gguf tokenizer.chat_template=@chat.jinja -o other.gguf
"""
_REMOVE_EXAMPLES = """\
examples:
  gguf-tools remove-key model.gguf tokenizer.chat_template
  gguf-tools remove-key model.gguf general.url general.source.url -o other.gguf
"""
_RENAME_EXAMPLES = """\
examples:
  gguf-tools rename model.gguf output.weight=lm_head.weight
  gguf-tools rename model.gguf --regex 'model\\.layers\\.(\\d+)\\.=blk.\\1.'
  gguf-tools rename model.gguf --key general.url=general.source.url
"""
_SPLIT_EXAMPLES = """\
examples:
  gguf-tools split model.gguf model                    model-00001-of-00008.gguf, ...
  gguf-tools split model.gguf model --max-size 50G --dry-run
"""
_MERGE_EXAMPLES = """\
examples:
  gguf-tools merge model-00001-of-00008.gguf model.gguf
"""


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommands of this module."""
    _add_set(commands)
    _add_remove_key(commands)
    _add_rename(commands)
    _add_split(commands)
    _add_merge(commands)


_ReadEdit = Callable[[argparse.Namespace], "Edit"]


def _add_edit(
    commands: command.Subcommands, name: str, read: _ReadEdit, text: str, epilog: str
) -> argparse.ArgumentParser:
    """Add a subcommand that edits headers; `read` gives the edit."""
    return commands.add(
        name, lambda args: edit(filled(_Target, args), read(args), args.output), text, _IN_PLACE,
        epilog=epilog,
    )  # fmt: skip


def _add_set(commands: command.Subcommands) -> None:
    sub = _add_edit(commands, "set", _set, "set metadata keys", _SET_EXAMPLES)
    _add_file(sub)
    sub.add_argument(
        "assignments",
        metavar="KEY=TYPE:VALUE",
        nargs="+",
        type=command.argument(parse_assignment),
        help="the new value; KEY=TYPE@FILE reads it from a file",
    )
    _add_force(sub, "allow a type that llama.cpp doesn't read the key as, and another architecture")
    _add_output(sub)


def _add_remove_key(commands: command.Subcommands) -> None:
    sub = _add_edit(commands, "remove-key", _remove, "remove metadata keys", _REMOVE_EXAMPLES)
    _add_file(sub)
    sub.add_argument("keys", metavar="KEY", nargs="+")
    add_force(sub)
    _add_output(sub)


def _add_rename(commands: command.Subcommands) -> None:
    sub = _add_edit(commands, "rename", _renaming, "rename tensors, or metadata keys", _RENAME_EXAMPLES)
    _add_file(sub)
    sub.add_argument(
        "renames",
        metavar="OLD=NEW",
        nargs="+",
        type=command.argument(_rename),
        help="all are done at once, so that names may be exchanged",
    )
    sub.add_argument("--key", action="store_true", help="rename metadata keys, not tensors")
    sub.add_argument(
        "--regex",
        action="store_true",
        help="OLD is a regular expression, and NEW replaces what it matches; \\1 in NEW is its group 1",
    )
    _add_force(sub, "with --key: allow a name that llama.cpp reads as another type")
    _add_output(sub)


def _add_split(commands: command.Subcommands) -> None:
    sub = commands.add(
        "split",
        lambda args: split(filled(_Split, args)),
        "split a model into several files, as llama-gguf-split does",
        "The files\nare named PREFIX-00001-of-0000N.gguf. Without a limit, each gets 128 tensors.",
        epilog=_SPLIT_EXAMPLES,
    )
    _add_file(sub)
    sub.add_argument(
        "prefix", metavar="PREFIX", type=command.output_prefix, help="what the names of the files begin with"
    )
    sub.add_argument(
        "--max-size",
        "--split-max-size",
        dest="max_bytes",
        metavar="N(M|G)",
        type=command.argument(partial(metric_bytes, needs_unit=True)),
        help="start a new file at this size, in millions or billions of bytes of tensor data",
    )
    sub.add_argument(
        "--max-tensors",
        "--split-max-tensors",
        metavar="N",
        type=command.number(COUNT),
        help="start a new file after this many tensors",
    )
    sub.add_argument(
        "--no-tensor-first-split",
        dest="first_is_empty",
        action="store_true",
        help="keep tensors out of the first file",
    )
    add_force(sub)
    _add_dry_run(sub)


def _add_merge(commands: command.Subcommands) -> None:
    sub = commands.add(
        "merge",
        lambda args: merge(filled(_Target, args), args.output),
        "put the files of a split set together",
        "The result is the file that was split, byte for byte, if it was laid out as llama.cpp does.",
        epilog=_MERGE_EXAMPLES,
    )
    _add_file(sub)
    sub.add_argument("output", metavar="OUT", type=command.output_file, help="the new file")
    add_force(sub)
    _add_dry_run(sub)


def _add_file(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("file", metavar="FILE", help="a GGUF file, or any file of a split set")


def _add_output(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "-o",
        "--output",
        type=command.output_file,
        metavar="OUT",
        help="write the result there, and leave FILE as it is",
    )
    _add_dry_run(sub)


def _add_dry_run(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    command.add_quiet(sub)


def _add_force(sub: argparse.ArgumentParser, text: str) -> None:
    sub.add_argument("--force", action="store_true", help=f"replace OUT; {text}")


# --- arguments ------------------------------------------------------------------------------


def _rename(text: str) -> str:
    if text.find("=") < 1:
        raise BadRequest(f"{text!r}: expected OLD=NEW")
    return text


def _old_and_new(renames: list[str], regex: bool) -> list[tuple[str, str]]:
    """Split each OLD=NEW into a pair, a pattern at its last `=`, because it may contain others."""
    parts = [text.rpartition("=") if regex else text.partition("=") for text in renames]
    return [(old, new) for old, _, new in parts]


# --- editing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target(command.Asked):
    """The file that a command works on, and how."""

    file: str


def _set(args: argparse.Namespace) -> Edit:
    from gguf_tools.edit.header_edits import set_values

    assignments: list[Assignment] = args.assignments
    force: bool = args.force
    return lambda metadata, _names: set_values(metadata, assignments, force=force)


def _remove(args: argparse.Namespace) -> Edit:
    from gguf_tools.edit.header_edits import remove_keys

    keys: list[str] = args.keys
    return lambda metadata, _names: remove_keys(metadata, keys)


def _renaming(args: argparse.Namespace) -> Edit:
    from gguf_tools.edit.header_edits import rename_keys, rename_tensors

    regex, force = bool(args.regex), bool(args.force)
    renames = _old_and_new(args.renames, regex)
    if args.key:
        return lambda metadata, _names: rename_keys(metadata, renames, regex=regex, force=force)
    return lambda metadata, names: rename_tensors(metadata, names, renames, regex=regex)


def edit(target: _Target, change: Edit, output: Path | None) -> None:
    """Change a file, or write the change to `output`, and print what was done."""
    from gguf_tools.edit.model_edits import edit_model

    restored = _recover(target)
    outcome = edit_model(
        target.file, change, output=output, dry_run=target.dry_run, force=target.force,
        progress=not target.quiet,
    )  # fmt: skip
    if target.json:
        data = {
            "dry_run": target.dry_run,
            "restored": restored,
            "changes": [each.as_json() for each in outcome.changes],
            "files": [file.as_json() for file in outcome.files],
        }
        say_json(data)
        return
    if target.quiet:
        return
    for each in outcome.changes:
        say(each.as_text())
    if not outcome.changes:
        say(f"{target.file}: has it so already")
    for file in outcome.files:
        if file.how != "unchanged":
            say(_edit_text(file, target.dry_run))


def _edit_text(file: FileEdit, dry_run: bool) -> str:
    verb = {"in place": "changed in place", "rewritten": "written anew", "written": "written"}[file.how]
    would = "would be " if dry_run else ""
    return f"{file.path}: {would}{verb}, {bytes_text(file.bytes_written)}"


def _recover(target: _Target) -> list[str]:
    """Restore what an interrupted edit left, and say so at once, because what follows may fail."""
    from gguf_tools.edit.model_edits import recover

    restored = [str(path) for path in recover(target.file, dry_run=target.dry_run)]
    for path in restored:
        say_aside(f"{path}: an interrupted edit was undone, the header is the old one again")
    return restored


# --- splitting and merging ------------------------------------------------------------------


@dataclass(frozen=True)
class _Split(_Target):
    """Request of `split`: names, and the limits of a part."""

    prefix: Path
    max_bytes: int | None
    max_tensors: int | None
    first_is_empty: bool


def split(request: _Split) -> None:
    """Split a file, and print the parts."""
    from gguf_tools.edit.rewrite import write_files
    from gguf_tools.edit.split import split_files
    from gguf_tools.progress import Bar

    restored = _recover(request)
    with open_gguf(request.file) as source, Bar("splitting", show=not request.quiet) as bar:
        files = split_files(
            source,
            request.prefix,
            max_bytes=request.max_bytes,
            max_tensors=request.max_tensors,
            first_is_empty=request.first_is_empty,
        )
        if not request.dry_run:
            refuse_to_replace([file.path for file in files], force=request.force)
            write_files(files, source.paths, bar)
    _print_files(request, files, restored)


def merge(target: _Target, output: Path) -> None:
    """Put the files of a split set together, and print the result."""
    from gguf_tools.edit.rewrite import write_files
    from gguf_tools.edit.split import merged_file
    from gguf_tools.progress import Bar

    restored = _recover(target)
    with open_gguf(target.file) as source, Bar("merging", show=not target.quiet) as bar:
        files = [merged_file(source, output, replace=target.force)]
        if not target.dry_run:
            write_files(files, source.paths, bar)
    _print_files(target, files, restored)


def _print_files(target: _Target, files: list[NewFile], restored: list[str]) -> None:
    if target.json:
        entries = [
            {"path": str(file.path), "tensors": len(file.origins), "bytes": file.layout.total_bytes}
            for file in files
        ]
        say_json({"dry_run": target.dry_run, "restored": restored, "files": entries})
        return
    if target.quiet:
        return
    verb = "would have" if target.dry_run else "written,"
    for file in files:
        tensors = counted(len(file.origins), "tensor")
        say(f"{file.path}: {verb} {tensors}, {bytes_text(file.layout.total_bytes)}")
