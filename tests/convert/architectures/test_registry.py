"""The registry of families: each is found under its names, and what other floors need of it is there."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest

from convert.architectures import MODULES, families, find_by_gguf_name, supported
from convert.architectures.base import Architecture
from gguf_tools.format.loaders import LOADERS
from quantize.padding.inner_sizes import rules_of

FAMILIES = tuple(families())
BY_MODULE: tuple[tuple[Architecture, ...], ...] = tuple(import_module(name).FAMILIES for name in MODULES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.gguf_name}-{family.hf_names[0]}")
def test_every_family_is_told_everywhere(family: Architecture) -> None:
    if family.reader is None:  # an encoder, which no forward pass computes
        assert family.gguf_name not in LOADERS
    else:
        assert family.gguf_name in LOADERS, "a row of gguf_tools/format/loaders.py"
    assert rules_of(family.gguf_name)
    found = find_by_gguf_name(family.gguf_name)
    assert found is not None
    assert (found.gguf_name, found.rotation) == (family.gguf_name, family.rotation)


def test_no_name_is_that_of_two_modules() -> None:
    """A module that has several families for a name chooses by config.json."""
    names = [name for module in BY_MODULE for name in {name for each in module for name in each.hf_names}]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(names) == set(supported())


@pytest.mark.parametrize("module", BY_MODULE, ids=MODULES)
def test_inner_sizes_are_known_of_all_blocks(module: tuple[Architecture, ...]) -> None:
    """Families of a module may share rules for blocks that only one of them has."""
    parts = {"dense": "", "routed": "_exps", "shared": "_shexp"}
    known = {part for family in module for part in rules_of(family.gguf_name)}
    for family in module:
        made = {part for part, end in parts.items() if family.makes(f"blk.{{layer}}.ffn_down{end}.weight")}
        assert made <= known, family.gguf_name
