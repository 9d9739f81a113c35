"""ggml's types: what it knows of them, its encoders and its decoders."""

from __future__ import annotations

import ctypes as c
import faulthandler
import os
import signal
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tests.support.oracle.library import Signatures, declared


class TypeTraits(c.Structure):
    """struct ggml_type_traits"""

    _fields_ = (
        ("type_name", c.c_char_p),
        ("blck_size", c.c_int64),
        ("blck_size_interleave", c.c_int64),
        ("type_size", c.c_size_t),
        ("is_quantized", c.c_bool),
        ("to_float", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)),
        ("from_float_ref", c.c_void_p),
    )


class CPUTypeTraits(c.Structure):
    """struct ggml_type_traits_cpu"""

    _fields_ = (
        ("from_float", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)),
        ("vec_dot", c.c_void_p),
        ("vec_dot_type", c.c_int),
        ("nrows", c.c_int64),
    )


@dataclass(frozen=True)
class TypeFacts:
    name: str
    block_elems: int
    block_bytes: int
    requires_importance: bool


def type_facts(type_id: int) -> TypeFacts:
    """Return what ggml knows of one of its types."""
    traits = _library().ggml_get_type_traits(type_id).contents
    return TypeFacts(
        name=traits.type_name.decode(),
        block_elems=traits.blck_size,
        block_bytes=traits.type_size,
        requires_importance=_library().ggml_quantize_requires_imatrix(type_id),
    )


Q8_K = 15
"""A type for which ggml has functions, but no place in ggml_quantize_chunk and none in the type's traits."""


def quantize(
    type_id: int, rows: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.uint8]:
    """Return what ggml_quantize_chunk makes of `rows`, for Q8_K quantize_row_q8_K_ref.

    rows     float32 (n_rows, n_cols)
    weights  float32 (n_cols,) or None
    returns  uint8 (n_rows, bytes of a row)
    """
    lib = _library()
    rows = np.ascontiguousarray(rows, np.float32)
    n_rows, n_cols = rows.shape
    blocks = np.zeros((n_rows, lib.ggml_row_size(type_id, n_cols)), np.uint8)
    if type_id == Q8_K:
        lib.quantize_row_q8_K_ref(rows.ctypes.data, blocks.ctypes.data, rows.size)
        return blocks
    if weights is not None:
        weights = np.ascontiguousarray(weights, np.float32)
    importances = None if weights is None else weights.ctypes.data
    written = lib.ggml_quantize_chunk(
        type_id, rows.ctypes.data, blocks.ctypes.data, 0, n_rows, n_cols, importances
    )
    if written != blocks.nbytes:
        raise RuntimeError(f"ggml_quantize_chunk wrote {written} bytes, expected {blocks.nbytes}")
    return blocks


OFF_THE_GRID = frozenset({16, 17, 18, 19, 21, 22, 29})
"""Types for which ggml_quantize_chunk looks for points of a grid, and aborts where all errors overflow."""


def aborts(type_id: int, rows: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None) -> bool:
    """Return whether ggml_quantize_chunk ends the process on `rows`; tried in a child process.

    With other types than those of OFF_THE_GRID it has nothing to end it: there is no need to try.
    """
    if type_id not in OFF_THE_GRID:
        return False
    quantize(
        type_id, np.zeros((1, rows.shape[1]), np.float32), np.ones(rows.shape[1], np.float32)
    )  # its tables
    child = os.fork()
    if child == 0:
        os.environ["GGML_NO_BACKTRACE"] = "1"  # or it calls a debugger, which takes seconds
        faulthandler.disable()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        quantize(type_id, rows, weights)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT


def is_valid(type_id: int, blocks: npt.NDArray[np.uint8]) -> bool:
    """Return whether llama-quantize writes such blocks, or says "quantized data validation failed"."""
    blocks = np.ascontiguousarray(blocks)
    valid: bool = _library().ggml_validate_row_data(type_id, blocks.ctypes.data, blocks.nbytes)
    return valid


def refuses(type_id: int, rows: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None) -> bool:
    """Return whether llama-quantize ends with an error on `rows`, or aborts."""
    may_abort = np.abs(rows).max() > 1e15  # squares overflow
    if may_abort and aborts(type_id, rows, weights):
        return True
    return not is_valid(type_id, quantize(type_id, rows, weights))


def dequantize(type_id: int, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return what ggml's own decoder makes of `blocks`.

    blocks   uint8 (n_rows, bytes of a row)
    returns  float32 (n_rows, n_cols)
    """
    traits = _library().ggml_get_type_traits(type_id).contents
    blocks = np.ascontiguousarray(blocks, np.uint8)
    n_cols = blocks.shape[1] // traits.type_size * traits.blck_size
    rows = np.empty((blocks.shape[0], n_cols), np.float32)
    if type_id == Q8_K:
        _library().dequantize_row_q8_K(blocks.ctypes.data, rows.ctypes.data, rows.size)
        return rows
    if not traits.to_float:  # F32 has no decoder
        return blocks.view(np.float32).copy()
    traits.to_float(blocks.ctypes.data, rows.ctypes.data, rows.size)
    return rows


def activation_type(type_id: int) -> int:
    """Return the type that ggml's CPU kernels round activations to before a matrix multiplies them."""
    _library().ggml_cpu_init()
    found: int = _library().ggml_get_type_traits_cpu(type_id).contents.vec_dot_type
    return found


def round_activations(type_id: int, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return `rows`, (n_rows, n_cols), after ggml's CPU kernels have rounded them to a type."""
    _library().ggml_cpu_init()
    facts = type_facts(type_id)
    blocks = np.empty((len(rows), rows.shape[1] // facts.block_elems * facts.block_bytes), np.uint8)
    traits = _library().ggml_get_type_traits_cpu(type_id).contents
    for row, block in zip(np.ascontiguousarray(rows, np.float32), blocks, strict=True):
        traits.from_float(row.ctypes.data, block.ctypes.data, row.size)
    return dequantize(type_id, blocks)


SIGNATURES: Signatures = {
    "ggml_validate_row_data": (c.c_bool, [c.c_int, c.c_void_p, c.c_size_t]),
    "ggml_cpu_init": (None, []),
    "ggml_get_type_traits_cpu": (c.POINTER(CPUTypeTraits), [c.c_int]),
    "ggml_get_type_traits": (c.POINTER(TypeTraits), [c.c_int]),
    "ggml_quantize_requires_imatrix": (c.c_bool, [c.c_int]),
    "ggml_row_size": (c.c_size_t, [c.c_int, c.c_int64]),
    "ggml_quantize_chunk": (
        c.c_size_t,
        [c.c_int, c.c_void_p, c.c_void_p, c.c_int64, c.c_int64, c.c_int64, c.c_void_p],
    ),
    "quantize_row_q8_K_ref": (None, [c.c_void_p, c.c_void_p, c.c_int64]),
    "dequantize_row_q8_K": (None, [c.c_void_p, c.c_void_p, c.c_int64]),
}


@cache
def _library() -> c.CDLL:
    return declared(SIGNATURES)
