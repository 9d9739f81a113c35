"""What decides the numbers of a run besides the model: the text, and how the model is computed."""

from __future__ import annotations

from typing import Any

from forward.device import device_name
from forward.options import ForwardOptions
from forward.text.tokens import Text


def run_identity(text: Text, forward: ForwardOptions) -> dict[str, Any]:
    """Return the facts that every run over a text shares, as JSON data made to be compared.

    A run adds what its own numbers depend on. An interrupted one resumes only under the same facts.
    """
    return {
        "text": text.digest(),
        "chunks": text.n_chunks,
        "context": text.chunk_size,
        "dtype": forward.dtype,
        "device": device_name(forward.device),
    }
