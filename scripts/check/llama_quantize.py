"""Call llama_model_quantize of a shared libllama, in a process of its own.

    python scripts/check/llama_quantize.py LIBLLAMA REQUEST.json

The request says what llama-quantize's command line would (see `Request`). The exit status is 0 for a file
that was written, 1 for a refusal; an assertion of llama.cpp ends the process. Its log is on standard error.
The structs are those of llama.h of llama.cpp v0.5.0; the library's default values are checked first.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from pathlib import Path
from typing import Any, TypedDict

N_TYPES = 43
"""GGML_TYPE_COUNT, which stands for no type."""

LLAMA_FTYPE_MOSTLY_Q8_0 = 7
MAX_BUFFER = 8 << 30
INT, FLOAT, BOOL, STRING = range(4)
"""llama_model_kv_override_type"""


class Request(TypedDict):
    """What is asked for.

    params   fields of llama_model_quantize_params that are numbers
    imatrix  a file of float32 values, and each entry's name, first value and number of values
    """

    source: str
    output: str
    params: dict[str, int | bool]
    kv_overrides: list[tuple[str, int, Any]]
    rules: list[tuple[str, int]]
    prune_layers: list[int]
    imatrix: tuple[str, list[tuple[str, int, int]]] | None


class Params(c.Structure):
    """struct llama_model_quantize_params"""

    _fields_ = (
        ("nthread", c.c_int32),
        ("ftype", c.c_int),
        ("output_tensor_type", c.c_int),
        ("token_embedding_type", c.c_int),
        ("allow_requantize", c.c_bool),
        ("quantize_output_tensor", c.c_bool),
        ("only_copy", c.c_bool),
        ("pure", c.c_bool),
        ("keep_split", c.c_bool),
        ("dry_run", c.c_bool),
        ("imatrix", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("tt_overrides", c.c_void_p),
        ("prune_layers", c.c_void_p),
        ("max_buf_size", c.c_size_t),
    )


DEFAULTS = {
    "nthread": 0, "ftype": LLAMA_FTYPE_MOSTLY_Q8_0, "output_tensor_type": N_TYPES,
    "token_embedding_type": N_TYPES, "quantize_output_tensor": True, "pure": False,
    "max_buf_size": MAX_BUFFER,
}  # fmt: skip


class Number(c.Union):
    _fields_ = (("int", c.c_int64), ("float", c.c_double), ("bool", c.c_bool), ("str", c.c_char * 128))


class KVOverride(c.Structure):
    """struct llama_model_kv_override; an empty key ends a list."""

    _fields_ = (("tag", c.c_int), ("key", c.c_char * 128), ("value", Number))


class TensorOverride(c.Structure):
    """struct llama_model_tensor_override; no pattern ends a list."""

    _fields_ = (("pattern", c.c_char_p), ("type", c.c_int))


class ImatrixData(c.Structure):
    """struct llama_model_imatrix_data; no name ends a list."""

    _fields_ = (("name", c.c_char_p), ("data", c.c_void_p), ("size", c.c_size_t))


def quantize(library: str, request: Request) -> int:
    """Call the library; return what it returns: 0 for a file, 1 for a refusal."""
    lib = c.CDLL(library)
    lib.llama_model_quantize_default_params.restype = Params
    lib.llama_model_quantize.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(Params)]
    lib.llama_model_quantize.restype = c.c_uint32
    lib.llama_backend_init()
    params = lib.llama_model_quantize_default_params()
    found = {name: getattr(params, name) for name in DEFAULTS}
    if found != DEFAULTS:
        raise SystemExit(f"{library}: the structs are those of another version; found the defaults {found}")
    for name, value in request["params"].items():
        setattr(params, name, value)
    overrides = _kv_overrides(request["kv_overrides"])
    rules = [*((pattern.encode(), type_) for pattern, type_ in request["rules"]), (None, N_TYPES)]
    rules_array = (TensorOverride * len(rules))(*rules)
    layers = (c.c_int32 * (len(request["prune_layers"]) + 1))(*request["prune_layers"], -1)
    params.kv_overrides = c.addressof(overrides) if request["kv_overrides"] else None
    params.tt_overrides = c.addressof(rules_array) if request["rules"] else None
    params.prune_layers = c.addressof(layers) if request["prune_layers"] else None
    if request["imatrix"] is not None:
        path, entries = request["imatrix"]
        values = c.create_string_buffer(Path(path).read_bytes())
        start = c.addressof(values)
        data = [*((name.encode(), start + 4 * at, size) for name, at, size in entries), (None, None, 0)]
        imatrix = (ImatrixData * len(data))(*data)
        params.imatrix = c.addressof(imatrix)
    code: int = lib.llama_model_quantize(request["source"].encode(), request["output"].encode(), params)
    return code


def _kv_overrides(wanted: list[tuple[str, int, Any]]) -> c.Array[KVOverride]:
    array = (KVOverride * (len(wanted) + 1))()
    for place, (key, tag, value) in zip(array, wanted, strict=False):
        place.tag, place.key = tag, key.encode()
        setattr(place.value, ("int", "float", "bool", "str")[tag], value.encode() if tag == STRING else value)
    return array


if __name__ == "__main__":
    raise SystemExit(quantize(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
