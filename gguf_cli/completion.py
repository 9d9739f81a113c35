"""Shell completion, made of the parsers of the commands: `gguf-tools completion bash`, `zsh` or `fish`.

Options, subcommands, file types and the values of options are completed; where none fits, file names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")


def completes(action: argparse.Action, words: Iterable[str]) -> None:
    """Have an argument completed with `words`, which it takes besides others."""
    vars(action)["completed_with"] = tuple(words)


def completion_script(parsers: Iterable[argparse.ArgumentParser], shell: str) -> str:
    """Return what a shell has to read to complete the commands that `parsers` belong to.

    A parser named "quantize lint" is that of a subcommand of `quantize`, which comes before it.
    """
    by_name: dict[str, argparse.ArgumentParser] = {}
    commands: dict[str, dict[str, argparse.ArgumentParser]] = {}
    for parser in parsers:
        name, _, subcommand = parser.prog.partition(" ")
        if subcommand:
            commands[name][subcommand] = parser
        else:
            by_name[name], commands[name] = parser, dict(subparsers_of(parser))
    if shell == "fish":
        return "".join(
            f"{line}\n" for name, parser in by_name.items() for line in _fish_lines(parser, commands[name])
        )
    script = "\n".join(_bash_function(parser, commands[name]) for name, parser in by_name.items())
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def subparsers_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (a for a in parser._actions if a.option_strings and a.help != argparse.SUPPRESS)


def _offered(action: argparse.Action) -> list[str]:
    """Return the words that an argument is completed with; none where it takes any, such as a file."""
    if isinstance(action, argparse._SubParsersAction):
        return []
    return [*map(str, action.choices or ()), *getattr(action, "completed_with", ())]


def _positional_words(parser: argparse.ArgumentParser) -> list[str]:
    return [word for action in parser._actions if not action.option_strings for word in _offered(action)]


def _bash_function(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]
) -> str:
    name = "_" + re.sub(r"\W", "_", parser.prog)
    values = "".join(_value_cases("", parser))
    values += "".join(line for command, sub in commands.items() for line in _value_cases(command, sub))
    words = "".join(f"    {command}:*) words='{_words(sub)}' ;;\n" for command, sub in commands.items())
    return f"""\
{name}() {{
  local word command='' words
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    case "$word" in
    {"|".join(commands) or "''"}) command=$word; break ;;
    esac
  done
  case "$command:${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}{words}    *) words='{" ".join([*commands, _words(parser)])}' ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {name} {parser.prog}
"""


def _value_cases(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield what follows each option that takes a value."""
    for action in _options(parser):
        if action.nargs not in (0, "?"):
            flags = "|".join(f"{command}:{flag}" for flag in action.option_strings)
            yield f"    {flags}) words='{' '.join(_offered(action))}' ;;\n"


def _words(parser: argparse.ArgumentParser) -> str:
    """Return the options of a parser, and the words that can stand alone."""
    flags = [flag for action in _options(parser) for flag in action.option_strings]
    return " ".join([*flags, *_positional_words(parser)])


def _fish_lines(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]
) -> Iterator[str]:
    prog = parser.prog
    yield from _fish_options(
        prog, parser, f"not __fish_seen_subcommand_from {' '.join(commands)}" * bool(commands)
    )
    for command, sub in commands.items():
        yield f"complete -c {prog} -n __fish_use_subcommand -a {command}"
        yield from _fish_options(prog, sub, f"__fish_seen_subcommand_from {command}")


def _fish_options(prog: str, parser: argparse.ArgumentParser, condition: str) -> Iterator[str]:
    if positional := _positional_words(parser):
        when = f" -n '{condition}'" if condition else ""
        yield f"complete -c {prog}{when} -a '{' '.join(positional)}'"
    for action in _options(parser):
        words = [f"complete -c {prog}"]
        words += [f"-n '{condition}'"] if condition else []
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
        yield " ".join([*words, f"-d '{text}'"])
