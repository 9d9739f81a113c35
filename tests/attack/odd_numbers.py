"""Odd numbers for every option, of every command, that takes a number."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from tests.attack import places
from tests.attack.commands import COMMANDS, READERS, Command
from tests.attack.places import Failure
from tests.attack.trials import DONE, LINE, Bench, Result, Trial

NUMBERS = (
    "inf",
    "-inf",
    "nan",
    "1e400",
    "-1",
    "-7",
    "0",
    "99999999999999999999",
    "1e-400",
    "0x10",
    "1_0",
    "",
    "٣",
)
"""Tried in turn with each option; what is no number of any kind must be refused, whatever the option."""

NEVER = {"inf", "-inf", "nan", "1e400", "", "-7"}

_METAVARS = {"N", "M", "R", "GB", "SECONDS", "SIZE", "SIZE,...", "N(M|G)", "L0,L1,..."}


def odd_numbers(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Give options odd numbers: what can't be is refused before any work, and nothing hangs."""
    cases = [(command, option, number) for command, option in numeric_options() for number in NUMBERS]
    random.Random(seed).shuffle(cases)
    for number in wanted:
        command, option, value = cases[number % len(cases)]
        odd = replace(command, typed=(*command.line.split(), f"{option}={value}"))
        with bench.folder(command) as folder:
            before = places.tree(folder)
            reference = places.Reference(before, before, 0.0)
            trial = Trial(bench, odd, folder, reference, random.Random(number), n_hits=1)
            yield trial.judged("numbers", number, seed, lambda trial, value=value: _judge(trial, value))


def _judge(trial: Trial, value: str) -> str:
    ended = trial.run(step=" ".join(trial.command.typed))
    if ended.code:
        places.check_told(trial.command, ended)
        places.check_same(trial.reference, trial.tree())
        return LINE
    if value in NEVER:
        raise Failure("was accepted")
    places.check_unharmed(trial.command, trial.reference.before, trial.tree(), trial.reference)
    return DONE


@cache
def numeric_options() -> tuple[tuple[Command, str], ...]:
    """Return every option that takes a number, with a command of the campaign that has it."""
    found = []
    for name, parser in registry().items():
        command = next(
            (one for one in (*COMMANDS, *READERS) if program_of(one) == name and not one.edits), None
        )
        if command is not None:
            found += [(command, option) for option in _numeric(parser)]
    return tuple(found)


def _numeric(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings or action.nargs == 0 or action.help == argparse.SUPPRESS:
            continue
        if action.type in (int, float) or action.metavar in _METAVARS:
            yield max(action.option_strings, key=len)


@cache
def registry() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands, by the words that call them, of two the shorter ones."""
    from gguf_tools.commands.main import parsers
    from gguf_tools.commands.parser import subparsers_of
    from gguf_tools.commands.roof import COMMANDS as ROOFED

    under_the_roof = tuple(f"{one.prog}" for one in ROOFED)
    return {
        name: parser
        for name, parser in parsers().items()
        if name != "gguf-tools"
        and not any(name == one or name.startswith(f"{one} ") for one in under_the_roof)
        and not (name != "imatrix" and subparsers_of(parser))
    }


def program_of(command: Command) -> str:
    """Return the name in `registry` of what a command calls."""
    words = command.line.split()
    two = " ".join(words[:2])
    return two if two in registry() else words[0]
