"""Tells what llama.cpp does otherwise than a SentencePiece model says.

llama.cpp writes ▁ for each space, puts one before a text, and joins the neighbours with the best score. Its
tokenizer of this kind knows no normalizer, and a GGUF file no user-defined piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from convert.tokenizer.files import library_errors
from convert.tokenizer.pipeline_notes import changed_by
from convert.tokenizer.sentencepiece_model import Normalizer, SentencePieceModel
from convert.tokenizer.vocab import TokenType, Vocab
from gguf_tools.findings import listed
from gguf_tools.text import printable

MAX_TRIED, MAX_TRIED_CHARS = 4096, 32
"""Number of user-defined pieces that are tried, and their length; all at these limits take a second."""


def model_notes(path: Path, model: SentencePieceModel, vocab: Vocab) -> Iterator[str]:
    """Yield notes on a tokenizer.model, from which `vocab` was made.

    raises  BadTokenizer for a table of characters that the tokenizers library can't use
    """
    normalizer = model.normalizer
    yield from _table_note(path, "normalizer", normalizer, "takes")
    yield from _table_note(path, "denormalizer", model.denormalizer, "prints")
    if normalizer.drops_extra_spaces:
        yield f"{path.name}: remove_extra_whitespaces is not applied: llama.cpp keeps each space of ' a  b '"
    if not normalizer.escapes_spaces:
        yield f"{path.name}: escape_whitespaces is false; llama.cpp writes 'a b' as 'a▁b' all the same"
    if model.space_is_last and normalizer.add_space_prefix:
        yield f"{path.name}: treat_whitespace_as_suffix makes 'a▁' of 'a'; llama.cpp makes '▁a'"
    yield from missing_byte_note(path, vocab.tokens)
    yield from _piece_notes(path, model, vocab)


def _table_note(path: Path, what: str, normalizer: Normalizer, does: str) -> Iterator[str]:
    if not normalizer.charsmap:
        return
    from tokenizers import normalizers

    with library_errors(path, f"the table of its {what} can't be used"):
        example = changed_by(normalizers.Precompiled(normalizer.charsmap).normalize_str)
    name = f" {printable(normalizer.name[:40])}" if normalizer.name else ""
    yield f"{path.name}: {what}{name} is not applied: llama.cpp {does} {example or 'text as it is'}"


def missing_byte_note(path: Path, tokens: Collection[str]) -> Iterator[str]:
    """Yield a note where a byte has no token, and llama.cpp ends at a character without a piece."""
    known = {token for token in tokens if token.startswith("<0x")}
    n_missing = 256 - sum(f"<0x{byte:02X}>" in known for byte in range(256))
    if n_missing:
        yield (
            f"{path.name}: {n_missing} of the 256 bytes have no token: llama.cpp stops with an error at a"
            " character that has none either"
        )


def _piece_notes(path: Path, model: SentencePieceModel, vocab: Vocab) -> Iterator[str]:
    """Yield a note on user-defined pieces that no pair makes, and one on unused pieces that a pair does."""
    scores = dict(zip(vocab.tokens, vocab.scores or (), strict=True))
    found: dict[TokenType, list[str]] = {TokenType.USER_DEFINED: [], TokenType.UNUSED: []}
    n_tried = 0
    for token_id, (piece, type_) in enumerate(zip(model.pieces, vocab.types, strict=False)):
        is_own = type_ in (TokenType.NORMAL, TokenType.UNUSED) and vocab.tokens[token_id] == piece.text
        fits = len(piece.text) <= MAX_TRIED_CHARS and " " not in piece.text
        if piece.kind in found and is_own and fits and n_tried < MAX_TRIED:
            n_tried += 1
            if (_joined(piece.text, scores) == [piece.text]) == (piece.kind is TokenType.UNUSED):
                found[piece.kind].append(piece.text)
    if texts := found[TokenType.USER_DEFINED]:
        yield f"{path.name}: the user-defined piece {listed(texts, 1)} is not kept whole: llama.cpp cuts it"
    if texts := found[TokenType.UNUSED]:
        yield f"{path.name}: the piece {listed(texts, 1)} is unused; llama.cpp uses it all the same"


def _joined(text: str, scores: Mapping[str, float]) -> list[str]:
    """Cut a short text as llama.cpp does: join the pair with the best score, the first of equal ones."""
    parts = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(parts)]
        known = [(-scores[pair], place) for place, pair in enumerate(pairs) if pair in scores]
        if not known:
            return parts
        _, place = min(known)
        parts[place : place + 2] = [pairs[place]]
