"""The structs of tests/support/oracle are those of the installed wheel."""

from __future__ import annotations

import ctypes as c

import pytest

from tests.support import oracle
from tests.support.oracle.library import shared_object
from tests.support.oracle.model import ContextParams, ModelParams, library

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

SENTINEL = 0xAA
ALIGNMENT = 8


@pytest.mark.parametrize(
    ("function", "struct"),
    [
        ("llama_model_default_params", ModelParams),
        ("llama_context_default_params", ContextParams),
    ],
)
def test_struct_is_as_large_as_the_library_writes(function: str, struct: type[c.Structure]) -> None:
    # a struct this large is returned through a hidden first argument: a marked buffer shows what is written
    call = getattr(c.CDLL(str(shared_object())), function)
    call.restype, call.argtypes = None, [c.c_void_p]
    buffer = (c.c_ubyte * 1024)(*[SENTINEL] * 1024)
    call(c.addressof(buffer))
    written = len(bytes(buffer).rstrip(bytes([SENTINEL])))
    assert -(-written // ALIGNMENT) * ALIGNMENT == c.sizeof(struct)


def test_defaults_land_in_their_fields() -> None:
    model = library().llama_model_default_params()
    assert (model.n_gpu_layers, model.split_mode, model.load_mode, model.lazy_mode) == (-1, 1, -1, 1)
    assert (model.vocab_only, model.use_extra_bufts, model.no_host) == (False, True, False)
    context = library().llama_context_default_params()
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 2048, 512, 1)
    assert (context.flash_attn_type, context.type_k, context.type_v) == (-1, 1, 1)
    assert (context.yarn_ext_factor, context.defrag_thold) == (-1.0, -1.0)
    assert (context.offload_kqv, context.no_perf, context.op_offload, context.swa_full) == (True,) * 4
    assert (context.embeddings, context.kv_unified, context.n_samplers) == (False, False, 0)
