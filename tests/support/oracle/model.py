"""llama.cpp's models: from token ids to logits, and from text to token ids."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.oracle.library import LOG, Signatures, declared


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


_POOLINGS = {"mean": 1, "cls": 2, "rank": 4}


class Model:
    """A GGUF model loaded by llama.cpp on the CPU; a context manager."""

    def __init__(
        self, path: str | Path, *, vocab_only: bool = False, plain: bool = True, mtp: bool = False
    ) -> None:
        """Load `path`; raises RuntimeError with llama.cpp's log when it refuses.

        plain  leave weights as they are: the plain kernels are the most exact. False: rearrange for speed
        mtp    load the MTP layer, too
        """
        lib = library()
        LOG.clear()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.vocab_only = vocab_only
        params.use_extra_bufts = not plain
        params.load_mtp = mtp
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

    @property
    def handle(self) -> Any:
        """The llama_model."""
        return self._model

    def close(self) -> None:
        if self._model:
            library().llama_model_free(self._model)
            self._model = None

    def logits(
        self,
        token_ids: Sequence[int],
        *,
        n_threads: int = 2,
        yarn_beta_fast: float | None = None,
        as_shipped: bool = False,
        observe: Any = None,
        adapter: Path | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the logits after each token, float32 (n_tokens, n_vocab).

        The cache is float32 and attention is the plain one: llama.cpp at its most exact.
        as_shipped      leave cache and attention as they are without any option: F16, and flash attention
        yarn_beta_fast  as --yarn-beta-fast, in place of the model's
        observe         is shown nodes, see activations.CALLBACK; None for nobody
        adapter         file of an adapter that is added
        """
        lib, n_tokens = library(), len(token_ids)
        how = {"as_shipped": as_shipped, "yarn_beta_fast": yarn_beta_fast, "observe": observe}
        with self.context(n_tokens, n_threads=n_threads, **how) as context:
            if adapter is not None:
                self._add(context, adapter)
            batch = Batch(
                n_tokens=n_tokens,
                token=(c.c_int32 * n_tokens)(*token_ids),
                logits=(c.c_int8 * n_tokens)(*[1] * n_tokens),
            )
            refuse_failure("llama_decode", lib.llama_decode(context, batch))
            return self.logits_of(context, n_tokens)

    def pooled(self, token_ids: Sequence[int], pooling: str, size: int) -> npt.NDArray[np.float32]:
        """Return the vector of a text, float32 (size,): pooled by "mean" or "cls", or what a classifier says
        by "rank". Options that make llama.cpp exact are as in `logits`."""
        lib, n_tokens = library(), len(token_ids)
        with self.context(n_tokens, pooling=_POOLINGS[pooling]) as context:
            batch = Batch(
                n_tokens=n_tokens,
                token=(c.c_int32 * n_tokens)(*token_ids),
                logits=(c.c_int8 * n_tokens)(*[1] * n_tokens),
            )
            refuse_failure("llama_decode", lib.llama_decode(context, batch))
            return np.ctypeslib.as_array(lib.llama_get_embeddings_seq(context, 0), (size,)).copy()

    def _add(self, context: Any, adapter: Path) -> None:
        loaded = library().llama_adapter_lora_init(self._model, str(adapter).encode())
        if not loaded:
            raise RuntimeError(f"{adapter}: llama.cpp can't load it: {''.join(LOG[-10:]).strip()}")
        one, scale = (c.c_void_p * 1)(loaded), (c.c_float * 1)(1.0)
        status = library().llama_set_adapters_lora(context, one, 1, scale)
        refuse_failure("llama_set_adapters_lora", status)

    def logits_of(self, context: Any, n_tokens: int) -> npt.NDArray[np.float32]:
        """Return the logits of the tokens that a context has just decoded, (n_tokens, n_vocab)."""
        return np.ctypeslib.as_array(library().llama_get_logits(context), (n_tokens, self.n_vocab)).copy()

    @contextmanager
    def context(
        self,
        n_tokens: int,
        *,
        n_threads: int = 2,
        yarn_beta_fast: float | None = None,
        as_shipped: bool = False,
        observe: Any = None,
        kind: int = 0,
        pooling: int | None = None,
    ) -> Iterator[Any]:
        """Give a context for so many tokens; options as in `logits`.

        kind     LLAMA_CONTEXT_TYPE: 0 runs the model, 1 its MTP layer
        pooling  LLAMA_POOLING_TYPE, for vectors of texts; None: for logits
        """
        lib = library()
        params = lib.llama_context_default_params()
        params.ctx_type = kind
        params.n_ctx = params.n_batch = params.n_ubatch = max(n_tokens, 32)
        params.n_threads = params.n_threads_batch = n_threads
        if not as_shipped:
            params.flash_attn_type = 0
            params.type_k = params.type_v = 0
        if yarn_beta_fast is not None:
            params.yarn_beta_fast = yarn_beta_fast
        if pooling is not None:
            params.embeddings, params.pooling_type = True, pooling
        if observe is not None:
            params.cb_eval = c.cast(observe, c.c_void_p)
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp can't make a context: {''.join(LOG[-10:]).strip()}")
        try:
            yield context
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


def refuse_failure(function: str, status: int) -> None:
    """Raise RuntimeError with llama.cpp's log for a status that is not 0."""
    if status:
        raise RuntimeError(f"{function} returned {status}: {''.join(LOG[-10:]).strip()}")


SIGNATURES: Signatures = {
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, ModelParams]),
    "llama_model_free": (None, [c.c_void_p]),
    "llama_model_get_vocab": (c.c_void_p, [c.c_void_p]),
    "llama_vocab_n_tokens": (c.c_int32, [c.c_void_p]),
    "llama_init_from_model": (c.c_void_p, [c.c_void_p, ContextParams]),
    "llama_free": (None, [c.c_void_p]),
    "llama_adapter_lora_init": (c.c_void_p, [c.c_void_p, c.c_char_p]),
    "llama_set_adapters_lora": (
        c.c_int32,
        [c.c_void_p, c.POINTER(c.c_void_p), c.c_size_t, c.POINTER(c.c_float)],
    ),
    "llama_decode": (c.c_int32, [c.c_void_p, Batch]),
    "llama_get_embeddings_seq": (c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
    "llama_get_logits": (c.POINTER(c.c_float), [c.c_void_p]),
    "llama_tokenize": (
        c.c_int32,
        [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool],
    ),
}


@cache
def library() -> c.CDLL:
    """Return the library with the functions of models declared."""
    return declared(SIGNATURES)
