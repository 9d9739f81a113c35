"""Weights that another tensor of the file scales: "blk.0.ffn_up.scale" beside "blk.0.ffn_up.weight".

llama.cpp's converter stores NVFP4 so: a matrix has one scale, a stack of experts one for each. Its loader
multiplies the product of any type of weight by it.

Facts of llama.cpp (2026-10): load_tensors of src/llama-model.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadRequest, FormatError, ShapeError, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import F32, NVFP4, GGMLType
from gguf_tools.format.loaders import LOADERS
from gguf_tools.format.reader import GGUFSource
from quantize.fill.sources import Described, GGUFTensor, MadeOfTensor, SourceTensor

_HAS_SCALE = re.compile(
    r"blk\.\d+\.(attn_(q|k|v|output|qkv|gate)|ffn_(gate|up|down)(_shexp|_exps)?|ssm_(in|out|alpha|beta)"
    r"|nextn\.(eh_proj|shared_head_head))\.weight"
)
"""Weights that llama.cpp knows a scale of; that of the output matrix counts where it is NVFP4."""


def sides_of(weight: Described) -> tuple[str, ...]:
    """Return the tensors that may stand beside a weight: its scale, and its input's, which nothing uses."""
    if not _has_scale(weight):
        return ()
    stem = weight.name.removesuffix(".weight")
    return f"{stem}.scale", f"{stem}.input_scale"


def _has_scale(weight: Described) -> bool:
    return _HAS_SCALE.fullmatch(weight.name) is not None or (
        weight.name == "output.weight" and weight.type == NVFP4
    )


@dataclass(frozen=True)
class ScaledTensor(MadeOfTensor):
    """A weight times its scale, float32. Its type and its bytes are those of the weight alone.

    scales  float32, one for the tensor or one for each matrix
    """

    tensor: SourceTensor
    scales: npt.NDArray[np.float32]

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        rows = self.tensor.read_rows(start, stop).astype(np.float32)
        n_rows = int(np.prod(self.shape[:-1])) // len(self.scales)
        return rows * self.scales[np.arange(start, stop) // n_rows, None]

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.tensor.raw_rows(start, stop)


def with_scales(
    tensors: Mapping[str, SourceTensor], path: Path, architecture: str = "", but: Collection[str] = ()
) -> dict[str, SourceTensor]:
    """Return the tensors of a model, with weights that have a scale multiplied by it.

    path    of the model, for messages
    architecture  refuses scales that it has no use for; "": none does
    but     parts whose scale is something else ("ffn_down_exps")
    raises  ShapeError for a scale that does not fit its weight, FormatError for one that is no float32, or
            that stands beside a bias which llama.cpp would scale, too; UnsupportedCheckpoint for one that
            llama.cpp does not multiply by in a model of this architecture, or a bias that it does not add
    """
    scaled, loader = dict(tensors), LOADERS.get(architecture)
    unbiased = frozenset() if loader is None else loader.unbiased
    for name in tensors:
        if name.endswith(".bias") and name.split(".")[-2] in unbiased:
            raise UnsupportedCheckpoint(
                f"{path}: {name}: llama.cpp reads this bias of a {architecture} model and does not add it,"
                " expected no such tensor"
            )
    for name in _scales_in(tensors, but):
        if loader is not None and name.split(".")[-2] not in loader.scaled:
            raise UnsupportedCheckpoint(
                f"{path}: {name}: llama.cpp reads this scale of a {architecture} model and does not multiply"
                " by it, expected no such tensor"
            )
        weight = f"{name.removesuffix('.scale')}.weight"
        scaled[weight] = ScaledTensor(tensors[weight], _scales(tensors, name, tensors[weight], path))
    return scaled


def scaled_tensors(file: GGUFSource) -> dict[str, SourceTensor]:
    """Return the tensors of a file, those with a scale multiplied by it; raises as `with_scales`."""
    return with_scales({name: GGUFTensor(file, name) for name in file.tensors}, Path(file.path))


def refuse_scales(path: Path, tensors: Mapping[str, Described], but: Collection[str] = ()) -> None:
    """Raise BadRequest for a model whose weights have scales: codes are chosen for weights alone.

    path, but  as of `with_scales`
    """
    scales = _scales_in(tensors, but)
    if scales:
        raise BadRequest(
            f"{path}: {scales[0]}{' ...' * (len(scales) > 1)}: {len(scales)} weights are scaled by another"
            " tensor, expected none: choose codes for a model in BF16"
        )


def _scales_in(tensors: Mapping[str, Described], but: Collection[str]) -> list[str]:
    """Return the names of the tensors that scale weights."""
    found = [f"{name.removesuffix('.weight')}.scale" for name in tensors if _has_scale(tensors[name])]
    return [name for name in found if name in tensors and name.split(".")[-2] not in but]


def _scales(
    tensors: Mapping[str, SourceTensor], name: str, weight: SourceTensor, path: Path
) -> npt.NDArray[np.float32]:
    scale, count = tensors[name], weight.shape[0] if len(weight.shape) > 2 else 1
    if scale.shape != (count,):
        raise ShapeError(f"{path}: {name}: found shape {scale.shape}, expected ({count},)")
    if scale.type != F32:
        raise FormatError(f"{path}: {name}: found type {scale.type}, expected {F32}")
    bias = f"{name.removesuffix('.scale')}.bias"
    if bias in tensors and _BIAS_IS_SCALED.search(name):
        raise FormatError(f"{path}: {name}: stands beside {bias}, expected one of them")
    return np.array(scale.read_rows(0, 1), np.float32).reshape(-1)


_BIAS_IS_SCALED = re.compile(r"ffn_(gate|up|down)(_shexp)?\.scale$")
"""Scales with which llama.cpp multiplies the sum of product and bias."""
