"""Options as keyword arguments: the fields of an options value, and those of the values in it.

with_choices(EvaluateOptions(), {"n_chunks": 4, "device": "cpu"})    # of its `cut`, and of its `forward`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gguf_tools.text import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)
else:
    Options = TypeVar("Options")


def with_choices(options: Options, choices: Mapping[str, Any]) -> Options:
    """Return `options` with the fields that `choices` name in their place.

    A choice that is a field of a value in `options` goes there, also if that value is a choice itself.
    raises  TypeError for a choice that is a field of neither, listing all
    """
    own = _names(options)
    inner = {name: _names(value) for name in own if is_dataclass(value := getattr(options, name))}
    refuse_unknown(choices, [*own, *(name for names in inner.values() for name in names)])
    chosen = replace(options, **{name: value for name, value in choices.items() if name in own})
    changed = {
        name: replace(getattr(chosen, name), **{each: choices[each] for each in names if each in choices})
        for name, names in inner.items()
    }
    return replace(chosen, **changed)


def refuse_unknown(choices: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for choices that are not known, with what is."""
    known = sorted(known)
    unknown = [name for name in choices if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}{near}; expected {', '.join(known)}")


def _names(options: Any) -> list[str]:
    return [field.name for field in fields(options)]
