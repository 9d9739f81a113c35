"""llama.cpp's drafts: its MTP layer over a whole chunk, as its speculative decoding fills the layer's cache.

The model's context gives every token's hidden state behind the output norm. The draft's context is given each
token with the hidden state of the one before it, zeros before the first.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.oracle.library import Signatures, declared
from tests.support.oracle.model import Batch, Model, refuse_failure

_DECODE = 1
"""LLAMA_PROCESS_TYPE_DECODE"""

_SET_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_GET_NEXTN = "_Z26llama_get_embeddings_nextnP13llama_context"
"""Functions of llama-ext.h, which are C++."""


class Embedding(c.Structure):
    """struct llama_embd"""

    _fields_ = (("data", c.c_void_p), ("n_rows", c.c_size_t), ("n_embd", c.c_size_t))


SIGNATURES: Signatures = {
    _SET_NEXTN: (None, [c.c_void_p, c.c_bool, c.c_bool]),
    _GET_NEXTN: (c.POINTER(c.c_float), [c.c_void_p]),
    "llama_model_n_embd": (c.c_int32, [c.c_void_p]),
    "llama_batch_ext_init": (c.c_void_p, [c.c_void_p]),
    "llama_batch_ext_free": (None, [c.c_void_p]),
    "llama_batch_ext_add_token": (c.c_int32, [c.c_void_p, c.c_int32, c.c_int32]),
    "llama_batch_ext_set_pos": (c.c_bool, [c.c_void_p, c.c_int32, c.POINTER(c.c_int32)]),
    "llama_batch_ext_set_embd_state": (c.c_bool, [c.c_void_p, c.c_int32, Embedding]),
    "llama_batch_ext_set_output_logits": (c.c_bool, [c.c_void_p, c.c_int32, c.c_bool]),
    "llama_process": (c.c_int32, [c.c_void_p, c.c_int, c.c_void_p]),
}


def draft_logits(
    model: Model, token_ids: Sequence[int], *, n_threads: int = 2, observe: Any = None
) -> npt.NDArray[np.float32]:
    """Return the draft's logits at each token, float32 (n_tokens, n_vocab); the model has `mtp`.

    observe  is shown nodes of the draft, see activations.CALLBACK; None for nobody
    """
    lib, n_tokens = declared(SIGNATURES), len(token_ids)
    hidden = np.zeros((n_tokens + 1, lib.llama_model_n_embd(model.handle)), np.float32)
    with model.context(n_tokens, n_threads=n_threads) as context:
        getattr(lib, _SET_NEXTN)(context, True, False)
        tokens = (c.c_int32 * n_tokens)(*token_ids)
        batch = Batch(n_tokens=n_tokens, token=tokens, logits=(c.c_int8 * n_tokens)(*[1] * n_tokens))
        refuse_failure("llama_decode", lib.llama_decode(context, batch))
        hidden[1:] = np.ctypeslib.as_array(getattr(lib, _GET_NEXTN)(context), (n_tokens, hidden.shape[1]))
    with model.context(n_tokens, n_threads=n_threads, observe=observe, kind=1) as context:
        entries = lib.llama_batch_ext_init(context)
        for position, (token_id, row) in enumerate(zip(token_ids, hidden, strict=False)):
            place = lib.llama_batch_ext_add_token(entries, 0, token_id)
            assert lib.llama_batch_ext_set_pos(entries, place, c.c_int32(position))
            state = Embedding(row.ctypes.data, 1, len(row))
            assert lib.llama_batch_ext_set_embd_state(entries, place, state)
            assert lib.llama_batch_ext_set_output_logits(entries, place, True)
        refuse_failure("llama_process", lib.llama_process(context, _DECODE, entries))
        lib.llama_batch_ext_free(entries)
        return model.logits_of(context, n_tokens)
