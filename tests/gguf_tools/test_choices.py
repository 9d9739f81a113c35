"""Options as keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gguf_tools.choices import with_choices


@dataclass(frozen=True)
class Inner:
    size: int = 1
    count: int | None = None


@dataclass(frozen=True)
class Outer:
    name: str = "a"
    inner: Inner = field(default_factory=Inner)


def test_choices_go_where_the_field_is() -> None:
    assert with_choices(Outer(), {}) == Outer()
    assert with_choices(Outer(), {"name": "b", "count": 3}) == Outer("b", Inner(1, 3))
    assert with_choices(Outer(), {"inner": Inner(7), "count": 3}) == Outer("a", Inner(7, 3))


@pytest.mark.parametrize(("name", "near"), [("cuont", "; did you mean count?"), ("zzz", "")])
def test_an_unknown_choice_is_refused_with_all_that_are_known(name: str, near: str) -> None:
    with pytest.raises(TypeError) as caught:
        with_choices(Outer(), {name: 1})
    assert str(caught.value) == (
        f"unexpected keyword argument {name!r}{near}; expected count, inner, name, size"
    )
