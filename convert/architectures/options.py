"""How a family declares what the user may choose, and how the choices reach it.

A family's options are a frozen dataclass in its `options` module:

    @dataclass(frozen=True)
    class Options:
        mtp: Annotated[bool, "keep the multi-token-prediction layers"] = False

The command line makes a flag of each field, --mtp, and describes it in --help with the field's annotation. A
choice that the family of the checkpoint has not declared is refused. Such a module imports nothing heavy,
because --help needs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from gguf_tools.errors import BadRequest


def make_options(declared: type[Any], choices: Mapping[str, object], model: str) -> Any:
    """Return a family's options with what the user chose; the rest keeps its defaults.

    declared  the family's dataclass
    choices   option -> value
    model     what config.json calls the architecture, for the message
    raises    BadRequest for an option that the family has not declared
    """
    known = {each.name for each in fields(declared)}
    for name in choices:
        if name not in known:
            raise BadRequest(f"{flag(name)}: {model} has no such option")
    return declared(**choices)


def flag(name: str) -> str:
    """Return the flag of an option: "keep_mtp" is --keep-mtp."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, families: Iterable[type[Any]]) -> None:
    """Add a flag for each option of each family; options of the same name share one.

    A bool, or one that None leaves open, becomes two switches, --name and --no-name, a Literal a choice of
    words.
    """
    for name, (kind, text) in _declared(families).items():
        if kind in (bool, bool | None):
            parser.add_argument(flag(name), action="store_true", default=None, help=text)
            parser.add_argument(
                flag(f"no_{name}"), dest=name, action="store_false", default=None,
                help=f"the opposite of {flag(name)}",
            )  # fmt: skip
        else:
            parser.add_argument(flag(name), choices=get_args(kind), help=text)


def read_flags(args: argparse.Namespace, families: Iterable[type[Any]]) -> dict[str, object]:
    """Return the options whose flags were given, by name."""
    values = {name: getattr(args, name) for name in _declared(families)}
    return {name: value for name, value in values.items() if value is not None}


def _declared(families: Iterable[type[Any]]) -> dict[str, tuple[Any, str]]:
    """Return type and description of every option; the first family that declares one describes it."""
    options: dict[str, tuple[Any, str]] = {}
    for declared in families:
        for name, annotation in get_type_hints(declared, include_extras=True).items():
            options.setdefault(name, get_args(annotation))
    return options
