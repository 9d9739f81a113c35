"""Calibration text as chunks of token ids, cut the way llama-imatrix does it.

The text is tokenised as a whole, with a BOS in front when the tokenizer adds one. It is cut into chunks of
equal size, and a shorter rest is not used. Where BOS is added, it then replaces each chunk's first token.
Control tokens in the text count as plain text unless special tokens are parsed.

The tokenizer, byte-level BPE or SentencePiece, is built from tokenizer.* keys: those of a GGUF file, or those
that a conversion would write.

llama.cpp's SentencePiece begins with single characters, with spaces written as ▁. Of all neighbours that
together spell a token, the pair with the highest score is joined first, and of equals the leftmost, until no
two neighbours spell one. A character without a token becomes its bytes, which have tokens with names like
<0x0A>.

Before that, the text is cut at tokens that are matched as a whole, the longest first. With a space prefix,
the beginning of the text and what follows such a token get a space in front.

It differs from the sentencepiece library where llama.cpp does: every token can be spelled, whatever its type,
and the space prefix comes again after a matched token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from convert.tokenizer.pretokenizers import KNOWN, SAME_CUTTING, find_known
from convert.tokenizer.vocab import TokenType
from forward.text.chunks import Chunks
from gguf_tools.errors import BadRequest, BadTokenizer
from gguf_tools.files.named_files import read_input
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, bytes_of, text_of

_SPACE = "▁"


class SentencePieces:
    """A tokenizer made of tokenizer.* keys.

    parse_special  read the spelling of a control token as that token

    raises  BadTokenizer for lists of different lengths
    """

    def __init__(self, vocab: Metadata, *, parse_special: bool = False) -> None:
        tokens = _items(vocab, keys.TOKENIZER_TOKENS)
        texts = [text or f"[EMPTY_{number}]" for number, text in enumerate(tokens)]  # llama.cpp's name
        self._ids = {text: number for number, text in enumerate(texts)}
        self._scores = _items(vocab, keys.TOKENIZER_SCORES, 0.0, len(texts))
        self._matched = _matched_texts(texts, vocab, parse_special)
        self._neighbours = {first + second for text in texts for first, second in pairwise(text)}
        prefix = vocab.get(keys.TOKENIZER_ADD_PREFIX)
        self._prefix = " " if prefix is None or prefix.data else ""
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS; raises BadTokenizer for a byte without a token."""
        ids: list[int] = []
        after_match = True
        for part in self._cut_at_matches(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                prefix = self._prefix if after_match else ""
                for run in self._runs((prefix + part).replace(" ", _SPACE)):
                    ids += self._joined(run)
            after_match = isinstance(part, int)
        return ids

    def _cut_at_matches(self, text: str) -> list[str | int]:
        """Return the text with matched tokens replaced by their ids; no item is empty."""
        parts: list[str | int] = [text] if text else []
        for match in self._matched:
            if match not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for number, piece in enumerate(part.split(match)):
                    if number:
                        cut.append(self._ids[match])
                    if piece:
                        cut.append(piece)
            parts = cut
        return parts

    def _runs(self, text: str) -> Iterator[str]:
        """Yield `text` in runs that can be joined on their own: no token crosses the end of a run."""
        start = 0
        neighbours = self._neighbours
        for end, pair in enumerate(map("".join, pairwise(text)), start=1):
            if pair not in neighbours:
                yield text[start:end]
                start = end
        yield text[start:]

    def _joined(self, run: str) -> list[int]:
        """Return the tokens of a run; the same run may come again, so results are kept."""
        ids = self._known.get(run)
        if ids is None:
            ids = self._known[run] = [token for piece in self._join(run) for token in self._tokens_of(piece)]
        return ids

    def _join(self, run: str) -> list[str]:
        """Return the pieces that a run is joined to, by score; the module's docstring says how."""
        pieces = list(run)  # a piece joined to its left neighbour becomes ""
        after = list(range(1, len(run) + 1))
        before = list(range(-1, len(run) - 1))
        ids, scores = self._ids, self._scores
        queue: list[tuple[float, int, int, int]] = []
        for left, pair in enumerate(map("".join, pairwise(run))):
            token = ids.get(pair)
            if token is not None:
                queue.append((-scores[token], left, left + 1, 2))
        heapify(queue)
        while queue:
            _, left, right, length = heappop(queue)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue  # one of them has been joined to another since
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first >= 0 and second < len(pieces):
                    text = pieces[first] + pieces[second]
                    token = ids.get(text)
                    if token is not None:
                        heappush(queue, (-scores[token], first, second, len(text)))
        return [piece for piece in pieces if piece]

    def _tokens_of(self, piece: str) -> list[int]:
        token = self._ids.get(piece)
        return [token] if token is not None else [self._byte(byte) for byte in bytes_of(piece)]

    def _byte(self, byte: int) -> int:
        token = self._ids.get(f"<0x{byte:02X}>", self._ids.get(text_of(bytes([byte]))))
        if token is None:
            raise BadTokenizer(f"{keys.TOKENIZER_TOKENS}: no token for byte 0x{byte:02X}, which the text has")
        return token


def _matched_texts(texts: list[str], vocab: Metadata, parse_special: bool) -> list[str]:
    """Return the tokens that a text is cut at first, the longest in front."""
    kinds = _items(vocab, keys.TOKENIZER_TOKEN_TYPE, TokenType.NORMAL, len(texts))
    wanted = {TokenType.USER_DEFINED, *((TokenType.CONTROL, TokenType.UNKNOWN) if parse_special else ())}
    matched = [text for text, kind in zip(texts, kinds, strict=True) if kind in wanted]
    return sorted(matched, key=lambda text: -len(bytes_of(text)))


def _items(vocab: Metadata, key: str, default: Any = None, count: int | None = None) -> tuple[Any, ...]:
    """Return the items of an array, or `count` times `default` where it is missing.

    raises  BadTokenizer for another length than `count`
    """
    value = vocab.get(key)
    if value is None:
        return (default,) * (count or 0)
    if count is not None and len(value.data) != count:
        raise BadTokenizer(f"{key} has {len(value.data)} items for {count} tokens")
    return tuple(value.data)


_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
"""Values of tokenizer.ggml.model."""

_SENTENCEPIECE_BOS = 1
"""Token that llama.cpp uses as BOS when a SentencePiece vocabulary names none."""


@dataclass(frozen=True)
class Text:
    """Chunks of tokens, all of one size.

    tokens  int64 (n_chunks, chunk_size), as they are in the text
    inputs  the same, but BOS is each chunk's first token if the tokenizer adds one
    """

    tokens: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]

    @property
    def n_chunks(self) -> int:
        return len(self.tokens)

    @property
    def chunk_size(self) -> int:
        return int(self.tokens.shape[1])

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks as the forward pass takes them; of each, the second half but its first token is scored.

        So every scored token is predicted from half a chunk or more.
        """
        scored = np.zeros(self.tokens.shape, np.bool_)
        scored[:, self.chunk_size // 2 + 1 :] = True
        bounds = np.arange(self.n_chunks + 1) * self.chunk_size
        return Chunks(self.tokens.ravel(), self.inputs.ravel(), bounds, scored.ravel())


@dataclass(frozen=True)
class Cut:
    """Which part of a text is used.

    chunk_size     tokens per chunk
    from_chunk     number of chunks to skip at the beginning
    n_chunks       largest number of chunks to use, None for all
    parse_special  read the spelling of a control token as that token
    """

    chunk_size: int = 512
    from_chunk: int = 0
    n_chunks: int | None = None
    parse_special: bool = False


def read_text(path: Path, vocab: Metadata, vocab_size: int, cut: Cut) -> Text:
    """Read a file's text and cut it into chunks of tokens.

    vocab       the keys tokenizer.*
    vocab_size  rows of the embedding
    raises  BadRequest for a file that is not text, is too short, or has a token outside the vocabulary;
            BadTokenizer for a tokenizer that is not supported
    """
    try:
        text = read_input(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: not UTF-8 at byte {error.start}; expected a text") from error
    ids = make_encoder(vocab, parse_special=cut.parse_special).encode(text.removesuffix("\n"))
    return cut_into_chunks(ids, bos_of(vocab), vocab_size, cut, str(path))


def cut_into_chunks(ids: list[int], bos: int | None, vocab_size: int, cut: Cut, name: str) -> Text:
    """Cut token ids into chunks; `name` is the text's, for messages.

    raises  BadRequest when there is no whole chunk, or a token outside the vocabulary
    """
    tokens = np.array(ids if bos is None else [bos, *ids], np.int64)
    size = cut.chunk_size
    if size < 1:
        raise BadRequest(f"a context of {size} tokens, expected 1 or more")
    n_whole = len(tokens) // size
    if n_whole == 0:
        raise BadRequest(f"{name}: {len(tokens)} tokens, expected a chunk of {size} or more; see -c")
    if cut.from_chunk >= n_whole:
        raise BadRequest(f"{name}: {n_whole} chunks of {size} tokens, and --from-chunk {cut.from_chunk}")
    if cut.n_chunks == 0:
        raise BadRequest(f"{name}: no chunk is to be used; see --chunks")
    last = n_whole if cut.n_chunks is None else min(n_whole, cut.from_chunk + cut.n_chunks)
    tokens = tokens[cut.from_chunk * size : last * size].reshape(-1, size)
    inputs = tokens.copy()
    if bos is not None:
        inputs[:, 0] = bos
    for used in (tokens, inputs):
        outside = used[(used < 0) | (used >= vocab_size)]
        if outside.size:
            raise BadRequest(
                f"{name}: token {outside[0]} is outside of the vocabulary of {vocab_size}; another model's?"
            )
    return Text(tokens, inputs)


def tokenizer_keys(metadata: Metadata) -> Metadata:
    """Return the keys that a model's tokenizer is built from."""
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


def bos_of(vocab: Metadata) -> int | None:
    """Return the token that begins every chunk, None when the tokenizer adds none.

    raises  BadTokenizer when it should add one and the keys name none
    """
    is_spm = _data(vocab, keys.TOKENIZER_MODEL, None) == _SENTENCEPIECE
    if not _data(vocab, keys.TOKENIZER_ADD_BOS, is_spm):
        return None
    bos = _data(vocab, keys.TOKENIZER_BOS_ID, _SENTENCEPIECE_BOS if is_spm else None)
    if not isinstance(bos, int):
        raise BadTokenizer(f"{keys.TOKENIZER_ADD_BOS} is true, but there is no {keys.TOKENIZER_BOS_ID}")
    return bos


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS."""
        ...


def make_encoder(vocab: Metadata, *, parse_special: bool = False) -> Encoder:
    """Return the tokenizer that tokenizer.* keys describe.

    parse_special  read the spelling of a control token as that token
    raises  BadTokenizer for another kind of tokenizer, or an unknown pre-tokenizer
    """
    model = _data(vocab, keys.TOKENIZER_MODEL, None)
    if model == _SENTENCEPIECE:
        return SentencePieces(vocab, parse_special=parse_special)
    if model == _BYTE_LEVEL:
        return ByteLevelBPE(vocab, parse_special=parse_special)
    raise BadTokenizer(
        f"{keys.TOKENIZER_MODEL} is {model!r}, expected {_BYTE_LEVEL!r} (byte-level BPE) or "
        f"{_SENTENCEPIECE!r} (SentencePiece)"
    )


class ByteLevelBPE:
    """A byte-level BPE of the tokenizers library, made of tokenizer.* keys.

    raises  BadTokenizer for an unknown pre-tokenizer
    """

    def __init__(self, vocab: Metadata, *, parse_special: bool = False) -> None:
        name = _data(vocab, keys.TOKENIZER_PRE, None)
        known = find_known(name)
        if known is None:
            names = ", ".join((*(known.name for known in KNOWN), *SAME_CUTTING))
            raise BadTokenizer(f"{keys.TOKENIZER_PRE} is {name!r}, expected one of {names}")
        self._library = _build(vocab, known.build(), known.ignore_merges, parse_special)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def _build(vocab: Metadata, pre_tokenizer: Any, ignore_merges: bool, parse_special: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    texts = _data(vocab, keys.TOKENIZER_TOKENS, ())
    kinds = _data(vocab, keys.TOKENIZER_TOKEN_TYPE, ()) or (TokenType.NORMAL,) * len(texts)
    if len(kinds) != len(texts):
        raise BadTokenizer(f"{keys.TOKENIZER_TOKEN_TYPE} has {len(kinds)} items for {len(texts)} tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _data(vocab, keys.TOKENIZER_MERGES, ())]
    matched = {TokenType.USER_DEFINED, *((TokenType.CONTROL, TokenType.UNKNOWN) if parse_special else ())}
    ids = {
        text: number
        for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        if kind == TokenType.NORMAL or kind in matched
    }
    try:
        library = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges))
    except Exception as cause:  # the library raises bare Exceptions
        raise BadTokenizer(f"the tokenizers library can't use the vocabulary: {cause}") from cause
    library.pre_tokenizer = pre_tokenizer
    library.add_tokens(
        [
            AddedToken(text, normalized=False)
            for text, kind in zip(texts, kinds, strict=True)
            if kind in matched
        ]
    )
    return library


def _data(vocab: Metadata, key: str, default: Any) -> Any:
    value = vocab.get(key)
    return default if value is None else value.data
