"""An adapter as a GGUF file, which llama.cpp loads beside the file of the base (its --lora).

For each adapted tensor of the base's file there are two, NAME.lora_a (rank, inputs) and NAME.lora_b
(outputs, rank); llama.cpp adds alpha / rank times their product. Stacks of experts have stacks of these. For
the embeddings, lora_a has the rows of the tokens.

What a family's rules do to the rows of a matrix, they do to the rows of its left factor as well. So the rules
arrange that factor in place of the matrix. Whether this was all that they do shows in some rows of the
product, which they arrange, too: these have to be the product of the two. Where they are not (in latent
attention, for instance, keys are transposed head by head), the adapter is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from convert.architectures.base import build
from convert.architectures.rules import OutputTensor
from convert.checkpoint.adapted_folder import AdaptedFolder
from convert.checkpoint.adapter import HEAD
from convert.checkpoint.checkpoint import Checkpoint
from convert.general_metadata import general_metadata
from convert.pipeline import architecture_of
from convert.weights import open_weights
from convert.weights.adapted import AdaptedWeights
from convert.weights.base import Weight
from convert.weights.merged import Changed, Merged
from gguf_tools.argument_types import checked
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.files.named_files import output_path
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.findings import remark
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from gguf_tools.hub.names import cached_repo, folder_name
from quantize.fill.sources import FLOAT_DTYPES
from quantize.prepare import QUANTIZATION_VERSION

ADAPTER_TYPE, ADAPTER_ALPHA = "adapter.type", "adapter.lora.alpha"

_STRIP_ROWS = 256
_CHECKED_ROWS = 16
_ROUNDING = 1e-4
_EMBEDDINGS = "token_embd.weight"
_OTHER_ROWS = "its rows are not those of the matrix that is adapted"

AdapterType = Literal["f32", "f16", "bf16"]
_TYPES: dict[str, GGMLType] = {"f32": F32, "f16": F16, "bf16": BF16}


@checked
def convert_adapter(
    adapter: str | os.PathLike[str],
    base: str | os.PathLike[str],
    outfile: str | os.PathLike[str] | None = None,
    outtype: AdapterType = "f32",
    *,
    allow_pickle: bool = False,
    force: bool = False,
) -> Path:
    """Write an adapter of PEFT as a GGUF file for llama.cpp, which adds it to the file of its base.

        convert_adapter("my-adapter", "Qwen3-4B", "my-adapter.gguf")

    base     folder of the model that the adapter was trained on
    outfile  a file, or a folder, in which the file is named after the adapter; None: the adapter's folder,
             or the current one for one in the Hub's cache
    force    replace `outfile` if it is there
    returns  the file
    raises   CheckpointError for an adapter that does not fit the base; UnsupportedCheckpoint for one that
             llama.cpp can't add; OutputError
    """
    if outfile is None:
        target = Path(adapter) if cached_repo(adapter) is None else Path()
    else:
        target = output_path(outfile, may_be_folder=True)
    with Checkpoint(AdaptedFolder(base, Path(adapter)), allow_pickle=allow_pickle) as checkpoint:
        opened = checkpoint.adapter
        assert opened is not None
        made: list[_Sides] = []

        def sides_of(*given: Any) -> _Sides:
            made.append(_Sides(*given))
            return made[0]

        architecture = architecture_of(checkpoint, mmproj=False)
        conversion = build(architecture, open_weights(checkpoint), adapted=sides_of)
        pairs = _pairs(conversion.tensors, made[0])
        for note in made[0].base_notes:
            remark(note)
        type_ = _TYPES[outtype]
        infos = [TensorInfo(name, array.shape, type_) for name, array in pairs.items()]
        general = general_metadata(opened.folder, checkpoint.config, type_="adapter")
        metadata = {
            keys.ARCHITECTURE: Value.string(architecture.gguf_name),
            keys.TYPE: Value.string("adapter"),
            ADAPTER_TYPE: Value.string("lora"),
            **general.metadata(),
            ADAPTER_ALPHA: Value.f32(opened.alpha),
            keys.QUANTIZATION_VERSION: Value.u32(QUANTIZATION_VERSION),
        }
        path = target / f"{folder_name(opened.folder)}-{type_.name}.gguf" if target.is_dir() else target
        refuse_to_replace([path], force=force)
        layout = FileLayout.of(metadata, infos)
        with GGUFWriter(path, layout, [each.path for each in checkpoint.inputs()]) as writer:
            for name, array in pairs.items():
                stored = np.ascontiguousarray(array, FLOAT_DTYPES[type_])
                writer.write(layout.offset_of(name), stored.reshape(-1).view(np.uint8))
            writer.publish()
    return path


class _Sides(AdaptedWeights):
    """The weights of a base. An adapted one reads as a side of its product, and another one as zeros.

    shows_product  read the product; otherwise its left factor, in the first columns
    touched        names of the weights that were read, in order
    """

    def __init__(self, *given: Any) -> None:
        self._is_ready = False
        super().__init__(*given)
        self._is_ready, self.shows_product, self.touched = True, False, dict[str, None]()
        self.merged: dict[str, Merged] = {}
        is_tied = not any(name.endswith(HEAD) for name in self.checkpoint.names())
        for name, weight in self.changed.items():
            if not isinstance(weight, Merged) or weight.magnitude is not None:
                raise _refusal(self, name, "llama.cpp's adapters can only add a product of two factors")
            if is_tied and name in (HEAD, self.embeddings):
                raise _refusal(self, name, "the base's embeddings are its output matrix as well")
            self.merged[name] = weight

    def weight(self, name: str) -> Weight:
        weight = super().weight(name)
        return _Side(weight, name, self) if self._is_ready else weight


@dataclass(frozen=True)
class _Side(Changed):
    """A weight as `_Sides` reads it."""

    key: str
    sides: _Sides

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        self.sides.touched[self.key] = None
        rows = np.zeros((stop - start, self.shape[-1]), np.float32)
        merged = self.sides.merged.get(self.key)
        if merged is None:
            return rows
        factors = merged.factors
        share = factors.scale * factors.rank / factors.adapter.alpha
        for here, *place in merged.places(start, stop):
            if self.sides.shows_product:
                rows[here] = factors.added(*place)
            else:
                rows[here, : factors.rank] = factors.sides(*place)[0] * np.float32(share)
        return rows


def _pairs(tensors: Iterable[OutputTensor], sides: _Sides) -> dict[str, np.ndarray]:
    """Return the two factors of each adapted tensor, by their names in the file, float32.

    They stand in the order of the adapter's file, in which llama.cpp's converter goes through it.
    """
    place = {name: number for number, name in enumerate(sides.adapter.file.tensors)}
    found: list[tuple[int, dict[str, np.ndarray]]] = []
    used: set[str] = set()
    for tensor in tensors:
        n_rows = tensor.shape[-2] if len(tensor.shape) > 1 else 0
        n_mats = prod(tensor.shape[:-2]) if n_rows else 0
        sources = [_adapted_in(tensor, matrix * n_rows, sides) for matrix in range(n_mats)]
        names = {name for each in sources for name in each}
        if names:
            used |= names
            last = max(place[sides.merged[name].factors.a.name] for name in names)
            found.append((last, _pair(tensor, sources, sides)))
    for name in sides.merged.keys() - used:
        raise _refusal(sides, name, "no tensor of the base's file is made of it row by row")
    return {
        name: array for _, pair in sorted(found, key=lambda each: each[0]) for name, array in pair.items()
    }


def _pair(tensor: OutputTensor, sources: Sequence[list[str]], sides: _Sides) -> dict[str, np.ndarray]:
    """Return the two factors of a tensor by their names; UnsupportedCheckpoint where it has none.

    sources  names of the adapted weights that each of its matrices is made of
    """
    n_mats, (n_rows, n_cols) = len(sources), tensor.shape[-2:]
    ranks = {sides.merged[name].factors.rank for each in sources for name in each}
    if len(ranks) > 1 or max(map(len, sources)) > 1 or max(ranks) > n_cols:
        raise _refusal(sides, tensor.name, "it is made of matrices with different factors")
    (rank,) = ranks
    right = np.zeros((n_mats, rank, n_cols), np.float32)
    for matrix, each in enumerate(sources):
        for merged in map(sides.merged.__getitem__, each):
            number = merged.matrix + (matrix if len(merged.shape) == 3 else 0)
            _, of_matrix = merged.factors.sides(number, 0, 0)
            if of_matrix.shape != (rank, n_cols):
                raise _refusal(sides, tensor.name, _OTHER_ROWS)
            right[matrix] = of_matrix
    sides.shows_product = False
    strips = [
        tensor.read_rows(start, min(start + _STRIP_ROWS, n_mats * n_rows))[:, :rank]
        for start in range(0, n_mats * n_rows, _STRIP_ROWS)
    ]
    left = np.concatenate(strips).reshape(n_mats, n_rows, rank)
    _check(tensor, left, right * np.float32(sides.adapter.alpha / rank), sides)
    a, b = (left, right.transpose(0, 2, 1)) if tensor.name == _EMBEDDINGS else (right, left)
    stack = tensor.shape[:-2]
    return {
        f"{tensor.name}.lora_{side}": factor.reshape(*stack, *factor.shape[1:])
        for side, factor in (("a", a), ("b", b))
    }


def _adapted_in(tensor: OutputTensor, row: int, sides: _Sides) -> list[str]:
    """Return the names of the adapted weights that a row is made of."""
    sides.touched.clear()
    tensor.read_rows(row, row + 1)
    return [name for name in sides.touched if name in sides.merged]


def _check(tensor: OutputTensor, left: np.ndarray, right: np.ndarray, sides: _Sides) -> None:
    """Raise UnsupportedCheckpoint unless the first and the last rows are those of the product."""
    n_rows = left.shape[1]
    sides.shows_product = True
    for matrix in range(len(left)):
        for first in (0, max(0, n_rows - _CHECKED_ROWS)):
            rows = slice(first, min(first + _CHECKED_ROWS, n_rows))
            start = matrix * n_rows
            expected = tensor.read_rows(start + rows.start, start + rows.stop)
            error = np.abs(left[matrix, rows] @ right[matrix] - expected).max()
            if error > _ROUNDING * np.abs(expected).max():
                raise _refusal(sides, tensor.name, _OTHER_ROWS)


def _refusal(sides: _Sides, name: str, why: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{sides.adapter.file.path}: {name}: can't be in a file of the adapter alone: {why}; --lora"
        " merges it into the base"
    )
