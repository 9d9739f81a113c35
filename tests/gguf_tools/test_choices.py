"""Options as keyword arguments, and made of others."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gguf_tools.choices import filled, flag, flags_of, with_choices


@dataclass(frozen=True)
class Inner:
    size: int = 1
    count: int | None = None


@dataclass(frozen=True)
class Outer:
    name: str = "a"
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class How:
    fast: bool = flag(False, "hurry", "--fast", "-f")


def test_choices_go_where_the_field_is() -> None:
    assert with_choices({}, Outer()) == Outer()
    assert with_choices({"name": "b", "count": 3}, Outer()) == Outer("b", Inner(1, 3))
    assert with_choices({"inner": Inner(7), "count": 3}, Outer()) == Outer("a", Inner(7, 3))
    assert with_choices({"fast": True, "size": 4}, Outer(), How()) == (Outer("a", Inner(4)), How(fast=True))


@pytest.mark.parametrize(("name", "near"), [("cuont", "; did you mean count?"), ("zzz", "")])
def test_an_unknown_choice_is_refused_with_all_that_are_known(name: str, near: str) -> None:
    with pytest.raises(TypeError) as caught:
        with_choices({name: 1}, Outer(), How())
    assert str(caught.value) == (
        f"unexpected keyword argument {name!r}{near}; expected count, fast, inner, name, size"
    )


def test_a_value_is_filled_with_what_another_has_under_the_same_names() -> None:
    @dataclass(frozen=True)
    class Other:
        name: str
        fast: bool
        other: int = 0

    assert filled(Outer, Other("b", True)) == Outer("b")
    assert filled(How, Other("b", True)) == How(fast=True)
    assert filled(Other, Outer("b"), fast=False) == Other("b", False)
    with pytest.raises(TypeError, match="fast"):
        filled(Other, Outer("b"))


def test_a_field_bears_its_flag() -> None:
    [(field_of_it, its_flag)] = flags_of(How)
    assert (field_of_it.name, its_flag.names, its_flag.text) == ("fast", ("--fast", "-f"), "hurry")
    assert flags_of(Outer) == []
