"""ggml's reader of GGUF files: the metadata and the tensors of a header."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.oracle.library import LOG, Signatures, declared


class InitParams(c.Structure):
    """struct gguf_init_params"""

    _fields_ = (("no_alloc", c.c_bool), ("ctx", c.c_void_p))


@dataclass(frozen=True)
class GGUFTensorFacts:
    """shape: as stored, fastest dimension first; offset: from the start of the data section."""

    shape: tuple[int, ...]
    type_id: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GGUFFacts:
    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorFacts]


# gguf_type -> (name of the accessor, numpy dtype of array items)
SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "u1"),
    1: ("i8", "i1"),
    2: ("u16", "<u2"),
    3: ("i16", "<i2"),
    4: ("u32", "<u4"),
    5: ("i32", "<i4"),
    6: ("f32", "<f4"),
    7: ("bool", "?"),
    10: ("u64", "<u8"),
    11: ("i64", "<i8"),
    12: ("f64", "<f8"),
}
STRING, ARRAY = 8, 9


def read_gguf(path: str | Path) -> GGUFFacts:
    """Return what ggml's reader finds in a GGUF file; raises RuntimeError with its log when it refuses."""
    lib = _library()
    LOG.clear()
    context = lib.gguf_init_from_file(str(path).encode(), InitParams(no_alloc=True, ctx=None))
    if not context:
        raise RuntimeError(f"{path}: llama.cpp can't read it: {''.join(LOG).strip()}")
    try:
        keys = range(lib.gguf_get_n_kv(context))
        tensors = range(lib.gguf_get_n_tensors(context))
        return GGUFFacts(
            version=lib.gguf_get_version(context),
            alignment=lib.gguf_get_alignment(context),
            data_offset=lib.gguf_get_data_offset(context),
            metadata={lib.gguf_get_key(context, i).decode(): _value(lib, context, i) for i in keys},
            tensors={
                lib.gguf_get_tensor_name(context, i).decode(): _tensor(lib, context, i) for i in tensors
            },
        )
    finally:
        lib.gguf_free(context)


def _value(lib: c.CDLL, context: int, index: int) -> Any:
    kind = lib.gguf_get_kv_type(context, index)
    if kind == STRING:
        return lib.gguf_get_val_str(context, index).decode(errors="surrogateescape")
    if kind != ARRAY:
        return getattr(lib, f"gguf_get_val_{SCALARS[kind][0]}")(context, index)
    n_items = lib.gguf_get_arr_n(context, index)
    item = lib.gguf_get_arr_type(context, index)
    if item == STRING:
        return [
            lib.gguf_get_arr_str(context, index, i).decode(errors="surrogateescape") for i in range(n_items)
        ]
    dtype = np.dtype(SCALARS[item][1])
    return np.frombuffer(
        c.string_at(lib.gguf_get_arr_data(context, index), n_items * dtype.itemsize), dtype
    ).tolist()


def _tensor(lib: c.CDLL, context: int, index: int) -> GGUFTensorFacts:
    shape = list(lib.gguf_get_tensor_ne(context, index)[:4])
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return GGUFTensorFacts(
        shape=tuple(shape),
        type_id=lib.gguf_get_tensor_type(context, index),
        offset=lib.gguf_get_tensor_offset(context, index),
        n_bytes=lib.gguf_get_tensor_size(context, index),
    )


SIGNATURES: Signatures = {
    "gguf_init_from_file": (c.c_void_p, [c.c_char_p, InitParams]),
    "gguf_free": (None, [c.c_void_p]),
    "gguf_get_version": (c.c_uint32, [c.c_void_p]),
    "gguf_get_alignment": (c.c_size_t, [c.c_void_p]),
    "gguf_get_data_offset": (c.c_size_t, [c.c_void_p]),
    "gguf_get_n_kv": (c.c_int64, [c.c_void_p]),
    "gguf_get_key": (c.c_char_p, [c.c_void_p, c.c_int64]),
    "gguf_get_kv_type": (c.c_int, [c.c_void_p, c.c_int64]),
    "gguf_get_val_u8": (c.c_uint8, [c.c_void_p, c.c_int64]),
    "gguf_get_val_i8": (c.c_int8, [c.c_void_p, c.c_int64]),
    "gguf_get_val_u16": (c.c_uint16, [c.c_void_p, c.c_int64]),
    "gguf_get_val_i16": (c.c_int16, [c.c_void_p, c.c_int64]),
    "gguf_get_val_u32": (c.c_uint32, [c.c_void_p, c.c_int64]),
    "gguf_get_val_i32": (c.c_int32, [c.c_void_p, c.c_int64]),
    "gguf_get_val_u64": (c.c_uint64, [c.c_void_p, c.c_int64]),
    "gguf_get_val_i64": (c.c_int64, [c.c_void_p, c.c_int64]),
    "gguf_get_val_f32": (c.c_float, [c.c_void_p, c.c_int64]),
    "gguf_get_val_f64": (c.c_double, [c.c_void_p, c.c_int64]),
    "gguf_get_val_bool": (c.c_bool, [c.c_void_p, c.c_int64]),
    "gguf_get_val_str": (c.c_char_p, [c.c_void_p, c.c_int64]),
    "gguf_get_arr_type": (c.c_int, [c.c_void_p, c.c_int64]),
    "gguf_get_arr_n": (c.c_size_t, [c.c_void_p, c.c_int64]),
    "gguf_get_arr_data": (c.c_void_p, [c.c_void_p, c.c_int64]),
    "gguf_get_arr_str": (c.c_char_p, [c.c_void_p, c.c_int64, c.c_size_t]),
    "gguf_get_n_tensors": (c.c_int64, [c.c_void_p]),
    "gguf_get_tensor_name": (c.c_char_p, [c.c_void_p, c.c_int64]),
    "gguf_get_tensor_ne": (c.POINTER(c.c_int64), [c.c_void_p, c.c_int64]),
    "gguf_get_tensor_type": (c.c_int, [c.c_void_p, c.c_int64]),
    "gguf_get_tensor_offset": (c.c_size_t, [c.c_void_p, c.c_int64]),
    "gguf_get_tensor_size": (c.c_size_t, [c.c_void_p, c.c_int64]),
}


@cache
def _library() -> c.CDLL:
    return declared(SIGNATURES)
