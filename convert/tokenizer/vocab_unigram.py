"""Reads the vocabulary of an XLM-RoBERTa: a SentencePiece model of type unigram.

It lies in sentencepiece.bpe.model, or in tokenizer.json. The first lacks the four tokens with which fairseq,
XLM-RoBERTa's trainer, begins its own vocabulary: every other piece has an id one higher than in that file.
llama.cpp cuts a text as the original does. For that it needs the scores, and the table of characters
(charsmap) that are replaced before.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.tokenizer.added_tokens import attribute_notes
from convert.tokenizer.files import TokenizerFiles
from convert.tokenizer.pipeline_notes import common_notes, steps_of
from convert.tokenizer.sentencepiece_model import UNIGRAM, Normalizer, read_sentencepiece_model
from convert.tokenizer.vocab import TokenType, Vocab, check_fits, looks_special, pad_text
from convert.tokenizer.vocab_bpe import add_tokens_of_config, named_special_tokens
from convert.tokenizer.vocab_spm import PAD_SCORE
from gguf_tools.errors import BadTokenizer
from gguf_tools.text import shown

FILE_NAME = "sentencepiece.bpe.model"

_FAIRSEQ = (
    ("<s>", TokenType.CONTROL), ("<pad>", TokenType.CONTROL), ("</s>", TokenType.CONTROL),
    ("<unk>", TokenType.UNKNOWN),
)  # fmt: skip
_MASK = ("<mask>", TokenType.CONTROL)
_OWN = 3
"""Number of pieces at the beginning of the model for which fairseq has others: <unk>, <s> and </s>."""


def is_unigram(tokenizer_json: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is a SentencePiece model of type unigram."""
    model = tokenizer_json.get("model")
    return isinstance(model, Mapping) and model.get("type") == "Unigram"


def read_fairseq_vocab(path: Path, files: TokenizerFiles) -> tuple[Vocab, Normalizer]:
    """Return the vocabulary of a sentencepiece.bpe.model with fairseq's ids, and how text is changed before.

    raises  BadTokenizer for another type of model, or one with more pieces than the embedding has rows for
    """
    model = read_sentencepiece_model(path)
    if model.model_type != UNIGRAM:
        raise BadTokenizer(f"{path}: a SentencePiece model of another type, expected unigram")
    n_rows = len(model.pieces) + 1 if files.vocab_size is None else files.vocab_size
    pieces = model.pieces[_OWN:]
    if pieces:
        check_fits(path, pieces[-1].text, len(model.pieces), n_rows)
    last = (_MASK,)[: n_rows - len(_FAIRSEQ) - len(pieces)] if files.quirks.fairseq_mask else ()
    rest = range(len(_FAIRSEQ) + len(pieces) + len(last), n_rows)
    return Vocab(
        (*(text for text, _ in _FAIRSEQ), *(piece.text for piece in pieces), *(text for text, _ in last),
         *(pad_text(token_id - 1) for token_id in rest)),  # the numbers that the file has
        (*(kind for _, kind in _FAIRSEQ), *(piece.kind for piece in pieces), *(kind for _, kind in last),
         *(TokenType.UNUSED for _ in rest)),
        scores=(*(0.0 for _ in _FAIRSEQ), *(piece.score for piece in pieces), *(0.0 for _ in last),
                *(PAD_SCORE for _ in rest)),
    ), model.normalizer  # fmt: skip


def read_unigram_vocab(files: TokenizerFiles) -> tuple[Vocab, Normalizer]:
    """Return the vocabulary of a tokenizer.json, padded to the embedding, and how text is changed before.

    raises  BadTokenizer for a damaged file, or more tokens than the embedding has rows for
    """
    path, content = files.json_path, files.tokenizer_json
    library = files.load()  # proves the form of the model
    notes = add_tokens_of_config(library, files)
    pieces, unknown = content["model"]["vocab"], content["model"].get("unk_id")
    special = {text for text, _ in named_special_tokens(files)}
    added = library.get_added_tokens_decoder()
    n_tokens = max([len(pieces) - 1, *added]) + 1
    n_rows = n_tokens if files.vocab_size is None else files.vocab_size
    tokens: list[str] = []
    types: list[TokenType] = []
    scores: list[float] = []
    for token_id in range(n_rows):
        text, score = pieces[token_id] if token_id < len(pieces) else (pad_text(token_id), PAD_SCORE)
        kind = TokenType.NORMAL if token_id < len(pieces) else TokenType.UNUSED
        if token := added.get(token_id):
            text, score = token.content, 0.0 if token_id >= len(pieces) else score
            is_special = token.special or text in special or looks_special(text)
            kind = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
        tokens.append(text)
        types.append(TokenType.UNKNOWN if token_id == unknown else kind)
        scores.append(score)
    if n_tokens > n_rows:
        check_fits(path, added[n_tokens - 1].content if added else pieces[-1][0], n_tokens - 1, n_rows)
    normalizer, more = _normalizer(path, content)
    notes += [*attribute_notes(library, files), *more, *common_notes(content, byte_level=False)]
    return Vocab(tuple(tokens), tuple(types), scores=tuple(scores), notes=tuple(notes)), normalizer


def _normalizer(path: Path, content: Mapping[str, Any]) -> tuple[Normalizer, list[str]]:
    """Return how a tokenizer.json changes text, and a note for each step that llama.cpp has not."""
    charsmap, drops, notes = b"", False, []
    for step in steps_of(content.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Precompiled":
            try:
                charsmap = binascii.a2b_base64(step["precompiled_charsmap"])
            except (KeyError, TypeError, ValueError) as cause:
                raise BadTokenizer(f"{path}: precompiled_charsmap is no base64 of bytes") from cause
        elif kind in ("Replace", "Strip") and str(step.get("content", " ")) in (" ", "▁"):
            drops = True
        else:
            notes.append(f"normalizer {shown(str(kind))} is not applied: llama.cpp has charsmaps and spaces")
    prefix = False
    for step in steps_of(content.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        drops |= kind == "WhitespaceSplit"
        if kind == "Metaspace":
            prefix = (
                step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space") is not False
            )
        elif kind != "WhitespaceSplit":
            notes.append(f"pre-tokenizer {shown(str(kind))} is not applied: llama.cpp cuts at spaces")
    return Normalizer("", charsmap, prefix, drops), notes
