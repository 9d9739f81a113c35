"""The parser of all commands: mistakes get one line with the nearest name, and flags of others are known.

A `ForeignFlag` is a flag of the program that a command stands in for. It is refused with what to use
instead, or accepted because nothing needs to change: what it asks for is so anyway, or can't change what is
written.

Help texts fit the width of a terminal. A description or an epilog is written like this:

    Prose, which is filled.

    a heading, and any number of these:
      name       what it is, which goes on
                 in deeper lines
      a line without a gap, kept apart from the next

    examples:
      a command --with options     what it is for

What follows `examples:` can be pasted into a shell at any width: a long command goes on behind a backslash
and is never broken within a word, and what it is for becomes a comment.

Of the parsers of the commands, `gguf-tools completion bash`, `zsh` or `fish` makes a shell's completion.
Options, subcommands, file types and the values of options are completed; where none fits, file names.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gguf_tools.commands.other_words import our_word
from gguf_tools.text import did_you_mean, say_aside

WIDTH = 100
"""Maximum width of help texts, in columns."""

EXAMPLES = "examples:"

_LONGEST_NAME = 30
_CONTINUED = " " * 6


class WrappingFormatter(argparse.HelpFormatter):
    """Help in WIDTH columns or fewer, with no name of an option or a file broken at a dash."""

    def __init__(self, prog: str, **choices: Any) -> None:
        super().__init__(prog, **choices)
        self._width = min(self._width, WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_filled(" ".join(text.split()), width, indent, indent))


class HelpFormatter(WrappingFormatter):
    """The same for a description and an epilog with lists and examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_lines(text, min(width, self._width)))


def _lines(text: str, width: int) -> Iterator[str]:
    heading = ""
    for item in _items(text):
        if not item.startswith(" "):
            heading = item
        depth = len(item) - len(item.lstrip())
        head, gap, tail = _split_at_gap(item) if depth else (item, "", "")
        if heading == EXAMPLES and depth:
            yield from _command(head, gap, tail, width)
        elif tail:
            yield from _named(head, gap, tail, width)
        else:
            yield from _filled(item.strip(), width, " " * depth, " " * depth) or [""]


def _items(text: str) -> Iterator[str]:
    """Yield paragraphs, indented lines together with deeper ones that go on from them, and empty lines."""
    item = ""
    for line in text.strip("\n").splitlines():
        depth, depth_of_item = (len(each) - len(each.lstrip()) for each in (line, item))
        goes_on = depth > depth_of_item if depth_of_item else depth == 0
        if item and line.strip() and goes_on:
            item = f"{item.rstrip()} {line.strip()}"
            continue
        if item:
            yield item
        item = line
        if not line.strip():
            yield ""
            item = ""
    if item:
        yield item


def _named(head: str, gap: str, tail: str, width: int) -> list[str]:
    """Fill the lines of `  name   what it is`."""
    start = head + gap
    if len(start) > _LONGEST_NAME:
        return [head, *_filled(tail, width, _CONTINUED, _CONTINUED)]
    return _filled(tail, width, start, " " * len(start))


def _command(head: str, gap: str, tail: str, width: int) -> Iterator[str]:
    """Yield the lines of a command, and of the comment on what it is for."""
    comment = f"# {tail}" if tail else ""
    if len(head + gap + comment) <= width:
        yield head + gap + comment
        return
    words = re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", head)
    line = "  " + words[0]
    for place, word in enumerate(words[1:], 2):
        backslash = 2 if place < len(words) else 0
        if len(line) + 1 + len(word) + backslash > width:
            yield f"{line} \\"
            line = _CONTINUED + word
        else:
            line += f" {word}"
    yield line
    if comment:
        yield from _filled(comment, width, _CONTINUED, f"{_CONTINUED}# ")


def _filled(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def _split_at_gap(item: str) -> tuple[str, str, str]:
    """Split an item at the first gap of two blanks or more: the text before it, the gap, the rest."""
    match = re.fullmatch(r"(\s*\S.*?)(\s{2,})(\S.*)", item)
    return (match[1], match[2], match[3]) if match else (item, "", "")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help is not too wide."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": WrappingFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Print one line on standard error and exit with 2."""
        say_aside(f"{self.prog}: error: {message} ({self.prog} --help explains)")
        sys.exit(2)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        actions = {
            name: action
            for parser in self._parsers_of(words)
            for name, action in parser._option_string_actions.items()
        }
        own = [name for name, action in actions.items() if not isinstance(action, _ForeignAction)]
        # Before argparse takes the value of an unknown option for a command.
        for word in words[: words.index("--") if "--" in words else None]:
            flag, _, value = word.partition("=")
            if flag in actions and value == "--":  # which argparse would drop
                self.error(f"argument {flag}: expected a value, found '--'")
            if flag in actions or not flag.startswith("-"):
                continue
            answer = our_word(flag, own)
            is_known = not flag.startswith("--") or any(name.startswith(flag) for name in own)
            if answer or not is_known:
                self.error(f"unknown option {flag}{answer or did_you_mean(flag, own)}")
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            what = "unknown option" if unknown[0].startswith("-") else "unexpected argument"
            self.error(f"{what} {unknown[0]!r}")
        return parsed

    def _parsers_of(self, words: Sequence[str]) -> Iterator[argparse.ArgumentParser]:
        """Yield this parser and that of the subcommand among `words`."""
        yield self
        for action in self._actions:
            if isinstance(action.choices, dict):
                yield from (action.choices[word] for word in words if word in action.choices)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Find the options that an abbreviation may mean; flags of other programs must be written out."""
        tuples: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in tuples if not isinstance(each[0], _ForeignAction)]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        near = did_you_mean(str(value), names) or f"; expected one of {', '.join(names)}"
        other = getattr(action, "otherwise", "")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}{other}")


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another program.

    names    its spellings
    why      what to use instead, or why it changes nothing here
    values   how many values follow it: 0, 1, or "?" for one that may be absent
    refused  whether it ends the command
    """

    names: tuple[str, ...]
    why: str
    values: int | str = 0
    refused: bool = True


def add_foreign_flags(parser: argparse.ArgumentParser, program: str, flags: Iterable[ForeignFlag]) -> None:
    """Let a parser know flags of `program`; its --help does not show them."""
    for flag in flags:
        parser.add_argument(
            *flag.names, action=_ForeignAction, nargs=flag.values, flag=flag, program=program,
            dest=argparse.SUPPRESS, default=argparse.SUPPRESS, help=argparse.SUPPRESS,
        )  # fmt: skip


class _ForeignAction(argparse.Action):
    """Refuses a foreign flag, or notes in `args.remarks` that it changes nothing."""

    def __init__(self, *, flag: ForeignFlag, program: str, **options: Any) -> None:
        super().__init__(**options)
        self._flag, self._program = flag, program

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        if self._flag.refused:
            parser.error(f"{option_string} of {self._program}: {self._flag.why}")
        remark = f"{option_string} changes nothing: {self._flag.why}"
        namespace.remarks = [*getattr(namespace, "remarks", ()), remark]


SHELLS = ("bash", "zsh", "fish")

Parsers = Mapping[str, argparse.ArgumentParser]
"""Parsers by the words behind a program's name that call them: "" for the program's own, "imatrix show"."""


def completes(action: argparse.Action, words: Iterable[str]) -> None:
    """Have an argument completed with `words`, which it takes besides others."""
    vars(action)["completed_with"] = tuple(words)


def otherwise(action: argparse.Action, hint: str) -> None:
    """Have an argument that is no choice answered with `hint`, too."""
    vars(action)["otherwise"] = f"; {hint}"


def completion_script(parsers: Mapping[str, argparse.ArgumentParser], shell: str) -> str:
    """Write the script that a shell reads to complete commands.

    parsers  of all commands and subcommands, by the words that call them
    """
    programs: dict[str, dict[str, argparse.ArgumentParser]] = {}
    for name, parser in parsers.items():
        program, _, words = name.partition(" ")
        programs.setdefault(program, {})[words] = parser
    if shell == "fish":
        return "".join(f"{line}\n" for program, own in programs.items() for line in _fish_lines(program, own))
    script = "\n".join(_bash_function(program, own) for program, own in programs.items())
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def subparsers_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The subcommands of a parser, by name."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            return action.choices
    return {}


def _commands_of(words: str, parsers: Parsers) -> list[str]:
    """The words that call a subcommand behind `words`."""
    return [last for each in parsers if each for first, _, last in [each.rpartition(" ")] if first == words]


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (a for a in parser._actions if a.option_strings and a.help != argparse.SUPPRESS)


def _offered(action: argparse.Action) -> list[str]:
    """The words that an argument is completed with; none where it takes any, such as a file."""
    if isinstance(action.choices, dict):
        return []
    return [*map(str, action.choices or ()), *getattr(action, "completed_with", ())]


def _positional_words(parser: argparse.ArgumentParser) -> list[str]:
    return [word for action in parser._actions if not action.option_strings for word in _offered(action)]


def _bash_function(program: str, parsers: Parsers) -> str:
    name = "_" + re.sub(r"\W", "_", program)
    values = "".join(line for words, parser in parsers.items() for line in _value_cases(words, parser))
    lines = {words: [*_commands_of(words, parsers), *_words(each)] for words, each in parsers.items()}
    offers = "".join(f"    '{words}':*) words='{' '.join(line)}' ;;\n" for words, line in lines.items())
    return f"""\
{name}() {{
  local word command='' words
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    case "${{command:+$command }}$word" in
    {"|".join(f"'{words}'" for words in parsers if words) or "''"}) command="${{command:+$command }}$word" ;;
    esac
  done
  case "$command:${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}{offers}  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {name} {program}
"""


def _value_cases(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a case for each option that takes a value, with the words that may follow it."""
    for action in _options(parser):
        if action.nargs not in (0, "?"):
            flags = "|".join(f"'{command}:{flag}'" for flag in action.option_strings)
            yield f"    {flags}) words='{' '.join(_offered(action))}' ;;\n"


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser, and the words that can stand alone."""
    flags = [flag for action in _options(parser) for flag in action.option_strings]
    return [*flags, *_positional_words(parser)]


def _fish_lines(program: str, parsers: Parsers) -> Iterator[str]:
    for words, parser in parsers.items():
        conditions = [f"__fish_seen_subcommand_from {word}" for word in words.split()]
        subcommands = _commands_of(words, parsers)
        if subcommands:
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(subcommands)}")
        condition = "; and ".join(conditions)
        yield from (_fish_line(program, condition, f"-a {name}") for name in subcommands)
        yield from _fish_options(program, parser, condition)


def _fish_options(program: str, parser: argparse.ArgumentParser, condition: str) -> Iterator[str]:
    if positional := _positional_words(parser):
        yield _fish_line(program, condition, f"-a '{' '.join(positional)}'")
    for action in _options(parser):
        words = []
        for flag in action.option_strings:
            name = flag.lstrip("-")
            words.append(
                f"-l {name}" if flag.startswith("--") else f"-o {name}" if len(name) > 1 else f"-s {name}"
            )
        if offered := _offered(action):
            words.append(f"-x -a '{' '.join(offered)}'")
        elif action.nargs != 0:
            words.append("-r")
        text = (action.help or "").replace("%(default)s", str(action.default)).split(";")[0].replace("'", "’")
        yield _fish_line(program, condition, *words, f"-d '{text}'")


def _fish_line(program: str, condition: str, *words: str) -> str:
    return " ".join([f"complete -c {program}", *([f"-n '{condition}'"] if condition else []), *words])
