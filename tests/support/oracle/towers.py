"""llama.cpp's towers: an mmproj file, loaded as its programs load it."""

from __future__ import annotations

import ctypes as c
from functools import cache
from pathlib import Path

from tests.support.oracle.library import LOG, Signatures, declared


class TowerParams(c.Structure):
    """struct mtmd_context_params"""

    _fields_ = (
        ("use_gpu", c.c_bool),
        ("device", c.c_void_p),
        ("print_timings", c.c_bool),
        ("n_threads", c.c_int),
        ("image_marker", c.c_char_p),
        ("media_marker", c.c_char_p),
        ("flash_attn_type", c.c_int),
        ("warmup", c.c_bool),
        ("image_min_tokens", c.c_int),
        ("image_max_tokens", c.c_int),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("batch_max_tokens", c.c_int32),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
    )


_SIGNATURES: Signatures = {
    "mtmd_context_params_default": (TowerParams, ()),
    "mtmd_init_from_file": (c.c_void_p, (c.c_char_p, c.c_void_p, TowerParams)),
    "mtmd_support_vision": (c.c_bool, (c.c_void_p,)),
    "mtmd_support_audio": (c.c_bool, (c.c_void_p,)),
    "mtmd_free": (None, (c.c_void_p,)),
    "mtmd_log_set": (None, (c.c_void_p, c.c_void_p)),
}


@cache
def _library() -> c.CDLL:
    return declared(_SIGNATURES)


def towers(path: Path) -> tuple[bool, bool]:
    """Load a file without a text model, and compute an empty image and an empty sound.

    returns  whether it has a vision tower, and whether it has an audio tower
    raises   RuntimeError where llama.cpp refuses the file
    """
    lib = _library()
    LOG.clear()
    params = lib.mtmd_context_params_default()
    params.use_gpu, params.warmup, params.n_threads = False, True, 1
    context = lib.mtmd_init_from_file(str(path).encode(), None, params)
    if not context:
        raise RuntimeError(f"{path}: llama.cpp can't load it: {''.join(LOG).strip()}")
    try:
        return lib.mtmd_support_vision(context), lib.mtmd_support_audio(context)
    finally:
        lib.mtmd_free(context)
