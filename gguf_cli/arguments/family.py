"""A flag for each option that a model family declares."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, get_args

from convert.architectures.options import declared, flag


def add_flags(parser: argparse.ArgumentParser, families: Iterable[type[Any]]) -> None:
    """Add a flag for each option of each family; options of the same name share one.

    A bool, or one that None leaves open, becomes two switches, --name and --no-name, a Literal a choice of
    words.
    """
    for name, (kind, text) in declared(families).items():
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
    values = {name: getattr(args, name) for name in declared(families)}
    return {name: value for name, value in values.items() if value is not None}
