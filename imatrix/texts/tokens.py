"""Calibration text as chunks of token ids, cut the way llama-imatrix does it.

The text is tokenised as a whole, with a BOS in front when the tokenizer adds one. It is cut into chunks of
equal size, and a shorter rest is not used. Where BOS is added, it then replaces each chunk's first token.
Control tokens in the text count as plain text unless special tokens are parsed.

An encoder's text may end with a token of its own, [SEP], as it begins with one. Where texts are taken for
passages, each chunk's last token is replaced by that.

The tokenizer, BPE, SentencePiece or WordPiece, is built from tokenizer.* keys: those of a GGUF file, or those
that a conversion would write. Its ids are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from convert.tokenizer.cuttings import BYTE_PAIRS, CUTTINGS, cutting_of
from gguf_tools.argument_types import CheckedFields, Count, Natural
from gguf_tools.errors import BadRequest, BadTokenizer
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import counted, quoted
from imatrix.texts.bpe import BytePairs
from imatrix.texts.chunks import Chunks
from imatrix.texts.sentence_pieces import SentencePieces
from imatrix.texts.words import UNIGRAM, WORDPIECE, WordTokens

_SENTENCEPIECE = "llama"
_SENTENCEPIECE_BOS = 1
"""Token that llama.cpp uses as BOS when a SentencePiece vocabulary names none."""


@dataclass(frozen=True)
class Text:
    """Chunks of tokens, all of one size.

    tokens   int64 (n_chunks, chunk_size), as they are in the text
    inputs   the same, but BOS is each chunk's first token if the tokenizer adds one
    classes  the kind of text of each chunk; empty for a single text
    notes    what was left out, one line each
    sha256   of the file, or of the names and texts of classes; "" where only the tokens were given
    """

    tokens: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sha256: str = ""

    @property
    def n_chunks(self) -> int:
        return len(self.tokens)

    @property
    def chunk_size(self) -> int:
        return int(self.tokens.shape[1])

    def only(self, chunks: Sequence[int]) -> Text:
        """Take some chunks, in this order; one may come several times."""
        some = list(chunks)
        classes = tuple(self.classes[chunk] for chunk in some) if self.classes else ()
        return Text(self.tokens[some], self.inputs[some], classes)

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks as the forward pass takes them; of each, the second half but its first token is scored.

        So every scored token is predicted from half a chunk or more.
        """
        return self.scored_from(self.chunk_size // 2 + 1)

    def scored_from(self, first: int) -> Chunks:
        """Return the chunks, with the tokens of each scored that stand at `first` or behind it."""
        scored = np.zeros(self.tokens.shape, np.bool_)
        scored[:, first:] = True
        bounds = np.arange(self.n_chunks + 1) * self.chunk_size
        return Chunks(self.tokens.ravel(), self.inputs.ravel(), bounds, scored.ravel())


@dataclass(frozen=True)
class Cut(CheckedFields):
    """Which part of a text is used.

    chunk_size     tokens per chunk
    from_chunk     number of chunks to skip at the beginning
    n_chunks       largest number of chunks to use, None for all
    parse_special  read the spelling of a control token as that token
    """

    chunk_size: Count = 512
    from_chunk: Natural = 0
    n_chunks: Count | None = None
    parse_special: bool = False

    def chunks_of(self, n_whole: int, name: str) -> slice:
        """Choose the chunks that are used of a text that has `n_whole`; `name` is the text's, for messages.

        raises  BadRequest where there are none
        """
        if self.from_chunk >= n_whole:
            raise BadRequest(
                f"{name}: {n_whole} chunks of {self.chunk_size} tokens, and --from-chunk {self.from_chunk}"
            )
        last = n_whole if self.n_chunks is None else min(n_whole, self.from_chunk + self.n_chunks)
        return slice(self.from_chunk, last)


def cut_into_chunks(
    ids: list[int], bos: int | None, vocab_size: int, cut: Cut, name: str, end: int | None = None
) -> Text:
    """Cut token ids into chunks; `name` is the text's, for messages, and `end` the last token of each.

    raises  BadRequest when there is no whole chunk, or a token outside the vocabulary
    """
    tokens = np.array(ids if bos is None else [bos, *ids], np.int64)
    size = cut.chunk_size
    n_whole = len(tokens) // size
    if not ids:
        raise BadRequest(f"{name}: is empty, expected a text of {size} tokens or more")
    if n_whole == 0:
        found = counted(len(tokens), "token")
        raise BadRequest(f"{name}: {found}, expected a chunk of {size} or more; see -c")
    tokens = tokens[: n_whole * size].reshape(-1, size)[cut.chunks_of(n_whole, name)]
    inputs = tokens.copy()
    if bos is not None:
        inputs[:, 0] = bos
    if end is not None:
        inputs[:, -1] = end
    for used in (tokens, inputs):
        outside = used[(used < 0) | (used >= vocab_size)]
        if outside.size:
            raise BadRequest(
                f"{name}: token {outside[0]} is outside of the vocabulary of {vocab_size}; another model's?"
            )
    return Text(tokens, inputs)


class Vocabulary(dict[str, Value]):
    """The keys that a model's tokenizer is built from.

    path    the model's, for messages; None where a plan is made for one that is not said
    raises  BadTokenizer for a list, a text or a number where another of the three is expected
    """

    def __init__(self, metadata: Metadata, path: Path | None = None) -> None:
        super().__init__((key, value) for key, value in metadata.items() if key.startswith("tokenizer."))
        self.path = path
        for key, value in self.items():
            expected = keys.expected_kinds(key, "")
            if expected and _shape(value.type_name) not in map(_shape, expected):
                place = "" if path is None else f"{path}: "
                raise BadTokenizer(f"{place}{key} is {value.type_name}, expected {' or '.join(expected)}")


def _shape(type_name: str) -> tuple[int, str]:
    """Return how deep a list of a type is, and whether its items are texts, floats or whole numbers."""
    item = type_name.rpartition(" ")[2]
    return type_name.count("array"), item if item == "string" else "float" if "float" in item else "number"


def bos_of(vocab: Metadata) -> int | None:
    """Return the token that begins every chunk, None when the tokenizer adds none.

    raises  BadTokenizer when it should add one and the keys name none
    """
    model = _data(vocab, keys.TOKENIZER_MODEL, None)
    is_spm, cutting = model == _SENTENCEPIECE, cutting_of(vocab)
    usual = is_spm or model == WORDPIECE or (cutting is not None and cutting.adds_bos)
    if not _data(vocab, keys.TOKENIZER_ADD_BOS, usual):
        return None
    return _token(
        vocab, keys.TOKENIZER_ADD_BOS, keys.TOKENIZER_BOS_ID, _SENTENCEPIECE_BOS if is_spm else None
    )


def end_of(vocab: Metadata) -> int | None:
    """Return the token that ends every passage, None when the tokenizer adds none.

    raises  BadTokenizer when it should add one and the keys name none
    """
    is_wordpiece = _data(vocab, keys.TOKENIZER_MODEL, None) == WORDPIECE
    if not _data(vocab, keys.TOKENIZER_ADD_EOS, is_wordpiece):
        return None
    ending = keys.TOKENIZER_SEP_ID if is_wordpiece else keys.TOKENIZER_EOS_ID
    return _token(vocab, keys.TOKENIZER_ADD_EOS, ending)


def _token(vocab: Metadata, flag: str, key: str, default: int | None = None) -> int:
    """Return the token that a key names, which a flag wants."""
    token = _data(vocab, key, default)
    if not isinstance(token, int):
        raise BadTokenizer(f"{flag} is true, but there is no {key}")
    n_tokens = len(_data(vocab, keys.TOKENIZER_TOKENS, ()))
    if n_tokens and not 0 <= token < n_tokens:
        raise BadTokenizer(f"{key} is {token}, expected one of {n_tokens:,} tokens")
    return token


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS."""


def make_encoder(vocab: Metadata, *, parse_special: bool = False) -> Encoder:
    """Return the tokenizer that tokenizer.* keys describe.

    parse_special  read the spelling of a control token as that token
    raises  BadTokenizer for another kind of tokenizer, or an unknown pre-tokenizer
    """
    model = _data(vocab, keys.TOKENIZER_MODEL, None)
    if model == _SENTENCEPIECE:
        return SentencePieces(vocab, parse_special=parse_special)
    if model in (WORDPIECE, UNIGRAM):
        return WordTokens(vocab, parse_special=parse_special)
    if model not in BYTE_PAIRS:
        raise BadTokenizer(
            f"{keys.TOKENIZER_MODEL} is {quoted(model)}, expected 'llama' (SentencePiece),"
            f" {WORDPIECE!r} (WordPiece), {UNIGRAM!r} (unigrams) or {', '.join(map(repr, BYTE_PAIRS))} (BPE)"
        )
    cutting = cutting_of(vocab)
    if cutting is None:
        name = _data(vocab, keys.TOKENIZER_PRE, None)
        known = ", ".join(sorted(CUTTINGS))
        raise BadTokenizer(f"{keys.TOKENIZER_PRE} is {quoted(name)}, expected one of {known}")
    return BytePairs(vocab, cutting, parse_special=parse_special)


def _data(vocab: Metadata, key: str, default: Any) -> Any:
    value = vocab.get(key)
    return default if value is None else value.data
