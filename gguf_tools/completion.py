"""Shell completion, made of the parsers of the commands: `gguf-tools completion bash`, `zsh` or `fish`.

Options and subcommands are completed, and where none fits, file names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")


def completion_script(parsers: Iterable[argparse.ArgumentParser], shell: str) -> str:
    """Return what a shell has to read to complete the commands that `parsers` belong to."""
    if shell == "fish":
        return "\n".join(line for parser in parsers for line in _fish_lines(parser)) + "\n"
    script = "\n".join(_bash_function(parser) for parser in parsers)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def subparsers_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (a for a in parser._actions if a.option_strings and a.help != argparse.SUPPRESS)


def _bash_function(parser: argparse.ArgumentParser) -> str:
    name = "_" + re.sub(r"\W", "_", parser.prog)
    commands = subparsers_of(parser)
    cases = "".join(f"    {command}) words='{_words(sub)}'; break ;;\n" for command, sub in commands.items())
    return f"""\
{name}() {{
  local word words='{" ".join([*commands, _words(parser)])}'
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in
{cases}    *) ;;
    esac
  done
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {name} {parser.prog}
"""


def _words(parser: argparse.ArgumentParser) -> str:
    """Return the options of a parser, and the words that they can be followed by."""
    flags = [flag for action in _options(parser) for flag in action.option_strings]
    choices = [str(choice) for action in _options(parser) for choice in action.choices or ()]
    return " ".join([*flags, *choices])


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    prog, commands = parser.prog, subparsers_of(parser)
    yield from _fish_options(
        prog, parser, f"not __fish_seen_subcommand_from {' '.join(commands)}" * bool(commands)
    )
    for command, sub in commands.items():
        yield f"complete -c {prog} -n __fish_use_subcommand -a {command}"
        yield from _fish_options(prog, sub, f"__fish_seen_subcommand_from {command}")


def _fish_options(prog: str, parser: argparse.ArgumentParser, condition: str) -> Iterator[str]:
    for action in _options(parser):
        words = [f"complete -c {prog}"]
        words += [f"-n '{condition}'"] if condition else []
        for flag in action.option_strings:
            name = flag.lstrip("-")
            words.append(
                f"-l {name}" if flag.startswith("--") else f"-o {name}" if len(name) > 1 else f"-s {name}"
            )
        if action.choices:
            words.append(f"-x -a '{' '.join(map(str, action.choices))}'")
        elif action.nargs != 0:
            words.append("-r")
        text = (action.help or "").replace("%(default)s", str(action.default)).split(";")[0].replace("'", "’")
        yield " ".join([*words, f"-d '{text}'"])
