"""llama.cpp itself, called through ctypes: what our bytes, files and models are compared with.

The xllamacpp wheel is one shared object that holds the whole of llama.cpp with its C symbols exported. Three
things are used here: ggml's codecs (codecs.py), its reader of GGUF headers (headers.py), and the model
(model.py: token ids to logits, text to token ids). Where the wheel is not installed, `available()` is False
and tests that need it are skipped.

The structs are those of include/llama.h of that release, field by field; `tests/support/test_oracle.py`
checks their sizes and defaults against the library, so a wheel with another layout fails there and not in a
crash.
"""

from __future__ import annotations

from tests.support.oracle.codecs import (
    TypeFacts,
    aborts,
    activation_type,
    dequantize,
    is_valid,
    quantize,
    refuses,
    round_activations,
    type_facts,
)
from tests.support.oracle.headers import GGUFFacts, GGUFTensorFacts, read_gguf
from tests.support.oracle.library import available
from tests.support.oracle.model import Model

__all__ = [
    "GGUFFacts",
    "GGUFTensorFacts",
    "Model",
    "TypeFacts",
    "aborts",
    "activation_type",
    "available",
    "dequantize",
    "is_valid",
    "quantize",
    "read_gguf",
    "refuses",
    "round_activations",
    "type_facts",
]
