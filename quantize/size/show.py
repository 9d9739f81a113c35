"""Shows chosen types: as a table, as a map in a terminal, as a curve of divergence against size, as rules.

The map has a line for each part of a layer, and a character for each layer:

    types by layer: 1 Q2_K, 2 Q3_K, 3 Q4_K
      token_embd      3
      attn_q_a        22233
      ffn_down_exps   .1112

Rules are what people read and edit, in the notations of four programs. Tensors of several layers that have
the same part and type share one:

    ^blk\\.(3|4|7)\\.ffn_down_exps\\.weight$=IQ4_XS

The same rules serve as our recipe file, as llama-quantize's --tensor-type-file and as ik_llama.cpp's
--custom-q. A list with one line per tensor is what Thireus' tools exchange.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gguf_tools.format.ggml_types import by_name
from gguf_tools.text import size_text
from quantize.plan.sensitivities import N_FILES, Sensitivities, expected_divergence, is_routed
from quantize.roles import layer_of
from quantize.size.choose_types import ChosenTypes
from quantize.size.solve import Sized

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


_CHARACTERS = "123456789abcdefghijklmnopqrstuvwxyz"


def sized_lines(sized: Sized) -> Iterator[str]:
    """Tell what was chosen and why: a line per part of the model and type."""
    chosen = sized.chosen
    yield (
        f"types chosen: {size_text(sized.total_bytes)}, {sized.total_bytes:,} of the {sized.budget:,} bytes"
        " that were asked for"
    )
    yield (
        f"predicted divergence {chosen.predicted:.5f} nats a token;"
        f" no other choice is predicted more than {chosen.gap:.1g} lower"
    )
    rows = [(_shown(rule), *_totals(names, chosen)) for rule, names in rules_of(chosen.types).items()]
    width = max(len(rule) for rule, *_ in rows)
    for rule, n_bytes, sensitivity, step in sorted(rows, key=lambda row: -row[2]):
        yield f"  {rule:{width}}  {size_text(n_bytes):>10}  {sensitivity:.6f}  {step}"


def _shown(rule: str) -> str:
    """Return a rule without its escapes."""
    return rule.replace("\\", "").replace("^", "").replace("$", "").replace("=", " = ")


def _totals(names: Sequence[str], chosen: ChosenTypes) -> tuple[int, float, str]:
    tensors = [chosen.tensors[name] for name in names]
    steps = {each.next_up for each in tensors if each.next_up}
    saves = max(each.saves for each in tensors)
    step = f"{'/'.join(sorted(steps))} would save {saves * 2**20:.2g} per MiB" if steps else ""
    return sum(each.n_bytes for each in tensors), sum(each.sensitivity for each in tensors), step


def expected_lines(chosen: ChosenTypes, sensitivities: Sensitivities) -> Iterator[str]:
    """Tell the divergence to expect of the file, and how sure that is.

    sensitivities  of the model
    """
    expected = expected_divergence(chosen.predicted, routed=is_routed(sensitivities))
    yield (
        f"expected divergence {expected} nats a token: 19 of 20 files are in the range, judging by"
        f" {N_FILES} files of the sample model"
    )


def map_lines(types: Mapping[str, str]) -> Iterator[str]:
    """Yield the map of types, tensor name -> type name, those of the fewest bits first in the legend."""
    used = sorted(set(types.values()), key=lambda name: (by_name(name).bits_per_weight, name))
    characters = dict(zip(used, _CHARACTERS, strict=False))
    rows: dict[str, dict[int, str]] = {}
    for name, type_ in types.items():
        layer = layer_of(name)
        part = name.removeprefix(f"blk.{layer}.").removesuffix(".weight")
        rows.setdefault(part, {})[0 if layer is None else layer] = characters.get(type_, "?")
    width = max(map(len, rows), default=0)
    yield "types by layer: " + ", ".join(f"{character} {type_}" for type_, character in characters.items())
    for part, by_layer in rows.items():
        shown = "".join(by_layer.get(layer, ".") for layer in range(max(by_layer) + 1))
        yield f"  {part:{width}}  {shown}"
