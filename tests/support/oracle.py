"""llama.cpp itself, called through ctypes: what our bytes, files and models are compared with.

The xllamacpp wheel is one shared object that holds the whole of llama.cpp with its C symbols exported. Three
things are used here: ggml's codecs (`quantize`, `dequantize`), its GGUF reader (`read_gguf`), and the model
(`Model`: token ids to logits, text to token ids). Where the wheel is not installed, `available()` is False
and tests that need it are skipped.

The structs below are those of include/llama.h of that release, field by field; `tests/test_oracle.py` checks
their sizes and defaults against the library, so a wheel with another layout fails there and not in a crash.
"""

from __future__ import annotations

import ctypes as c
import faulthandler
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

LOG_LIMIT = 2000
"""Lines of llama.cpp's log that are kept for error messages."""


@cache
def _shared_object() -> Path | None:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"), None)


def available() -> bool:
    """Return whether the wheel is installed."""
    return _shared_object() is not None


@cache
def library() -> c.CDLL:
    """Return the wheel's shared object with its functions declared and its log silenced."""
    path = _shared_object()
    if path is None:
        raise RuntimeError("the oracle needs the xllamacpp wheel: pip install '.[test]'")
    lib = c.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    lib.llama_log_set(_keep_log, None)
    lib.llama_backend_init()
    return lib


LOG: list[str] = []
"""llama.cpp's latest log lines: it explains a refusal there and returns NULL."""


@c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
def _keep_log(_level: int, text: bytes, _user: int) -> None:
    LOG.append(text.decode(errors="replace"))
    del LOG[:-LOG_LIMIT]


# ---- ggml: codecs


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


@dataclass(frozen=True)
class TypeFacts:
    name: str
    block_elems: int
    block_bytes: int
    requires_importance: bool


def type_facts(type_id: int) -> TypeFacts:
    """Return what ggml knows of one of its types."""
    traits = library().ggml_get_type_traits(type_id).contents
    return TypeFacts(
        name=traits.type_name.decode(),
        block_elems=traits.blck_size,
        block_bytes=traits.type_size,
        requires_importance=library().ggml_quantize_requires_imatrix(type_id),
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
    lib = library()
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


def aborts(type_id: int, rows: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None) -> bool:
    """Return whether ggml_quantize_chunk ends the process on `rows`; tried in a child process."""
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


def dequantize(type_id: int, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return what ggml's own decoder makes of `blocks`.

    blocks   uint8 (n_rows, bytes of a row)
    returns  float32 (n_rows, n_cols)
    """
    traits = library().ggml_get_type_traits(type_id).contents
    blocks = np.ascontiguousarray(blocks, np.uint8)
    n_cols = blocks.shape[1] // traits.type_size * traits.blck_size
    rows = np.empty((blocks.shape[0], n_cols), np.float32)
    if type_id == Q8_K:
        library().dequantize_row_q8_K(blocks.ctypes.data, rows.ctypes.data, rows.size)
        return rows
    if not traits.to_float:  # F32 has no decoder
        return blocks.view(np.float32).copy()
    traits.to_float(blocks.ctypes.data, rows.ctypes.data, rows.size)
    return rows


# ---- gguf: header and tensor table


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
    lib = library()
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


# ---- llama: a model


class ModelParams(c.Structure):
    """struct llama_model_params"""

    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int),
        ("load_mode", c.c_int),
        ("lazy_mode", c.c_int),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    )


class ContextParams(c.Structure):
    """struct llama_context_params"""

    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int),
        ("rope_scaling_type", c.c_int),
        ("pooling_type", c.c_int),
        ("attention_type", c.c_int),
        ("flash_attn_type", c.c_int),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int),
        ("type_v", c.c_int),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("unnamed", c.c_void_p),  # the wheel's struct has 8 more bytes here than the header at hand; 0
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class Batch(c.Structure):
    """struct llama_batch; pos and seq_id left NULL mean: positions 0, 1, ... of sequence 0"""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.POINTER(c.c_int8)),
    )


class Model:
    """A GGUF model loaded by llama.cpp on the CPU; a context manager."""

    def __init__(self, path: str | Path, *, vocab_only: bool = False) -> None:
        """Load `path`; raises RuntimeError with llama.cpp's log when it refuses."""
        lib = library()
        LOG.clear()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.vocab_only = vocab_only
        params.use_extra_bufts = False  # no repacking: the plain kernels are the most exact
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp can't load it: {''.join(LOG).strip()}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._model:
            library().llama_model_free(self._model)
            self._model = None

    def logits(self, token_ids: Sequence[int], *, n_threads: int = 2) -> npt.NDArray[np.float32]:
        """Return the logits after each token, float32 (n_tokens, n_vocab).

        The cache is float32 and attention is the plain one: llama.cpp at its most exact.
        """
        lib = library()
        n_tokens = len(token_ids)
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(n_tokens, 32)
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = 0
        params.type_k = params.type_v = 0
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp can't make a context: {''.join(LOG[-10:]).strip()}")
        try:
            batch = Batch(
                n_tokens=n_tokens,
                token=(c.c_int32 * n_tokens)(*token_ids),
                logits=(c.c_int8 * n_tokens)(*[1] * n_tokens),
            )
            status = lib.llama_decode(context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}: {''.join(LOG[-10:]).strip()}")
            values = np.ctypeslib.as_array(lib.llama_get_logits(context), (n_tokens, self.n_vocab))
            return values.copy()
        finally:
            lib.llama_free(context)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Return the token ids of `text`."""
        lib = library()
        data = text.encode()
        ids = (c.c_int32 * (len(data) + 8))()
        n_ids = lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        if n_ids < 0:
            raise RuntimeError(f"llama_tokenize returned {n_ids}")
        return list(ids[:n_ids])


# ---- declarations

_SIZE, _PTR, _STR = c.c_size_t, c.c_void_p, c.c_char_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_type_traits": (c.POINTER(TypeTraits), [c.c_int]),
    "ggml_quantize_requires_imatrix": (c.c_bool, [c.c_int]),
    "ggml_row_size": (_SIZE, [c.c_int, c.c_int64]),
    "ggml_quantize_chunk": (_SIZE, [c.c_int, _PTR, _PTR, c.c_int64, c.c_int64, c.c_int64, _PTR]),
    "quantize_row_q8_K_ref": (None, [_PTR, _PTR, c.c_int64]),
    "dequantize_row_q8_K": (None, [_PTR, _PTR, c.c_int64]),
    "gguf_init_from_file": (_PTR, [_STR, InitParams]),
    "gguf_free": (None, [_PTR]),
    "gguf_get_version": (c.c_uint32, [_PTR]),
    "gguf_get_alignment": (_SIZE, [_PTR]),
    "gguf_get_data_offset": (_SIZE, [_PTR]),
    "gguf_get_n_kv": (c.c_int64, [_PTR]),
    "gguf_get_key": (_STR, [_PTR, c.c_int64]),
    "gguf_get_kv_type": (c.c_int, [_PTR, c.c_int64]),
    "gguf_get_val_u8": (c.c_uint8, [_PTR, c.c_int64]),
    "gguf_get_val_i8": (c.c_int8, [_PTR, c.c_int64]),
    "gguf_get_val_u16": (c.c_uint16, [_PTR, c.c_int64]),
    "gguf_get_val_i16": (c.c_int16, [_PTR, c.c_int64]),
    "gguf_get_val_u32": (c.c_uint32, [_PTR, c.c_int64]),
    "gguf_get_val_i32": (c.c_int32, [_PTR, c.c_int64]),
    "gguf_get_val_u64": (c.c_uint64, [_PTR, c.c_int64]),
    "gguf_get_val_i64": (c.c_int64, [_PTR, c.c_int64]),
    "gguf_get_val_f32": (c.c_float, [_PTR, c.c_int64]),
    "gguf_get_val_f64": (c.c_double, [_PTR, c.c_int64]),
    "gguf_get_val_bool": (c.c_bool, [_PTR, c.c_int64]),
    "gguf_get_val_str": (_STR, [_PTR, c.c_int64]),
    "gguf_get_arr_type": (c.c_int, [_PTR, c.c_int64]),
    "gguf_get_arr_n": (_SIZE, [_PTR, c.c_int64]),
    "gguf_get_arr_data": (_PTR, [_PTR, c.c_int64]),
    "gguf_get_arr_str": (_STR, [_PTR, c.c_int64, _SIZE]),
    "gguf_get_n_tensors": (c.c_int64, [_PTR]),
    "gguf_get_tensor_name": (_STR, [_PTR, c.c_int64]),
    "gguf_get_tensor_ne": (c.POINTER(c.c_int64), [_PTR, c.c_int64]),
    "gguf_get_tensor_type": (c.c_int, [_PTR, c.c_int64]),
    "gguf_get_tensor_offset": (_SIZE, [_PTR, c.c_int64]),
    "gguf_get_tensor_size": (_SIZE, [_PTR, c.c_int64]),
    "llama_log_set": (None, [_PTR, _PTR]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (_PTR, [_STR, ModelParams]),
    "llama_model_free": (None, [_PTR]),
    "llama_model_get_vocab": (_PTR, [_PTR]),
    "llama_vocab_n_tokens": (c.c_int32, [_PTR]),
    "llama_init_from_model": (_PTR, [_PTR, ContextParams]),
    "llama_free": (None, [_PTR]),
    "llama_decode": (c.c_int32, [_PTR, Batch]),
    "llama_get_logits": (c.POINTER(c.c_float), [_PTR]),
    "llama_tokenize": (
        c.c_int32,
        [_PTR, _STR, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool],
    ),
}
