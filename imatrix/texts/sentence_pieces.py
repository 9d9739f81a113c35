"""llama.cpp's SentencePiece, made of tokenizer.* keys.

It begins with single characters, with spaces written as ▁. Of all neighbours that together spell a token,
the pair with the highest score is joined first, and of equals the leftmost, until no two neighbours spell
one. A character without a token becomes its bytes, which have tokens with names like <0x0A>.

Before that, the text is cut at tokens that are matched as a whole. With a space prefix, the beginning of the
text and what follows such a token get a space in front.

It differs from the sentencepiece library where llama.cpp does: every token can be spelled, whatever its type,
and the space prefix comes again after a matched token.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise

from gguf_tools.errors import BadTokenizer
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, bytes_of, text_of
from imatrix.texts.matched import cut_at_matches, items_of, matched_texts, token_texts

_SPACE = "▁"


class SentencePieces:
    """A tokenizer made of tokenizer.* keys.

    parse_special  read the spelling of a control token as that token

    raises  BadTokenizer for lists of different lengths
    """

    def __init__(self, vocab: Metadata, *, parse_special: bool = False) -> None:
        texts = token_texts(vocab)
        self._ids = {text: number for number, text in enumerate(texts)}
        self._scores = items_of(vocab, keys.TOKENIZER_SCORES, 0.0, len(texts))
        self._matched = matched_texts(texts, vocab, parse_special)
        self._neighbours = {first + second for text in texts for first, second in pairwise(text)}
        prefix = vocab.get(keys.TOKENIZER_ADD_PREFIX)
        self._prefix = " " if prefix is None or prefix.data else ""
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS; raises BadTokenizer for a byte without a token."""
        ids: list[int] = []
        after_match = True
        for part in cut_at_matches(text, self._matched, self._ids):
            if isinstance(part, int):
                ids.append(part)
            else:
                prefix = self._prefix if after_match else ""
                for run in self._runs((prefix + part).replace(" ", _SPACE)):
                    ids += self._joined(run)
            after_match = isinstance(part, int)
        return ids

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
