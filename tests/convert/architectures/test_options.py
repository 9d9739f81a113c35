"""Options that families declare: flags of the command line, and the refusal of what wasn't declared."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from convert.architectures import families
from convert.architectures.options import DECLARED, make_options
from gguf_tools.commands.convert import add_family_flags, read_flags
from gguf_tools.errors import BadRequest


@dataclass(frozen=True)
class Heads:
    """A family's options."""

    heads_as: Annotated[Literal["rows", "matrices"], "how heads are stored"] = "rows"
    mtp: Annotated[bool, "keep the MTP layer"] = False


@dataclass(frozen=True)
class Plain:
    """Another family's, with one option of the same name."""

    mtp: Annotated[bool, "not shown: the first family describes the flag"] = True


FAMILIES = (Heads, Plain)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_family_flags(made, FAMILIES)
    return made


def test_every_option_is_a_flag_once() -> None:
    text = " ".join(parser().format_help().split())
    assert "--heads-as {rows,matrices} how heads are stored" in text
    assert text.count("--mtp keep the MTP layer") == 1
    assert "not shown" not in text


@pytest.mark.parametrize(
    ("argv", "choices"),
    [
        ([], {}),
        (["--mtp"], {"mtp": True}),
        (["--heads-as", "matrices", "--mtp"], {"heads_as": "matrices", "mtp": True}),
    ],
)
def test_only_given_flags_are_choices(argv: list[str], choices: dict[str, object]) -> None:
    assert read_flags(parser().parse_args(argv), FAMILIES) == choices


def test_what_is_not_chosen_keeps_the_family_s_default() -> None:
    assert make_options(Heads, {"mtp": True}, "HeadsForCausalLM") == Heads("rows", True)
    assert make_options(Plain, {}, "PlainForCausalLM") == Plain(True)


def test_an_undeclared_option_is_refused_by_its_flag() -> None:
    with pytest.raises(BadRequest, match=r"^--heads-as: PlainForCausalLM has no such option$"):
        make_options(Plain, {"heads_as": "rows"}, "PlainForCausalLM")


def test_the_families_declare_their_options() -> None:
    """In DECLARED, so that --help needs no family's module, and in the family."""
    assert sorted({family.options.__name__ for family in families()}) == sorted(
        declared.__name__ for declared in DECLARED
    )
