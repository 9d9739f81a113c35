"""Command line arguments of how a model is computed, shared by the commands that run the forward pass."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeVar

from gguf_tools.argument_types import CHUNKS, COUNT
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.command import StoreOnce, StoreOutput, TakesArguments

if TYPE_CHECKING:
    from imatrix.forward.options import ForwardOptions
    from imatrix.texts.tokens import Cut


T = TypeVar("T")

OR_FOLDER = "or a folder: each file and folder in it is a class of text, and gets an equal share of --chunks"
"""Help of an argument that names a text to learn from."""


DEFAULT_CONTEXT = 512
"""Tokens per chunk, as `imatrix.texts.tokens.Cut` has them, which takes a second to load."""


def add_text_and_output(group: TakesArguments, metavar: str, what: str) -> None:
    """Add -f, -o, -c and --chunks of a command that makes a file of a text; `what` is the help of -o."""
    group.add_argument(
        "-f", "--file", dest="text", type=command.text_file, action=StoreOnce, required=True, metavar="TEXT",
        help=f"UTF-8 text, {OR_FOLDER}",
    )  # fmt: skip
    group.add_argument(
        "-o", "--output", type=command.output_file, action=StoreOutput, required=True, metavar=metavar,
        help=what,
    )  # fmt: skip
    add_context_argument(group)
    add_chunks_argument(group)


def add_chunks_argument(
    group: TakesArguments,
    name: str = "--chunks",
    what: str = "use at most N chunks; -1: all",
) -> None:
    """Add --chunks, how much of a text is used, or its like for another text; `what` is its help."""
    dest = "n_chunks" if name == "--chunks" else None
    group.add_argument(name, type=command.argument(_n_chunks), dest=dest, metavar="N", help=what)


def _n_chunks(text: str) -> int | None:
    """Read a number of chunks as Cut has it: None for all."""
    number = int(CHUNKS.parse(text))
    return None if number == CHUNKS.besides else number


def add_context_argument(group: TakesArguments) -> None:
    """Add -c, the length of a chunk of text."""
    group.add_argument(
        "-c", "--ctx-size", dest="chunk_size", type=command.number(COUNT), default=DEFAULT_CONTEXT,
        metavar="N", help="tokens per chunk (default: %(default)s)",
    )  # fmt: skip


def add_force_of_text(group: TakesArguments) -> None:
    """Add --force of a command that replaces outputs and learns from a text."""
    group.add_argument(
        "--force", action="store_true",
        help="replace existing outputs, even those that are already what you asked for; and use a text that"
        " is nonsense (one token over and over, copies of a passage), with a warning that even -q prints",
    )  # fmt: skip


def cut_of(args: argparse.Namespace) -> Cut:
    """Read which part of a text is used."""
    from imatrix.texts.tokens import Cut

    return filled(Cut, args)


def add_run_arguments(parser: argparse.ArgumentParser) -> TakesArguments:
    """Add device, dtype, threads, memory, --timeout and --restart; return their group, for more."""
    command.add_quiet(parser)
    run = parser.add_argument_group("how to run it")
    run.add_argument("--device", help="torch device: cpu, cuda, cuda:1 ... (default: CUDA if available)")
    run.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="number format of matrix products (default: %(default)s)",
    )  # fmt: skip
    command.add_threads(run)
    command.add_timeout(run)
    run.add_argument(
        "--memory", dest="memory_bytes", type=command.gigabytes, default=4 << 30, metavar="GB",
        help="keep at most GB gigabytes of hidden states in memory; the rest goes to a file (default: 4)",
    )  # fmt: skip
    run.add_argument("--restart", action="store_true", help="start over, and don't resume an interrupted run")
    return run


def add_dry_run(run: TakesArguments) -> None:
    """Add --dry-run of a command that computes a model."""
    run.add_argument(
        "--dry-run", action="store_true",
        help="print the memory, disk space and time that a run takes; read only headers and texts",
    )  # fmt: skip


def options_of_text(options: type[T], args: argparse.Namespace, **given: Any) -> T:
    """Read the options of what learns from a text; what is `given` comes first."""
    how = {"cut": cut_of(args), "forward": forward_options(args), "any_text": args.force}
    return filled(options, args, **how | given)


def forward_options(args: argparse.Namespace, **given: Any) -> ForwardOptions:
    """Read how a model is computed; what is `given` comes first."""
    from imatrix.forward.options import ForwardOptions

    return filled(ForwardOptions, args, **given)
