"""Chosen types for a terminal: what divergence to expect of them, and a map.

The map has a line for each part of a layer, and a character for each layer:

    types by layer: 1 Q2_K, 2 Q3_K, 3 Q4_K
      token_embd      3
      attn_q_a        22233
      ffn_down_exps   .1112
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from calibrate.size.choose_types import ChosenTypes
from calibrate.size.predict import N_FILES, expected_divergence, is_routed
from gguf_tools.format.ggml_types import by_name
from quantize.plan.sensitivities import Sensitivities
from quantize.roles import layer_of

_CHARACTERS = "123456789abcdefghijklmnopqrstuvwxyz"


def expected_lines(chosen: ChosenTypes, sensitivities: Sensitivities) -> Iterator[str]:
    """Yield what divergence to expect of the file, and how sure that is.

    sensitivities  of the model
    """
    expected = expected_divergence(chosen.predicted, routed=is_routed(sensitivities))
    yield (
        f"expected divergence {expected} nats a token: the range has 19 of 20 files, going by {N_FILES} of"
        " the sample model"
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
