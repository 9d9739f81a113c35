"""Shell completion, made of the parsers of the commands: `gguf-tools completion bash`, `zsh` or `fish`.

Options, subcommands, file types and the values of options are completed; where none fits, file names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")

Parsers = Mapping[str, argparse.ArgumentParser]
"""Parsers by the words behind a program's name that call them: "" for the program's own, "imatrix show"."""


def completes(action: argparse.Action, words: Iterable[str]) -> None:
    """Have an argument completed with `words`, which it takes besides others."""
    vars(action)["completed_with"] = tuple(words)


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
