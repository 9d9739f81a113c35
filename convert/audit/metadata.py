"""Metadata of a file against those of its base: a table of keys, and what it means that one differs.

The base's are what the converter would write for its folder, or what a GGUF file has, in the file's layout of
latent attention. A key that is in no row of the table is told as a note.

Some differences make another model: another token for a number, or text that is cut otherwise. Whatever
compares two models, or makes one towards the other, refuses these, see `imatrix.evaluate.bases.same_model`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from convert.audit.vocabularies import (
    describe_kinds,
    describe_tokens,
    other_kinds,
    other_pieces,
    other_tokens,
)
from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.shown import value_text
from gguf_tools.format.values import Metadata, Value

KIND = "metadata"

Describe = Callable[[Value, Value, Metadata], str]
"""Says how two values differ: (the file's, the base's, metadata of the base)."""

IsAnother = Callable[[str, Metadata, Metadata], bool]
"""Whether values that differ make another model: (key, metadata of the file, of the base), which have it."""

_FLOAT_ERROR = 1e-6
"""Relative difference of floats that is none: others compute a rope factor in another order."""


@dataclass(frozen=True)
class KeyRow:
    """Keys, and how bad it is that they differ.

    pattern   of keys, as fnmatch takes it; {arch} stands for the architecture
    what      what the keys are, for the sentence
    differs   level if both have the key and values differ; None: it may
    missing   level if only the base has it; None: it may be missing
    extra     level if only the file has it; None: it may be there
    describe  says how the values differ; None: both are shown
    another   whether values that differ make another model; None: they don't
    """

    pattern: str
    what: str
    differs: Level | None
    missing: Level | None
    extra: Level | None
    describe: Describe | None = None
    another: IsAnother | None = None


def _always(key: str, found: Metadata, wanted: Metadata) -> bool:
    return True


def _other_number(key: str, found: Metadata, wanted: Metadata) -> bool:
    """Whether two numbers differ; a list of one for each layer is told, as layers may be pruned."""
    return not any(isinstance(each[key].data, tuple) for each in (found, wanted))


def _items(found: Value, wanted: Value, metadata: Metadata) -> str:
    """Say from where on two lists, or texts, differ."""
    a, b = found.data, wanted.data
    if not isinstance(a, tuple | str) or not isinstance(b, tuple | str):
        return f"is {value_text(found)}, the base's is {value_text(wanted)}"
    unit = "item" if isinstance(a, tuple) else "character"
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{len(a):,} {unit}s, the base has {len(b):,}; they differ from {unit} {place:,} on"


BAD, WARNING, NOTE = Level.BAD, Level.WARNING, Level.NOTE

KEYS: tuple[KeyRow, ...] = (
    KeyRow(keys.ARCHITECTURE, "architecture", BAD, BAD, BAD, another=lambda *_: False),
    KeyRow(keys.TYPE, "kind of file", WARNING, NOTE, NOTE),
    KeyRow("general.*", "description", None, None, None),
    KeyRow("split.*", "split set", None, None, None),
    KeyRow("quantize.*", "importance matrix", None, None, None),
    KeyRow("gguf_tools.*", "provenance", None, None, None),
    KeyRow("imatrix.*", "importance matrix", None, None, None),
    KeyRow(keys.TOKENIZER_TOKENS, "vocabulary", BAD, BAD, BAD, describe_tokens, other_tokens),
    KeyRow(keys.TOKENIZER_TOKEN_TYPE, "vocabulary", BAD, BAD, NOTE, describe_kinds, other_kinds),
    KeyRow(keys.TOKENIZER_MERGES, "merges of the tokenizer", BAD, BAD, WARNING, _items, _always),
    KeyRow(keys.TOKENIZER_SCORES, "scores of the tokenizer", BAD, BAD, NOTE, _items),
    KeyRow(keys.TOKENIZER_PRE, "pre-tokenizer", BAD, BAD, BAD, another=other_pieces),
    KeyRow(keys.TOKENIZER_MODEL, "kind of tokenizer", BAD, BAD, BAD, another=_always),
    KeyRow(keys.TOKENIZER_BOS_ID, "special token", BAD, BAD, WARNING, another=_always),
    KeyRow(keys.TOKENIZER_EOS_ID, "special token", BAD, BAD, WARNING, another=_always),
    KeyRow("tokenizer.ggml.*_token_id", "special token", BAD, WARNING, NOTE),
    KeyRow(keys.TOKENIZER_ADD_BOS, "added token", BAD, WARNING, WARNING),
    KeyRow("tokenizer.ggml.add_*", "added token", BAD, WARNING, WARNING),
    KeyRow("tokenizer.chat_template", "chat template", BAD, BAD, NOTE, _items),
    KeyRow("tokenizer.chat_template*", "chat template", WARNING, WARNING, NOTE, _items),
    KeyRow("tokenizer.*", "tokenizer", BAD, WARNING, NOTE, _items),
    KeyRow("{arch}.rope.*", "rope", BAD, BAD, BAD),
    KeyRow("{arch}.expert_*", "experts and their gating", BAD, BAD, WARNING),
    KeyRow(keys.HEAD_COUNT, "attention", BAD, BAD, WARNING, another=_other_number),
    KeyRow("{arch}.attention.*", "attention", BAD, BAD, WARNING),
    KeyRow(keys.CONTEXT_LENGTH, "context", WARNING, BAD, NOTE),
    KeyRow(keys.VOCAB_SIZE, "vocabulary", BAD, NOTE, NOTE),
    KeyRow(keys.EMBEDDING_LENGTH, "hidden size", BAD, BAD, WARNING, another=_always),
    KeyRow("{arch}.*", "hyper-parameter", BAD, BAD, WARNING),
    KeyRow("*", "another key", NOTE, NOTE, NOTE),
)
"""The first row whose pattern fits a key counts.

What may differ: names, authors and links, the type of the file, what says of which importances, text and
tensors it was made, and how it was split. A file of an earlier converter may lack ids of tokens that
llama.cpp finds by their texts.
"""


def metadata_findings(
    found: Metadata, wanted: Metadata, file: str, expected: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Compare metadata key by key, in the order of the base.

    expected  keys that may differ here -> why, as where layers were pruned
    """
    for key, row in _rows(found, wanted):
        if key in (expected or {}):
            continue
        level, text = _judge(row, key, found.get(key), wanted.get(key), wanted)
        if level is not None:
            is_named_otherwise = row.another is other_tokens and key in found and key in wanted
            if is_named_otherwise and not other_tokens(key, found, wanted):
                level = NOTE
            yield Finding(KIND, f"{row.what}: {text}", level, (key,), file)


def identity_findings(found: Metadata, wanted: Metadata, file: str) -> Iterator[Finding]:
    """Yield the keys that tell a model, and have other values; BAD where that makes it another one.

    A key that only one of both has is not told: converters leave out what follows from the rest.
    """
    for key, row in _rows(found, wanted):
        if row.another is not None and key in found and key in wanted:
            level, text = _judge(row, key, found[key], wanted[key], wanted)
            if level is not None:
                level = BAD if row.another(key, found, wanted) else NOTE
                yield Finding(KIND, f"{row.what}: {text}", level, (key,), file)


def _rows(found: Metadata, wanted: Metadata) -> Iterator[tuple[str, KeyRow]]:
    """Yield all keys of a file and its base, each with its row."""
    architecture = wanted.get(keys.ARCHITECTURE)
    name = "" if architecture is None else str(architecture.data)
    return ((key, row_of(key, name)) for key in dict.fromkeys([*wanted, *found]))


def row_of(key: str, architecture: str) -> KeyRow:
    """Find the row of the table for a key."""
    name = re.sub(r"([*?\[])", r"[\1]", architecture)  # each character stands for itself
    return next(row for row in KEYS if fnmatchcase(key, row.pattern.replace("{arch}", name)))


def _judge(
    row: KeyRow, key: str, found: Value | None, wanted: Value | None, metadata: Metadata
) -> tuple[Level | None, str]:
    if found is None:
        assert wanted is not None
        return row.missing, f"missing, the base's is {value_text(wanted)}"
    if wanted is None:
        return row.extra, f"is {value_text(found)}, the base has none"
    if _same(found.plain, wanted.plain):
        return None, ""
    if row.describe is not None and _are_alike(found.data, wanted.data):
        return row.differs, row.describe(found, wanted, metadata)
    if isinstance(found.data, tuple) or isinstance(wanted.data, tuple):
        return row.differs, _items(found, wanted, metadata)
    return row.differs, f"is {value_text(found)}, the base's is {value_text(wanted)}"


def _are_alike(a: Any, b: Any) -> bool:
    """Tell whether two values are lists whose items are of one type, or texts."""
    if not isinstance(a, tuple | str) or type(a) is not type(b):
        return False
    return len({type(each) for each in (*a[:1], *b[:1])}) < 2


def _same(a: Any, b: Any) -> bool:
    """Tell whether two values say the same: a number for all layers is a list of as many equal ones."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_FLOAT_ERROR) or a == b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and (a == b or all(map(_same, a, b)))
    if isinstance(a, list | tuple) != isinstance(b, list | tuple):
        several, one = (a, b) if isinstance(a, list | tuple) else (b, a)
        return not isinstance(one, str) and bool(several) and all(_same(each, one) for each in several)
    return bool(a == b)
