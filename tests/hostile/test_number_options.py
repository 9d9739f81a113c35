"""Numbers of options: what is no number, or none that makes sense, is refused by the type of the argument.

The options are found in the parsers of all commands, and in the options of all public functions, so that a
new one is tested, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import numpy as np
import pytest

import gguf_tools
from gguf_tools.argument_types import (
    BITS,
    COUNT,
    RATE,
    SECONDS,
    THREADS,
    CheckedFields,
    NumberType,
    fields_of,
    metric_bytes,
)
from gguf_tools.commands.main import main, parsers
from gguf_tools.errors import BadArgument, BadRequest, ToolkitError
from quantize.size.parse import parse_bytes, parse_sizes

NO_NUMBERS = [
    "inf", "-inf", "nan", "1e400", "-1e400", "-5", "-0.5", "0x10", "\u0967", "\uff11", " 5 ", "5 ", "5\n",
    "1_000", "", "+", "e5", "1e", "9" * 300, "9" * 5000, "1e18", "1" + "0" * 18, "None", "1,5", "--", "½",
]  # fmt: skip

LARGE = {"seed", "max_bytes", "split_max_bytes", "size", "vram", "ram"}
"""Arguments that may be 10**18."""

WORDS = {
    None, "A", "B", "BASE", "BRANCH", "FILE", "FOLDER", "KEY", "MODEL", "MODEL_DIR", "NAME",
    "NAME|PATH", "OWNER/NAME", "PATTERN", "REGEX", "REGEX,...", "REGEX=TYPE", "REGEX=TYPE,...", "SOURCE",
    "TYPE", "TYPE,SIZE...", "TYPE,TYPE...", "TYPES", "KEY=TYPE:VALUE", "INPUT [OUTPUT] TYPE [THREADS]",
}  # fmt: skip
"""What arguments without a type are called: words, in which a number is looked for later, if at all."""


def arguments() -> Iterator[tuple[str, argparse.Action]]:
    """Yield every argument with a value of every command, and the command."""
    for prog, parser in parsers().items():
        for action in parser._actions:
            if action.nargs != 0 and action.choices is None and type(action).__name__ != "_ForeignAction":
                yield prog, action


def is_number(action: argparse.Action) -> bool:
    """Whether an argument reads numbers or sizes."""
    for text in ("1", "1G"):
        try:
            value = action.type(text) if callable(action.type) else None
        except (argparse.ArgumentTypeError, ToolkitError):
            continue
        if isinstance(value, int | float | tuple) and not isinstance(value, Path) and value != ("1",):
            return action.metavar != "OLD=NEW"
    return False


NUMBERS = [(prog, action) for prog, action in arguments() if is_number(action)]


def test_all_arguments_are_numbers_or_words() -> None:
    """One with a number has a type that refuses what is none: int and float of Python take too much."""
    assert len(NUMBERS) > 70
    for prog, action in arguments():
        assert action.type not in (int, float), (prog, action.dest)
        if action.type is None:
            assert action.metavar in WORDS, (prog, action.dest, action.metavar)


@pytest.mark.parametrize(
    ("prog", "action"), NUMBERS, ids=[f"{prog} {action.option_strings}" for prog, action in NUMBERS]
)
def test_what_is_no_number_is_refused(prog: str, action: argparse.Action) -> None:
    assert callable(action.type)
    for text in NO_NUMBERS:
        if (text == "1" + "0" * 18 and action.dest in LARGE) or (text, action.dest) == (
            "1,5",
            "prune_layers",
        ):
            continue
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            print(prog, action.dest, repr(text[:20]), action.type(text))
        assert len(str(caught.value)) < 250
        assert str(caught.value).isprintable()


def test_a_refused_number_ends_a_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["refine", "q.gguf", "--base", "b", "-f", "t", "-o", "r.gguf", "--rate", "1e400"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "gguf-tools refine: error: argument --rate: '1e400' is not a number above 0, up to 1"
        " (gguf-tools refine --help explains)\n"
    )


def options() -> Iterator[tuple[type, str, Any]]:
    """Yield the fields of all public options that are numbers: class, name, what may be there."""
    for name in gguf_tools.__all__:
        value = getattr(gguf_tools, name)
        if isinstance(value, type) and is_dataclass(value) and issubclass(value, CheckedFields):
            for each, expected in fields_of(value).items():
                yield from ((value, each, hint) for hint in expected.hints)


def of_numbers() -> list[tuple[type, str]]:
    return [(class_, name) for class_, name, hint in options() if _is_number(hint)]


def _is_number(hint: Any) -> bool:
    return get_origin(hint) is Annotated and isinstance(get_args(hint)[1], NumberType)


def test_options_are_checked_and_their_numbers_have_a_range() -> None:
    for name in gguf_tools.__all__:
        value = getattr(gguf_tools, name)
        if name.endswith("Options") or name in ("Cut", "Calibration"):
            assert issubclass(value, CheckedFields), name
            assert {each.name for each in fields(value) if each.init} == {*fields_of(value)}
    for class_, name, hint in options():
        assert hint not in (int, float), (class_, name)
    assert len(of_numbers()) > 20


@pytest.mark.parametrize(("class_", "name"), of_numbers(), ids=lambda each: getattr(each, "__name__", each))
def test_python_refuses_the_same(class_: Any, name: str) -> None:
    needed = {"text": "text.txt"} if class_ is gguf_tools.Calibration else {}
    for value in (math.inf, -math.inf, math.nan, -1, -5, 10**400, 10**5000, "5", b"5", True, [5], np.zeros(2),
                  np.float64("nan"), 1 + 1j, Fraction(-1, 3)):  # fmt: skip
        with pytest.raises(BadArgument, match=f"^{name}: found .*, expected a (whole )?number "):
            print(value if isinstance(value, float) else type(value), class_(**needed, **{name: value}))


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert gguf_tools.Cut(np.int64(8)).chunk_size == 8
    assert gguf_tools.RefineOptions(rate=np.float32(0.5), minutes=3).minutes == 3


def test_ranges() -> None:
    assert (THREADS.parse("8"), COUNT.parse("+007"), SECONDS.parse("2.5"), RATE.parse("1e-3")) == (
        8,
        7,
        2.5,
        0.001,
    )
    assert not RATE.holds(0)
    assert RATE.holds(1)
    assert BITS.holds(64)
    assert str(RATE) == "a number above 0, up to 1"
    assert metric_bytes("2G") == 2 * 10**9
    assert parse_bytes("1.5KiB") == 1536
    assert [each.amount for each in parse_sizes("3.4bpw,1MiB")] == [3.4, 1 << 20]


@pytest.mark.parametrize(
    "text", ["0bpw", "65bpw", "0.0GiB", "9" * 40 + "GiB", "1e3GiB", "infGiB", "\u0967GiB", "nan"]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_sizes(text)
