"""Whether a model in some layout becomes what it becomes in its published one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from convert.pipeline import open_conversion
from gguf_tools.errors import ToolkitError
from tests.end_to_end.layouts.ways import Layout, Saved

OUTPUT = "output.weight"


@dataclass(frozen=True)
class Made:
    """What a folder becomes: keys, numbers of all tensors in float32, and notes."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    notes: tuple[str, ...]


def made_of(folder: Path) -> Made:
    """Convert a folder without writing a file; raises ToolkitError where it can't be converted."""
    with open_conversion(folder) as conversion:
        tensors = {
            tensor.name: tensor.read_rows(0, prod(tensor.shape[:-1])).astype(np.float32).reshape(tensor.shape)
            for tensor in conversion.tensors
        }
        return Made(dict(conversion.metadata), tensors, conversion.notes)


@dataclass(frozen=True)
class Outcome:
    """What became of a layout.

    kind  "equal", "noted" (equal, with a note), "refused" as it should be, or "wrong"
    why   what is wrong
    """

    kind: str
    why: str = ""


def judge(layout: Layout, model: Saved, published: Made, folder: Path) -> Outcome:
    """Save a model in a layout in a new folder, and judge what it becomes."""
    layout.make(model, folder)
    try:
        made = made_of(folder)
    except ToolkitError as error:
        said = str(error)
        if not layout.refused:
            return Outcome("wrong", f"refused: {said}")
        fits = re.search(layout.says, said) is not None and "\n" not in said
        return Outcome("refused") if fits else Outcome("wrong", f"refused for something else: {said}")
    if layout.refused:
        return Outcome("wrong", "converted in silence")
    differences = list(_differences(layout, published, made))
    if differences:
        return Outcome("wrong", f"other than the published layout: {', '.join(differences[:5])}")
    new = sorted({*map(_without_names, made.notes)} - {*map(_without_names, published.notes)})
    if not new:
        must_note = layout.says and not (layout.headless and OUTPUT in made.tensors) and not layout.headless
        return Outcome("wrong", "no note") if must_note else Outcome("equal")
    if layout.says and all(re.search(layout.says, note) for note in new):
        return Outcome("noted")
    return Outcome("wrong", f"notes: {'; '.join(new)}")


def _without_names(note: str) -> str:
    """Return a note about tensors that were left out without the name of the first."""
    return re.sub(r"^(left out .*) \(.*?\)", r"\1", note)


def _with_one_stack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with gate and up of experts as one, as Gemma 4 has them."""
    made = dict(tensors)
    for gate in [name for name in tensors if "ffn_gate_exps" in name]:
        halves = made.pop(gate), made.pop(gate.replace("gate", "up"))
        made[gate.replace("gate", "gate_up")] = np.concatenate(halves, axis=1)
    return made


def _differences(layout: Layout, published: Made, made: Made) -> Iterator[str]:
    if published.metadata != made.metadata:
        yield from (key for key in published.metadata if published.metadata[key] != made.metadata.get(key))
        yield from (key for key in made.metadata if key not in published.metadata)
    tensors = made.tensors
    if any("ffn_gate_up_exps" in name for name in published.tensors):
        tensors = _with_one_stack(tensors)
    for name in {**published.tensors, **tensors}:
        expected, found = published.tensors.get(name), tensors.get(name)
        if layout.headless and name == OUTPUT:
            # llama.cpp takes the embeddings, or the file has them twice where it demands the matrix.
            expected = None if found is None else published.tensors["token_embd.weight"]
        if expected is None and found is None:
            continue
        if expected is None or found is None or not np.array_equal(expected, found):
            yield name
