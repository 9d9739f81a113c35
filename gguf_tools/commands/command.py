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
    141  the reader of the output has stopped reading before the end of what was asked for

Work goes on to its end whatever becomes of the streams, and the exit code tells of the work. Only where the
answer itself is printed (`answers`, --json, --dry-run, --help) does a reader that stops make it 141, in
silence, and a full disk 1. A stream that was closed from the start is not missed.
What can't be written goes nowhere, and `LastingStream.error` tells afterwards that something was lost.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO, TypeGuard, TypeVar

from gguf_tools import __version__
from gguf_tools.argument_types import GIGABYTES, SECONDS, THREADS, NumberType
from gguf_tools.choices import flags_of, speaking_flags
from gguf_tools.cluster.address import ADDRESS
from gguf_tools.commands.parser import HelpFormatter, Parser, completes
from gguf_tools.commands.roof import called_by
from gguf_tools.errors import BadArgument, BadOverride, BadRequest, MissingInput, ToolkitError
from gguf_tools.files import named_files
from gguf_tools.files.early_checks import refuse_shared
from gguf_tools.hub import limits
from gguf_tools.system.files import WORKING_FOLDER_IS_GONE, open_file
from gguf_tools.text import printable, say_aside


class TakesArguments(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, *names: str, **how: Any) -> argparse.Action: ...

    def add_mutually_exclusive_group(self) -> TakesArguments: ...


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Base of what a command line asks for: what many commands are told in the same words.

    dry_run  plan, and write nothing
    json     print one JSON value instead of text
    summary  leave the tensors out of a plan
    force    replace outputs that are there already
    quiet    print nothing but errors, and what was asked for
    typed    the command line, for a card

    `gguf_tools.choices.filled` makes it of the arguments.
    """

    dry_run: bool = False
    json: bool = False
    summary: bool = False
    force: bool = False
    quiet: bool = False
    typed: tuple[str, ...] = ()


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


def add_flags(group: TakesArguments, options: type[Any], only: Collection[str] = (), **words: str) -> None:
    """Add the flags that the fields of options bear, in their order.

    only   names of fields; empty: all
    words  what stands in help texts in place of {type} and the like
    """
    for each, flag in flags_of(options):
        if only and each.name not in only:
            continue
        name = each.name.replace("_", "-")
        how: dict[str, Any] = {"metavar": flag.metavar, "type": flag.parse and argument(flag.parse)}
        if isinstance(each.default, bool):
            name = f"no-{name}" if each.default else name
            how = {"action": "store_false" if each.default else "store_true"}
        action = group.add_argument(
            *flag.names or [f"--{name}"], dest=each.name, default=each.default,
            help=flag.text.format(**words), **how,
        )  # fmt: skip
        completes(action, flag.words)


def add_force(parser: TakesArguments) -> None:
    """Give a parser --force, for what `refuse_to_replace` refuses."""
    parser.add_argument("--force", action="store_true", help="replace existing outputs")


BAD_ARGUMENTS = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
MAX_CHARS = 4000
"""Maximum length of a message: a file may hold a tensor name of any length."""

T = TypeVar("T")

Body = Callable[[argparse.Namespace], "int | None"]


def make_parser(prog: str, description: str, *, epilog: str = "") -> argparse.ArgumentParser:
    """Make a parser with `--version` and `--verbose`; texts keep their line breaks.

    prog    the words that call the command, which its messages begin with
    epilog  what the help ends with; its examples call commands by their own names
    """
    parser = Parser(
        prog, description=description, epilog=called_by(prog, epilog), formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
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
        help="print only errors, and what was asked for",
    )  # fmt: skip


def add_timeout(parser: TakesArguments) -> None:
    """Give the parser of work with the Hub `--timeout`, which `run` minds."""
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=number(SECONDS), default=limits.DEFAULT_SECONDS,
        help=f"longest time that a busy Hub may ask to wait (default: {limits.DEFAULT_SECONDS:.0f})",
    )  # fmt: skip


def add_threads(parser: TakesArguments) -> None:
    """Give the parser of work on several threads `-t`."""
    parser.add_argument(
        "-t", "--threads", dest="n_threads", type=number(THREADS), metavar="N",
        help="how many threads (default: one per core)",
    )  # fmt: skip


def add_scheduler(parser: TakesArguments, more: str = "") -> None:
    """Give the parser of work that other machines can share `--scheduler`; `more` ends its help."""
    parser.add_argument(
        "--scheduler", type=argument(ADDRESS.parse), metavar="ADDRESS",
        help="let the workers of a Dask scheduler do the work, such as tcp://10.0.0.1:8786; they must see"
        f" the same files under the same names. local:N starts N processes here{more}",
    )  # fmt: skip


def argument(parse: Callable[[str], T], *, passed: tuple[type[ToolkitError], ...] = ()) -> Callable[[str], T]:
    """Return a type for argparse: what `parse` refuses is a mistake of the command line.

    What is in the way of a good name is none.

    passed  errors of `parse` that are no mistakes of the command line either
    """

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except passed:
            raise
        except (BadRequest, BadOverride) as error:
            raise argparse.ArgumentTypeError(one_line(error)) from error

    return parse_argument


_GONE = (MissingInput,)  # the working directory is
output_file = argument(named_files.output_path, passed=_GONE)
output_file_or_folder = argument(partial(named_files.output_path, may_be_folder=True), passed=_GONE)
output_prefix = argument(named_files.output_prefix, passed=_GONE)
output_folder = argument(named_files.output_folder, passed=_GONE)
"""Types of arguments that name what is written; see gguf_tools/files/named_files.py."""


def _text(text: str) -> Path:
    path = Path(text)
    is_model = path.suffix.lower() in (".gguf", ".safetensors")
    if is_model or os.path.exists(path / "config.json"):  # Path.exists raises errors
        raise BadArgument(f"{text} is a model, but was taken for TEXT, which is missing")
    return path


text_file = argument(_text)
"""Type of an argument that names a text, or a folder of texts."""


def number(kind: NumberType) -> Callable[[str], float]:
    """Return a type for argparse that reads such numbers."""
    return argument(kind.parse)


def gigabytes(text: str) -> int:
    """Read an argument in gigabytes, of 2**30 bytes each, as a number of bytes."""
    return int(number(GIGABYTES)(text) * (1 << 30))


class Subcommands:
    """The subcommands of a parser; each sets `body`, which `run` calls."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def name(self, name: str, text: str) -> None:
        """List a subcommand that this command line does not call."""
        self._commands.add_parser(name, help=text)

    def add(
        self, name: str, body: Body, text: str, detail: str, *, epilog: str = "", json: bool = True,
        answers: bool = False,
    ) -> argparse.ArgumentParser:  # fmt: skip
        """Make the parser of a new subcommand, which still needs its arguments.

        text     one line for the list of commands, lower case, without a full stop
        detail   what else its own --help says, in whole sentences
        epilog   what it ends with: examples
        json     give it --json
        answers  what it prints is all that it is called for
        """
        sub = self._commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {detail.lstrip()}",
            epilog=epilog,
            formatter_class=HelpFormatter,
        )
        sub.set_defaults(body=body, answers=answers)
        if json:
            sub.add_argument("--json", action="store_true", help="print one JSON value instead of text")
        add_verbose(sub)
        return sub


@speaking_flags()
def run(parser: argparse.ArgumentParser, body: Body, argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, call `body` with the result, and return the exit code.

    The arguments have the words of the command line as `typed`, and `quiet`, whether or not there is --quiet.
    Errors that are the input's or the environment's fault become one line; a bug keeps its traceback.
    """
    with lasting_streams() as out:
        args = argparse.Namespace(answers=True)
        try:
            args = parser.parse_args(argv)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        except ToolkitError as error:
            code = _tell_error(parser, error)
        else:
            args.typed = (*parser.prog.split(), *(sys.argv[1:] if argv is None else argv))
            args.quiet = bool(getattr(args, "quiet", False))
            code = _carry_out(parser, body, args)
        out.flush()
        if code or out.error is None or not _prints_its_answer(args):
            return code
        if isinstance(out.error, BrokenPipeError):
            return PIPE_CLOSED
        say_aside(
            f"{parser.prog}: error: standard output: {out.error.strerror}; what is missing was not written"
        )
        return 1


def _prints_its_answer(args: argparse.Namespace) -> bool:
    """Whether what is printed is the answer, rather than an account of what was made."""
    only_prints = getattr(args, "answers", False) and not hasattr(args, "written")
    return only_prints or True in (getattr(args, "json", None), getattr(args, "dry_run", None))


def _carry_out(parser: argparse.ArgumentParser, body: Body, args: argparse.Namespace) -> int:
    verbose = bool(getattr(args, "verbose", False))
    limits.allow(getattr(args, "timeout", limits.DEFAULT_SECONDS))
    for remark in () if args.quiet else getattr(args, "remarks", ()):
        say_aside(f"{parser.prog}: note: {remark}")
    try:
        if hasattr(args, "written"):
            refuse_shared_arguments(args)
        return body(args) or 0
    except SystemExit as exit_:  # parser.error called by the body
        return int(exit_.code or 0)
    except KeyboardInterrupt as error:
        if verbose:
            _say_trace(error)
        notes = _notes(error)
        if not notes and hasattr(args, "restart"):
            notes = ["nothing is finished yet: the same command starts from the beginning"]
        say_aside("; ".join([f"{parser.prog}: interrupted", *notes]))
        return INTERRUPTED
    except (ToolkitError, OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, ToolkitError | OSError | MemoryError) and str(error) != NO_THREAD:
            raise
        if verbose:
            _say_trace(error)
        return _tell_error(parser, error)


def _tell_error(parser: argparse.ArgumentParser, error: BaseException) -> int:
    """Print an error; return the exit code that goes with it."""
    say_aside(f"{parser.prog}: error: {one_line(error)}")
    return BAD_ARGUMENTS if isinstance(error, BadArgument) else 1


def _say_trace(error: BaseException) -> None:
    for part in traceback.format_exception(error):
        # The lines of a frame are ours; a message may hold anything.
        say_aside(*part.rstrip("\n").split("\n") if part.startswith("  File ") else [part.rstrip("\n")])


NO_THREAD = "can't start new thread"
"""Message of Python's RuntimeError where the system gives no thread."""


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
    line = "; ".join([text, *_notes(error)]).strip()
    if len(line) > MAX_CHARS:  # of a long name; what is wrong with it comes behind
        line = f"{line[: MAX_CHARS // 2]}...{line[-MAX_CHARS // 2 :]}"
    return printable(line)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


class LastingStream:
    """A stream that can be written to for as long as the work takes.

    error  the first one of writing, None: all was written
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is None:
            with self._noting():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            with self._noting():
                self._stream.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            # Python writes what it still holds when it ends; that goes nowhere, too.
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Let standard output and error last for a command; give the output."""
    _fill_gaps()
    before = sys.stdout, sys.stderr
    nowhere = _nowhere()
    out, err = (LastingStream(stream if _is_open(stream) else nowhere) for stream in before)
    sys.stdout, sys.stderr = out, err
    if _is_open(before[0]) and hasattr(before[0], "reconfigure"):
        before[0].reconfigure(errors="backslashreplace")  # instead of an error in the middle
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        nowhere.close()


def _nowhere() -> TextIO:
    """Return a stream for what has no reader."""
    try:
        return open(os.devnull, "w")
    except OSError:  # no more files may be open
        return io.StringIO()


def _is_open(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not getattr(stream, "closed", False)


def _fill_gaps() -> None:
    """Open what is closed of the three standard files, so that no file of ours gets its number.

    What other libraries and processes write to standard output or error would go into it. Where no file can
    be opened at all, the command says so itself.
    """
    with suppress(OSError):
        while (number := open_file(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
