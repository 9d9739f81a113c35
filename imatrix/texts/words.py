"""Tokenizers of encoders, made of tokenizer.* keys: BERT's WordPiece, and SentencePiece's unigrams.

The tokenizers library does both. WordPiece cuts text into words, and each into the longest tokens from the
left. llama.cpp marks tokens that begin a word, "▁"; the library those that go on in one, "##". Unigrams are
cut so that the sum of their scores is largest.
"""

from __future__ import annotations

from typing import Any

from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadTokenizer
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata
from gguf_tools.text import cut_short
from imatrix.texts.matched import cut_at_matches, items_of, matched_texts, token_texts

WORDPIECE, UNIGRAM = "bert", "t5"
"""Values of tokenizer.ggml.model for the two."""

_BEGINS, _GOES_ON, _LONGEST = "▁", "##", 10_000
"""Marks of tokens, and letters of a word up to which it is cut: llama.cpp has no bound."""


class WordTokens:
    """A tokenizer made of tokenizer.* keys, a WordPiece or unigrams.

    parse_special  read the spelling of a control token as that token

    raises  BadTokenizer for lists of different lengths, or what the library can't use
    """

    def __init__(self, vocab: Metadata, *, parse_special: bool = False) -> None:
        texts = token_texts(vocab)
        self._ids = {text: number for number, text in enumerate(texts)}
        self._matched = matched_texts(texts, vocab, parse_special)
        try:
            build = _wordpiece if vocab[keys.TOKENIZER_MODEL].data == WORDPIECE else _unigrams
            self._library = build(vocab, texts)
        except BadTokenizer:
            raise
        except Exception as cause:  # the library raises bare Exceptions
            why = cut_short(str(cause))
            raise BadTokenizer(f"the tokenizers library can't use the vocabulary: {why}") from cause

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without those that begin and end a text."""
        ids: list[int] = []
        for part in cut_at_matches(text, self._matched, self._ids):
            ids += [part] if isinstance(part, int) else self._library.encode(part).ids
        return ids


def _wordpiece(vocab: Metadata, texts: list[str]) -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    kinds = items_of(vocab, keys.TOKENIZER_TOKEN_TYPE, TokenType.NORMAL, len(texts))
    spelled = {
        text
        if kind == TokenType.CONTROL
        else text[1:]
        if text.startswith(_BEGINS)
        else _GOES_ON + text: number
        for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    }
    unknown = texts[_id(vocab, keys.TOKENIZER_UNK_ID, len(texts))]
    library = Tokenizer(WordPiece(spelled, unk_token=unknown, max_input_chars_per_word=_LONGEST))
    lower = _flag(vocab, keys.TOKENIZER_LOWERCASE)
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=_flag(vocab, keys.TOKENIZER_STRIP_ACCENTS, default=lower)
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return library


def _unigrams(vocab: Metadata, texts: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    scores = items_of(vocab, keys.TOKENIZER_SCORES, 0.0, len(texts))
    unknown = _id(vocab, keys.TOKENIZER_UNK_ID, len(texts))
    library = Tokenizer(Unigram(list(zip(texts, scores, strict=True)), unk_id=unknown))
    table = vocab.get(keys.TOKENIZER_PRECOMPILED_CHARSMAP)
    steps: list[Any] = (
        [] if table is None else [normalizers.Precompiled(bytes(byte % 256 for byte in table.data))]
    )
    if _flag(vocab, keys.TOKENIZER_REMOVE_EXTRA_WS, default=False):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    library.normalizer = normalizers.Sequence(steps)
    scheme = "always" if _flag(vocab, keys.TOKENIZER_ADD_PREFIX) else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BEGINS, prepend_scheme=scheme)
    return library


def _flag(vocab: Metadata, key: str, *, default: bool = True) -> bool:
    value = vocab.get(key)
    return default if value is None else bool(value.data)


def _id(vocab: Metadata, key: str, n_tokens: int) -> int:
    """Return the number of a token; raises BadTokenizer where there is none."""
    value = vocab.get(key)
    if value is None or value.data not in range(n_tokens):
        found = "is missing" if value is None else f"is {value.data}"
        raise BadTokenizer(f"{key} {found}, expected one of {n_tokens:,} tokens")
    return int(value.data)
