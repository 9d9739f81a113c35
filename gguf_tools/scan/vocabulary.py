"""The vocabulary: lists of one length, tokens that appear once, merges and ids of tokens that exist."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.values import Kind, Metadata
from gguf_tools.scan.findings import listed

_TOKEN_TYPES = range(7)
_BYTE_LEVEL_BPE = "gpt2"


def check_vocabulary(metadata: Metadata) -> Iterator[Finding]:
    """Report what contradicts the list of tokens; nothing for a file without one."""
    tokens = items_of(metadata, keys.TOKENIZER_TOKENS, Kind.STRING)
    if not tokens:
        return
    known = frozenset(tokens)
    if len(known) < len(tokens):
        twice = [text for text, count in Counter(tokens).items() if count > 1]
        text = f"{len(twice):,} tokens are there twice, on which llama.cpp stops: {listed(twice)}"
        yield Finding("vocabulary", text, Level.BAD, (keys.TOKENIZER_TOKENS,))
    yield from _check_lists(metadata, len(tokens))
    yield from _check_ids(metadata, len(tokens))
    model = metadata.get(keys.TOKENIZER_MODEL)
    if model is not None and model.data == _BYTE_LEVEL_BPE:
        yield from _check_merges(metadata, known)


def items_of(metadata: Metadata, key: str, item: Kind) -> tuple[Any, ...]:
    """Return the items of an array of this kind, () when there is no such array."""
    value = metadata.get(key)
    return value.data if value is not None and value.item is item else ()


def _check_lists(metadata: Metadata, n_tokens: int) -> Iterator[Finding]:
    for key in (keys.TOKENIZER_SCORES, keys.TOKENIZER_TOKEN_TYPE):
        value = metadata.get(key)
        if value is not None and value.kind is Kind.ARRAY and len(value.data) != n_tokens:
            text = f"has {len(value.data):,} items for {n_tokens:,} tokens"
            level = Level.BAD if len(value.data) < n_tokens else Level.WARNING
            yield Finding("vocabulary", text, level, (key,))
    scores = items_of(metadata, keys.TOKENIZER_SCORES, Kind.FLOAT32)
    if n_bad := sum(not math.isfinite(score) for score in scores):
        text = f"{n_bad:,} scores are NaN or infinite"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_SCORES,))
    types = items_of(metadata, keys.TOKENIZER_TOKEN_TYPE, Kind.INT32)
    if unknown := sorted({kind for kind in types if kind not in _TOKEN_TYPES}):
        text = f"holds {unknown[0]}, expected 0 to {_TOKEN_TYPES[-1]}"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_TOKEN_TYPE,))


def _check_ids(metadata: Metadata, n_tokens: int) -> Iterator[Finding]:
    for key, value in metadata.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if is_id and isinstance(value.data, int) and not 0 <= value.data < n_tokens:
            text = f"is {value.data:,}, outside of the {n_tokens:,} tokens"
            yield Finding("vocabulary", text, Level.WARNING, (key,))


def _check_merges(metadata: Metadata, known: frozenset[str]) -> Iterator[Finding]:
    merges = items_of(metadata, keys.TOKENIZER_MERGES, Kind.STRING)
    malformed, missing = [], []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            malformed.append(merge)
        elif left not in known or right not in known or left + right not in known:
            missing.append(merge)
    if malformed:
        text = f"{len(malformed):,} merges are not two texts with a space between: {listed(malformed)}"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_MERGES,))
    if missing:
        text = f"{len(missing):,} merges join, or make, what is no token: {listed(missing)}"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_MERGES,))
