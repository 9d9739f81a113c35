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


def declared(families: Iterable[type[Any]]) -> dict[str, tuple[Any, str]]:
    """Return type and description of every option; the first family that declares one describes it."""
    options: dict[str, tuple[Any, str]] = {}
    for declared in families:
        for name, annotation in get_type_hints(declared, include_extras=True).items():
            options.setdefault(name, get_args(annotation))
    return options
