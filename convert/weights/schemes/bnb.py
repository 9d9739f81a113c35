"""bitsandbytes: 4-bit codes that look values up (nf4, fp4), and 8-bit integers.

4 bits. The matrix is one run of elements, row after row, in blocks that may cross from a row into the next:

    X.weight             bytes  two codes each, the first in the high half; may be stored under a float dtype
    X.weight.absmax      F32 (n_blocks,), or U8 when nested
    X.weight.quant_map   F32 (16,)
    X.weight.quant_state.bitsandbytes__nf4 or __fp4    U8: JSON with quant_type, blocksize, shape ...
    X.weight.nested_absmax, X.weight.nested_quant_map  F32: the scales of blocks of scales, and 256 values

    element[e] = quant_map[code[e]] * absmax[e // blocksize]
    nested: absmax[b] = nested_quant_map[stored[b]] * nested_absmax[b // nested_blocksize] + nested_offset

GPTQModel spells them X.weight_absmax, X.weight_quant_map, X.weight_quant_state ...

8 bits:

    X.weight         I8  (n_rows, n_cols)
    X.SCB            F32 (n_rows,)
    X.weight_format  U8  0: rows, the only order that is read

    weight[i, j] = code[i, j] * scale[i] / 127

The look-up rounds once, nested scales twice more. The 8-bit formula rounds twice, as bitsandbytes does: after
the product with the scale, and after the product with float32(1 / 127). A row range reads what it needs, and
blocks that cross its ends as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import NUMPY_DTYPES, RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import check_scales, scaled
from gguf_tools.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.text import quoted

_STORAGE = ("U8", "I8", "F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales that are themselves quantized, in blocks of `block_elems`; `offset` is added to each."""

    values: RawTensor
    scales: RawTensor
    block_elems: int
    offset: np.float32


@dataclass(frozen=True, slots=True)
class Bnb4Weight(Decoded):
    """A matrix of 4-bit codes in blocks.

    codes   the bytes, of any dtype
    values  quant_map
    scales  absmax, one per block of `block_elems`
    nested  how to decode `scales`; None: they are floats
    """

    codes: RawTensor
    values: RawTensor
    scales: RawTensor
    nested: NestedScales | None
    block_elems: int
    kind: str

    @property
    def stored_as(self) -> str:
        nested = ", nested scales" if self.nested is not None else ""
        return f"bitsandbytes {self.kind} in blocks of {self.block_elems}{nested}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        from convert.weights.kernels import look_up_nibbles

        n_cols = self.shape[-1]
        first, last = start * n_cols, stop * n_cols
        first_block, last_block = first // self.block_elems, -(-last // self.block_elems)
        data = self._read_bytes(first_block * self.block_elems // 2, -(-last // 2))
        blocks = np.empty((last_block - first_block, self.block_elems), np.float32)
        scales = self._read_scales(first_block, last_block)
        look_up_nibbles(data, self.values.read_elements(0, 16), scales, blocks)
        skip = first - first_block * self.block_elems
        return blocks.reshape(-1)[skip : skip + last - first].reshape(stop - start, n_cols)

    def _read_bytes(self, start: int, stop: int) -> np.ndarray:
        size = NUMPY_DTYPES[self.codes.dtype].itemsize
        first = start // size
        data = self.codes.read_elements(first, -(-stop // size)).view(np.uint8)
        return data[start - first * size : stop - first * size]

    def _read_scales(self, start: int, stop: int) -> np.ndarray:
        stored = self.scales.read_elements(start, stop)
        if self.nested is None:
            return stored.astype(np.float32)
        block = self.nested.block_elems
        values = self.nested.values.read_elements(0, 256)[stored.view(np.uint8)]
        scales = self.nested.scales.read_elements(start // block, -(-stop // block))
        return values * scales[np.arange(start, stop) // block - start // block] + self.nested.offset


@dataclass(frozen=True, slots=True)
class Bnb8Weight(Decoded):
    """A matrix of 8-bit integers with a scale per row."""

    codes: RawTensor
    scales: RawTensor
    stored_as: ClassVar[str] = "bitsandbytes int8 by row"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        codes = self.codes.read_rows(start, stop)
        scales = self.scales.read_elements(start, stop)[:, None]
        rows = scaled(codes, 0, scales, self.shape[1])
        rows *= np.float32(1 / 127)
        return rows


# ---- loading


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a producer joins "weight" and the names of the other tensors."""

    joint: str
    states: tuple[str, ...]

    def suffix(self, name: str) -> str:
        return f".weight{self.joint}{name}"


_SPELLINGS = (
    _Spelling(".", (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")),
    _Spelling("_", (".weight_quant_state",)),
)


def _state(module: Module) -> tuple[_Spelling, RawTensor] | None:
    """Return how the tensors of this module are spelled, and the one with its state; None without a state."""
    tried = ((spelling, module.get(suffix)) for spelling in _SPELLINGS for suffix in spelling.states)
    return next(((spelling, raw) for spelling, raw in tried if raw is not None), None)


def _load4(module: Module) -> Bnb4Weight:
    stored_state = _state(module)
    if stored_state is None:
        raise MissingTensor(f"{module.checkpoint.folder}: {module.name}: quantized without its quant_state")
    spelling, state_raw = stored_state
    state = _read_state(state_raw)
    codes, scales = module[".weight"], module[spelling.suffix("absmax")]
    values = module[spelling.suffix("quant_map")]
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 0 for n in shape):
        raise module.wrong(state_raw, f"shape {str(shape)[:80]}", "sizes")
    if type(block) is not int or block <= 0 or block % 8:
        raise module.wrong(state_raw, f"blocksize {str(block)[:80]}", "a multiple of 8")
    n_elems = prod(shape)
    n_blocks = -(-n_elems // block)
    if codes.dtype not in _STORAGE:
        raise module.wrong(codes, codes.dtype, ", ".join(_STORAGE))
    if codes.n_bytes < -(-n_elems // 2):
        raise module.wrong(codes, f"{codes.n_bytes} bytes", f"{-(-n_elems // 2)} for {tuple(shape)}")
    _check_count(module, values, 16)
    nested = None
    if "nested_blocksize" in state:
        nested = _nested(module, spelling, state, state_raw, n_blocks)
    else:
        check_scales(scales, len(scales.shape))
    if scales.n_rows * scales.n_cols != n_blocks:
        raise module.wrong(scales, f"{scales.n_rows * scales.n_cols} scales", f"{n_blocks} blocks of {block}")
    kind = str(state.get("quant_type", "4 bits"))
    return Bnb4Weight(module.name, tuple(shape), codes, values, scales, nested, block, kind)


def _nested(
    module: Module, spelling: _Spelling, state: Mapping[str, Any], state_raw: RawTensor, n_blocks: int
) -> NestedScales:
    values, scales = module[spelling.suffix("nested_quant_map")], module[spelling.suffix("nested_absmax")]
    block, offset = state["nested_blocksize"], state.get("nested_offset")
    if type(block) is not int or block <= 0 or type(offset) is not float:
        raise module.wrong(
            state_raw,
            f"nested_blocksize {quoted(block)} and nested_offset {quoted(offset)}",
            "a size and a number",
        )
    stored = module[spelling.suffix("absmax")]
    if stored.dtype != "U8":
        raise module.wrong(stored, stored.dtype, "U8, as its scales are nested")
    _check_count(module, values, 256)
    _check_count(module, scales, -(-n_blocks // block))
    return NestedScales(values, scales, block, np.float32(offset))


def _check_count(module: Module, raw: RawTensor, count: int) -> None:
    if raw.dtype != "F32" or raw.n_rows * raw.n_cols != count:
        raise module.wrong(raw, f"{raw.dtype} {raw.shape}", f"{count} F32")


def _read_state(raw: RawTensor) -> dict[str, Any]:
    try:
        state = json.loads(raw.read().tobytes())
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"{raw.path}: {raw.name}: no JSON object, expected the state of bitsandbytes")
    return state


def _load8(module: Module) -> Bnb8Weight:
    codes = module[".weight"]
    scales = module.get(".SCB") or module[".weight_scb"]
    order = module.get(".weight_format")
    if order is not None and order.read().any():
        raise UnsupportedCheckpoint(
            f"{order.path}: {order.name}: bitsandbytes int8 in order {int(order.read().reshape(-1)[0])},"
            " a tiled one; only rows (0) are read"
        )
    if scales.dtype != "F32" or scales.n_rows * scales.n_cols != codes.shape[0]:
        raise module.wrong(scales, f"{scales.dtype} {scales.shape}", f"{codes.shape[0]} F32")
    return Bnb8Weight(codes.name, codes.shape, codes, scales)


def _fits8(module: Module) -> bool:
    codes = module[".weight"]
    return codes.dtype == "I8" and len(codes.shape) == 2 and (module.has(".SCB") or module.has(".weight_scb"))


_NAMES4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_SIDES4 = tuple(
    suffix for spelling in _SPELLINGS for suffix in (*map(spelling.suffix, _NAMES4), *spelling.states)
)
_SIDES8 = (".SCB", ".weight_scb", ".weight_format")

LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("bitsandbytes 4 bits", ("bitsandbytes",), ".weight", _SIDES4, _load4,
                  lambda module: _state(module) is not None),
    WeightsLoader("bitsandbytes int8", ("bitsandbytes",), ".weight", _SIDES8, _load8, _fits8),
)  # fmt: skip
