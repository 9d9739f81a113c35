"""Which tensor of the base a tensor of the file is compared with; layers left out, tensors of one alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from convert.audit.base import EMBEDDINGS, MTP, OUTPUT, AuditBase, layout_in
from convert.audit.expected import read_rows
from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.reader import GGUFSource
from gguf_tools.text import first_of, in_layer_ranges, number_ranges
from quantize.fill.sources import GGUFTensor, SourceTensor
from quantize.mla_layout.layouts import roles_in
from quantize.roles import in_layer, layer_of

KIND = "tensors"

_NORM_ERROR = 1e-3
"""Relative error up to which the norm of a layer is taken for that of a layer of the base."""


@dataclass(frozen=True)
class Layers:
    """Which layer of the base each layer of the file is.

    kept  old numbers of the layers that are there, in order; None: all are, under their own numbers
    """

    kept: tuple[int, ...] | None = None

    def name(self, name: str) -> str:
        """Return the base's name for a tensor of the file."""
        layer = layer_of(name)
        if self.kept is None or layer is None or layer >= len(self.kept):
            return name
        return in_layer(name, self.kept[layer])

    def left_out(self, names: Iterable[str]) -> list[int]:
        """List the layers of the base, whose tensors have these names, that the file does without."""
        every = {layer for name in names if (layer := layer_of(name)) is not None}
        return [] if self.kept is None else sorted(every - set(self.kept))


def match_layers(file: GGUFSource, base: AuditBase) -> Layers:
    """Find the layers that were left out, by the norms of those that are there.

    Norms are F32 in a file, so a layer has exactly the norm of the layer that it was.
    """
    found, wanted = _norms(file.tensors), _norms(base.tensors)
    if not found or len(found) >= len(wanted):
        return Layers()
    kept: list[int] = []
    rest = sorted(wanted)
    for layer in sorted(found):
        match = next((old for old in rest if _has_norms(file, found[layer], base, old)), None)
        if match is None:
            return Layers()
        kept.append(match)
        rest = [old for old in rest if old > match]
    return Layers(tuple(kept))


def _norms(names: Iterable[str]) -> dict[int, list[str]]:
    """List the norms of each layer."""
    norms: dict[int, list[str]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None and name.endswith("_norm.weight"):
            norms.setdefault(layer, []).append(name)
    return norms


def _has_norms(file: GGUFSource, names: Iterable[str], base: AuditBase, layer: int) -> bool:
    """Whether norms of a file are those of a layer of the base."""
    pairs = ((GGUFTensor(file, name), base.find(in_layer(name, layer))) for name in names)
    return all(wanted is not None and _same_vector(found, wanted) for found, wanted in pairs)


def _same_vector(a: SourceTensor, b: SourceTensor) -> bool:
    if a.shape[-1] != b.shape[-1] or prod(a.shape[:-1]) != prod(b.shape[:-1]):
        return False
    found, wanted = (read_rows(each, np.arange(prod(each.shape[:-1]))) for each in (a, b))
    return bool(np.linalg.norm(found - wanted) <= _NORM_ERROR * np.linalg.norm(wanted))


def keys_that_may_differ(layers: Layers, architecture: str) -> dict[str, str]:
    """Return the keys that follow from the number of layers, where some were left out."""
    if layers.kept is None:
        return {}
    per_layer = (keys.BLOCK_COUNT, keys.LEADING_DENSE_BLOCK_COUNT, keys.NEXTN_PREDICT_LAYERS)
    return {key.format(arch=architecture): "layers were left out" for key in per_layer}


def structure_findings(file: GGUFSource, base: AuditBase, layers: Layers) -> Iterator[Finding]:
    """Tell layers that were left out, and tensors that only one of both has, or in another shape."""
    path = str(file.path)
    if layers.kept is not None:
        gone = layers.left_out(base.tensors)
        text = f"{'layers' if len(gone) > 1 else 'layer'} {number_ranges(gone)} of the base left out"
        yield Finding(KIND, f"{text} (pruned, or for multi-token prediction)", Level.WARNING, (), path)
    own = {layers.name(name): name for name in file.tensors}
    extra = [name for name in file.tensors if base.find(layers.name(name)) is None]
    if len(extra) == len(file.tensors):
        text = f"{base.path} has no tensor of this file; is it another model?"
        yield Finding(KIND, text, Level.BAD, (), path)
        return
    if extra:
        text = f"{len(extra)} tensors are not in the base and were not compared: {_shown(extra)}"
        yield Finding(KIND, text, Level.BAD, tuple(extra), path)
    there = range(10**9) if layers.kept is None else layers.kept
    missing = [
        name for name in base.tensors
        if name not in own and ((layer := layer_of(name)) is None or layer in there) and MTP not in name
    ]  # fmt: skip
    layout = layout_in(file.tensors)
    own_roles = roles_in(layout or "both")
    others = tuple(role for role in roles_in("both") if role not in own_roles)
    missing = [
        name for name in missing
        if not _is_tied(name, base) and not name.endswith(tuple(f".{role.value}.weight" for role in others))
    ]  # fmt: skip
    if missing:
        text = f"{len(missing)} tensors of the base are missing: {_shown(missing)}"
        yield Finding(KIND, text, Level.BAD, tuple(missing), path)
    for name, info in file.tensors.items():
        source = base.find(layers.name(name))
        if source is not None and not fits(info.shape, source.shape):
            text = f"has {_shape(info.shape)} weights, the base's {source.name} has {_shape(source.shape)}"
            yield Finding("shape", text, Level.BAD, (name,), path)


def _is_tied(name: str, base: AuditBase) -> bool:
    """Whether the base's output matrix is its embeddings, so that a file may do without."""
    output, embeddings = base.find(OUTPUT), base.find(EMBEDDINGS)
    if name != OUTPUT or output is None or embeddings is None or output.shape != embeddings.shape:
        return False
    rows = np.arange(0, prod(output.shape[:-1]), max(1, prod(output.shape[:-1]) // 16))
    return np.array_equal(read_rows(output, rows), read_rows(embeddings, rows))


def fits(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are the same rows, cut into matrices in whatever way; one number is a row of one."""
    n_cols, n_other_cols = (each[-1] if each else 1 for each in (shape, other))
    return n_cols == n_other_cols and prod(shape) == prod(other)


def _shown(names: Sequence[str]) -> str:
    return first_of(in_layer_ranges(names), 6)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
