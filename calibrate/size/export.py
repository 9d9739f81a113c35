"""Chosen types as rules that people read and edit, in the notations of four programs.

Tensors of several layers that have the same part and type share one rule:

    ^blk\\.(3|4|7)\\.ffn_down_exps\\.weight$=IQ4_XS

The same rules serve as our recipe file, as llama-quantize's --tensor-type-file and as ik_llama.cpp's
--custom-q. A list with one line per tensor is what Thireus' tools exchange.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_LAYERED = re.compile(r"blk\.(\d+)\.(.+)")
_K_QUANT = re.compile(r"q\d_k")
_KV = ("Q8_KV", "Q8_KV_R8")


def rules_of(types: Mapping[str, str]) -> dict[str, list[str]]:
    """Make REGEX=TYPE rules, each with the tensors that it gives a type; it matches no other tensor.

    types  tensor name -> type name

    >>> types = {"output.weight": "Q6_K", "blk.0.attn_q.weight": "Q4_K", "blk.2.attn_q.weight": "Q4_K"}
    >>> list(rules_of(types))
    ['^output\\\\.weight$=Q6_K', '^blk\\\\.(0|2)\\\\.attn_q\\\\.weight$=Q4_K']
    """
    groups: dict[tuple[str | None, str, str], dict[str, int]] = {}
    for name, type_ in types.items():
        match = _LAYERED.fullmatch(name)
        if match is None:
            groups[(None, name, type_)] = {name: 0}
        else:
            groups.setdefault(("blk", match[2], type_), {})[name] = int(match[1])
    return {
        f"^{_prefix(list(layers.values())) if stem else ''}{_escaped(part)}$={type_}": list(layers)
        for (stem, part, type_), layers in groups.items()
    }


def _prefix(layers: Sequence[int]) -> str:
    numbers = "|".join(map(str, sorted(layers)))
    return f"blk\\.{numbers if len(layers) == 1 else f'({numbers})'}\\."


def _escaped(name: str) -> str:
    return name.replace(".", "\\.")


def ggml_name(type_: str) -> str:
    """Return a type's name as ggml spells it, which ik_llama.cpp insists on.

    >>> [ggml_name(type_) for type_ in ("Q4_K", "IQ4_XS", "IQ2_K", "Q4_K_R4", "Q8_KV_R8")]
    ['q4_K', 'iq4_xs', 'iq2_k', 'q4_k_r4', 'q8_KV_r8']
    """
    lower = type_.lower()
    if type_ in _KV:
        return lower.replace("kv", "KV")
    return lower[:-1] + "K" if _K_QUANT.fullmatch(lower) else lower


def recipe_lines(
    name: str, file_type: str, types: Mapping[str, str], remarks: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a recipe file (YAML).

    file_type  what decides the types of all other tensors, and general.file_type
    remarks    comments at its head
    """
    for remark in remarks:
        yield f"# {remark}"
    yield f"name: {name}"
    yield f"file_type: {file_type}"
    yield "tensor-type:"
    for rule in rules_of(types):
        yield f"  - '{rule}'"


def tensor_type_lines(types: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a file for llama-quantize's --tensor-type-file."""
    for rule in rules_of(types):
        regex, _, type_ = rule.rpartition("=")
        yield f"{regex}={ggml_name(type_)}"


def custom_q(types: Mapping[str, str]) -> str:
    """Return the argument of ik_llama.cpp's --custom-q."""
    return ",".join(tensor_type_lines(types))


def tensor_list_lines(types: Mapping[str, str], remarks: Sequence[str] = ()) -> Iterator[str]:
    """Yield a list with one REGEX=TYPE line per tensor, as Thireus' tools exchange them."""
    for remark in remarks:
        yield f"# {remark}"
    for name, type_ in types.items():
        yield f"^{_escaped(name)}$={ggml_name(type_)}"
