"""Findings about a model, for a user to know before the model is computed on a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gguf_tools.findings import Finding, Level
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.loaders import without_effect
from gguf_tools.format.values import Metadata
from imatrix.forward.network import Network

_SHOWN = 4
"""Number of keys that are named."""


def findings_of(path: Path, network: Network, metadata: Metadata, chunk_size: int) -> Iterator[Finding]:
    """Yield what is to be said of a model and of chunks of so many tokens.

    metadata  of a GGUF file; empty for a folder
    """
    unread = without_effect(metadata, architecture_of(metadata) or "")
    if unread:
        shown = f"{', '.join(unread[:_SHOWN])}{' ...' * (len(unread) > _SHOWN)}"
        text = f"{path}: without effect, as llama.cpp reads no such key for the architecture: {shown}"
        yield Finding("keys without effect", text, Level.NOTE, unread)
    if 0 < network.trained_context < chunk_size:
        yield Finding(
            "long chunks",
            f"{path}: chunks of {chunk_size} tokens, and the model was trained with {network.trained_context}"
            " at most (context_length): it predicts worse beyond these",
        )
