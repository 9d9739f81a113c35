"""How a command runs and ends; shared by all commands of this project.

    def main(argv=None):
        parser = command.make_parser("gguf-tools", "what it does", epilog=EXAMPLES)
        parser.add_argument("file")
        return command.run(parser, show, argv)

`show` gets the parsed arguments and returns nothing, or an exit code:

    0    done
    1    an error, told in one line on standard error; what `show` returns, if it returns 1
    2    arguments that make no sense
    130  interrupted
    141  the reader of the output has stopped reading
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gguf_cli.parser import HelpFormatter, Parser
from gguf_cli.roof import called_by
from gguf_tools.errors import BadArgument, ToolkitError
from gguf_tools.files import named_files
from gguf_tools.files.overwriting import refuse_shared
from gguf_tools.hub import limits
from gguf_tools.system.files import WORKING_FOLDER_IS_GONE
from gguf_tools.system.locks import MAX_THREADS
from gguf_tools.text import quoted


class StoreOutput(argparse.Action):
    """Stores a path that the command writes to, and notes it for `refuse_shared_arguments`.

    may_be  arguments whose file it may be: what is written there takes in what was read
    """

    def __init__(self, *, may_be: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        self._may_be = may_be

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        setattr(namespace, self.dest, values)
        name = option_string or str(self.metavar or self.dest)
        output = _Output(Path(values), frozenset({self.dest, *self._may_be}))
        namespace.written = {**getattr(namespace, "written", {}), name: output}


class StoreOnce(argparse.Action):
    """Stores the value of an option that names one input; a second one is an error, not the last in silence.

    instead  what to do with several, for the message
    """

    def __init__(self, *, instead: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._instead = instead

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        earlier = getattr(namespace, self.dest, None)
        if earlier is not self.default:
            parser.error(f"{option_string} is given twice, {earlier} and {values}: name one{self._instead}")
        setattr(namespace, self.dest, values)


class _Output(NamedTuple):
    """A path that a command writes to, and the arguments that may name it: its own, and some others."""

    path: Path
    arguments: frozenset[str]


def refuse_shared_arguments(args: argparse.Namespace) -> None:
    """Raise BadRequest if a path that the arguments name as an output stands for something else, too.

    Every other path among the arguments counts as an input; whatever a folder or a split set holds, as well.
    """
    written: Mapping[str, _Output] = getattr(args, "written", {})
    for name, output in written.items():
        own = output.arguments | {"written", "typed"}
        others = [path for each, value in vars(args).items() if each not in own for path in _paths_in(value)]
        refuse_shared({name: output.path}, others)


def _paths_in(value: Any) -> Iterator[Path]:
    """Yield the paths in the value of an argument; any text may be one."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, str):
        for text in {value, *value.split(",")}:
            if text and len(text) < _LONGEST_NAME and "\0" not in text:
                yield Path(text)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths_in(each)


_LONGEST_NAME = 4096


def add_force(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Give a parser --force, for what `refuse_to_replace` refuses."""
    parser.add_argument("--force", action="store_true", help="replace outputs that are there already")


BAD_ARGUMENTS = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
MAX_SEED = (1 << 63) - 1
"""The largest seed of torch's generators."""

MAX_CHARS = 4000
"""Maximum length of a message: a file may hold a tensor name of any length."""

Body = Callable[[argparse.Namespace], "int | None"]


def make_parser(prog: str, description: str, *, epilog: str = "", version: str) -> argparse.ArgumentParser:
    """Make a parser with `--version` and `--verbose`; texts keep their line breaks.

    prog    the words that call the command, which its messages begin with
    epilog  what the help ends with; its examples call commands by their own names
    """
    parser = Parser(
        prog, description=description, epilog=called_by(prog, epilog), formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    add_verbose(parser)
    return parser


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Give a parser (or a subcommand's) `--verbose`."""
    # SUPPRESS keeps a subcommand's default from undoing what stood in front of it.
    parser.add_argument(
        "--verbose", action="store_true", default=argparse.SUPPRESS, help="show where an error arose"
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Give the parser of long work `--quiet`."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", default=argparse.SUPPRESS,
        help="print nothing but errors, and what was asked for",
    )  # fmt: skip


def add_timeout(parser: argparse._ActionsContainer) -> None:
    """Give the parser of work with the Hub `--timeout`, which `run` minds."""
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=limits.seconds, default=limits.DEFAULT_SECONDS,
        help=f"longest time that a busy Hub may ask to wait (default: {limits.DEFAULT_SECONDS:.0f})",
    )  # fmt: skip


def add_source_and_output(parser: argparse.ArgumentParser) -> None:
    """Give the parser of what makes one file of another IN and OUT."""
    parser.add_argument("source", type=Path, metavar="IN", help="a GGUF file, or any file of a split set")
    parser.add_argument(
        "output", type=output_file, metavar="OUT", nargs="?", help="not needed with --dry-run"
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Give the parser of work on several threads `--threads`."""
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="how many threads (default: one per core)"
    )


def add_scheduler(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Give the parser of work that other machines can share `--scheduler`; `more` ends its help."""
    parser.add_argument(
        "--scheduler", metavar="ADDRESS",
        help="have the workers of a Dask scheduler do it, such as tcp://10.0.0.1:8786; they must see the same"
        f" files under the same names. local:N starts N processes here{more}",
    )  # fmt: skip


def output_file(text: str) -> Path:
    """Read an argument as the path of a file that can be written."""
    return _output(named_files.output_path, text)


def output_file_or_folder(text: str) -> Path:
    """Read an argument as the path of a file that can be written, or of a folder that is there."""
    return _output(partial(named_files.output_path, may_be_folder=True), text)


def output_prefix(text: str) -> Path:
    """Read an argument as the beginning of several files' names."""
    return _output(named_files.output_prefix, text)


def output_folder(text: str) -> Path:
    """Read an argument as the path of a folder that can be filled."""
    return _output(named_files.output_folder, text)


def _output(path_of: Callable[[str], Path], text: str) -> Path:
    try:
        return path_of(text)
    except BadArgument as error:  # what is in the way of a good name is no mistake of the command line's
        raise argparse.ArgumentTypeError(one_line(error)) from error


def threads(text: str) -> int:
    """Read an argument as a number of threads."""
    return _whole(text, 1, MAX_THREADS)


def seed(text: str) -> int:
    """Read an argument as the seed of a random generator."""
    return _whole(text, 0, MAX_SEED)


def _whole(text: str, least: int, most: int) -> int:
    number = int(text)
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number from {least} to {most}")
    return number


def positive(text: str) -> int:
    """Read an argument as a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def natural(text: str) -> int:
    """Read an argument as a whole number from 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def gigabytes(text: str) -> int:
    """Read an argument in gigabytes, of 2**30 bytes each, as a number of bytes."""
    number = float(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a size in gigabytes")
    return int(number * (1 << 30))


class Subcommands:
    """The subcommands of a parser; each sets `body`, which `run` calls."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def name(self, name: str, text: str) -> None:
        """List a subcommand that this command line does not call."""
        self._commands.add_parser(name, help=text)

    def add(
        self, name: str, body: Body, text: str, detail: str, *, epilog: str = "", json: bool = True
    ) -> argparse.ArgumentParser:
        """Make the parser of a new subcommand, which still needs its arguments.

        text    one line for the list of commands, lower case, without a full stop
        detail  what else its own --help says, in whole sentences
        epilog  what it ends with: examples
        json    give it --json
        """
        sub = self._commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {detail.lstrip()}",
            epilog=epilog,
            formatter_class=HelpFormatter,
        )
        sub.set_defaults(body=body)
        if json:
            sub.add_argument("--json", action="store_true", help="print one JSON value instead of text")
        add_verbose(sub)
        return sub


def run(parser: argparse.ArgumentParser, body: Body, argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, call `body` with the result, and return the exit code.

    The arguments have the words of the command line as `typed`, and `quiet`, whether or not there is --quiet.
    Errors that are the input's or the environment's fault become one line; a bug keeps its traceback.
    """
    _print_anything(sys.stdout)
    try:
        args = parser.parse_args(argv)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    except ToolkitError as error:
        print(f"{parser.prog}: error: {one_line(error)}", file=sys.stderr)
        return 1
    args.typed = (*parser.prog.split(), *(sys.argv[1:] if argv is None else argv))
    verbose = bool(getattr(args, "verbose", False))
    args.quiet = bool(getattr(args, "quiet", False))
    limits.allow(getattr(args, "timeout", limits.DEFAULT_SECONDS))
    for remark in () if args.quiet else getattr(args, "remarks", ()):
        print(f"{parser.prog}: note: {remark}", file=sys.stderr)
    try:
        if hasattr(args, "written"):
            refuse_shared_arguments(args)
        code = body(args)
        sys.stdout.flush()
        return code or 0
    except SystemExit as exit_:  # parser.error called by the body
        return int(exit_.code or 0)
    except KeyboardInterrupt as error:
        if verbose:
            traceback.print_exc()
        notes = _notes(error)
        if not notes and hasattr(args, "restart"):
            notes = ["nothing is finished yet: the same command starts from the beginning"]
        print("; ".join([f"{parser.prog}: interrupted", *notes]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ToolkitError, OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, ToolkitError | OSError | MemoryError) and str(error) != NO_THREAD:
            raise
        if verbose:
            traceback.print_exc()
        print(f"{parser.prog}: error: {one_line(error)}", file=sys.stderr)
        return BAD_ARGUMENTS if isinstance(error, BadArgument) else 1


NO_THREAD = "can't start new thread"
"""What Python says in a RuntimeError where the system gives no thread."""


def one_line(error: BaseException) -> str:
    """Write an error and its notes as one line, without anything that controls a terminal."""
    if isinstance(error, OSError) and not isinstance(error, ToolkitError) and error.strerror:
        name = error.filename if error.filename is not None else error.filename2
        reason = "is a folder, expected a file" if isinstance(error, IsADirectoryError) else error.strerror
        text = f"{os.fsdecode(name)}: {reason}" if isinstance(name, str | bytes) else reason
        if name is None and isinstance(error, FileNotFoundError):
            text = WORKING_FOLDER_IS_GONE  # its name is all that is asked for without naming a file
    elif isinstance(error, MemoryError):
        text = "out of memory"
    elif str(error) == NO_THREAD:
        text = f"{NO_THREAD}: this user may have no more processes (ulimit -u)"
    else:
        text = str(error) or type(error).__name__
    line = " ".join("; ".join([text, *_notes(error)]).split("\n")).strip()
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line[:MAX_CHARS])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _print_anything(stream: object) -> None:
    """Make `stream` print characters that its encoding lacks as escapes, instead of raising in the middle."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
