"""Classes of texts as chunks of tokens.

Each plain text is cut as `evaluate -f` cuts a file: the chunks of a class are those of its texts, in order,
and what is left at the end of a text is not used. So a class of one text has its chunks.

A conversation is one chunk of its own length, cut at the class's context. It is encoded as transformers and
llama.cpp do: special tokens are parsed, and BOS is put in front if the tokenizer adds one and the template
has not. A token is the assistant's if any of its characters is.

`quick` takes chunks 5, 15, 25 and so on of a class, and of fewer than 15 the two that are a quarter from its
ends: two are the least that have an error. They are chunks of the whole suite, spread over the texts.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadRequest
from gguf_tools.format.values import Metadata
from imatrix.texts.chat import Rendered
from imatrix.texts.chunks import Chunks
from imatrix.texts.conversations import Conversation
from imatrix.texts.rendering import ChatRenderer
from imatrix.texts.spelling import spelled
from imatrix.texts.suite import ALL, CHAT, Suite, TextClass
from imatrix.texts.templates import PLAIN, Template, control_tokens, own_template, special_tokens
from imatrix.texts.tokens import Cut, Encoder, bos_of, cut_into_chunks, end_of, make_encoder

_TENTH, _FIRST = 10, 4
"""Of every ten chunks, the fifth is in the quick suite."""

_FEWEST = 2
"""Chunks of a class of which an error can be told."""


@dataclass(frozen=True, eq=False)
class ClassChunks:
    """A class of texts as tokens of one model; a text that is measured alone is a class, too.

    title     for people
    chunks    one part
    sha256    of the texts, whatever the tokenizer; None where only the tokens were given
    spelled   the bytes that each token of the vocabulary stands for
    places    of each chunk: the text, and which of its chunks or lines it is; nothing for a text alone
    template  what conversations were rendered through, for people; None for plain texts
    notes     what was left out, one line each
    is_alone  whether it is a text alone, and no class of a suite
    path      of a text alone; None where only its tokens were given
    """

    name: str
    title: str
    chunks: Chunks = field(repr=False)
    sha256: str | None
    spelled: tuple[bytes, ...] = field(repr=False)
    places: tuple[str, ...] = ()
    template: str | None = None
    notes: tuple[str, ...] = ()
    is_alone: bool = False
    path: Path | None = None

    @property
    def n_chunks(self) -> int:
        return self.chunks.n_chunks

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk; of the longest where they differ."""
        return self.chunks.longest

    @property
    def n_tokens_measured(self) -> int:
        """Number of tokens whose predictions count, of all chunks."""
        return self.chunks.n_scored


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A chunk on its own; see Chunks."""

    place: str
    tokens: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]
    scored: npt.NDArray[np.bool_]


def tokenise(
    suite: Suite, vocab: Metadata, vocab_size: int, *, passages: bool = False, longest: int | None = None
) -> tuple[ClassChunks, ...]:
    """Cut the classes of a suite into chunks of a model's tokens.

    vocab       the keys tokenizer.* of the model, its chat templates among them
    vocab_size  rows of the embedding
    passages    whether chunks are passages: all tokens count, and each ends with the token that ends a text
    longest     tokens of a chunk at most; None for any
    raises      BadRequest for a class without a whole chunk, a template that can't be compiled, or a token
                outside the vocabulary; BadTokenizer for a tokenizer that is not supported
    """
    with ChatRenderer(special_tokens(vocab), control_tokens(vocab)) as renderer:
        tokeniser = _Tokeniser(vocab, vocab_size, renderer, passages, longest)
        return tuple(tokeniser.classes(suite))


def class_tokens(
    suite: Suite, vocab: Metadata, vocab_size: int, notes: list[str], *, parse_special: bool = False
) -> Iterator[tuple[str, list[int]]]:
    """Yield each class by its name, and the tokens of its texts one after the other.

    Whole conversations are rendered, and each text begins with BOS if the tokenizer adds one.

    notes          what is left out is added here, one line each
    parse_special  read the spelling of a control token in plain text as that token
    raises         what `tokenise` raises, but that a class may be short
    """
    with ChatRenderer(special_tokens(vocab), control_tokens(vocab)) as renderer:
        tokeniser = _Tokeniser(vocab, vocab_size, renderer)
        yield from tokeniser.streams(suite, notes, parse_special=parse_special)


class _Tokeniser:
    def __init__(
        self,
        vocab: Metadata,
        vocab_size: int,
        renderer: ChatRenderer,
        passages: bool = False,
        longest: int | None = None,
    ) -> None:
        self._passages, self._longest = passages, longest
        self._end = end_of(vocab) if passages else None
        self._vocab = vocab
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._bos = bos_of(vocab)
        self._pieces = spelled(vocab)

    def classes(self, suite: Suite) -> Iterator[ClassChunks]:
        encoders = self._encoders(suite)
        for stated in suite.classes:
            notes: list[str] = []
            each = self._within(stated, notes)
            chunks: Sequence[_Chunk]
            template = None
            if each.read == CHAT:
                chunks, template = self._chats(each, encoders[CHAT], notes)
            else:
                chunks = list(self._plain(each, encoders[each.read], notes))
            if not chunks:
                why = "; ".join(notes[:3])
                raise BadRequest(f"class {each.name!r}: no chunk of {each.context} tokens: {why}")
            if suite.quick:
                chunks = _tenth(chunks)
            yield ClassChunks(
                name=each.name,
                title=each.title,
                chunks=_joined(chunks),
                sha256=hashlib.sha256("".join(text.sha256 for text in each.texts).encode()).hexdigest(),
                spelled=self._pieces,
                places=tuple(chunk.place for chunk in chunks),
                template=template,
                notes=tuple(notes),
            )

    def _within(self, each: TextClass, notes: list[str]) -> TextClass:
        """Return a class with chunks that the model takes; all tokens of passages count."""
        if self._longest is not None and self._longest < each.context:
            notes.append(f"chunks of {self._longest} tokens, not {each.context}: the model takes no more")
            each = replace(each, context=self._longest)
        return replace(each, scored=ALL) if self._passages else each

    def streams(
        self, suite: Suite, notes: list[str], *, parse_special: bool
    ) -> Iterator[tuple[str, list[int]]]:
        begin = [] if self._bos is None else [self._bos]
        encoders = self._encoders(suite, parse_special=parse_special)
        for each in suite.classes:
            encoder = encoders[each.read]
            if each.read == CHAT:
                whole = replace(each, context=sys.maxsize, scored=ALL)
                parts = [chunk.tokens.tolist() for chunk in self._chats(whole, encoder, notes)[0]]
            else:
                words = [source.text for source in each.texts]
                words[-1] = words[-1].removesuffix("\n")
                parts = [begin + encoder.encode(text) for text in words]
            yield each.name, [token for part in parts for token in part]

    def _encoders(self, suite: Suite, *, parse_special: bool = False) -> dict[str, Encoder]:
        """Return the encoder for each way in which classes are read: building one takes up to a second."""
        special = {each.read: parse_special or each.read == CHAT for each in suite.classes}
        made = {each: make_encoder(self._vocab, parse_special=each) for each in set(special.values())}
        return {read: made[is_special] for read, is_special in special.items()}

    def _plain(self, each: TextClass, encoder: Encoder, notes: list[str]) -> Iterator[_Chunk]:
        for source in each.texts:
            ids = encoder.encode(source.text.removesuffix("\n"))
            if len(ids) + (self._bos is not None) < each.context:
                notes.append(f"{source.name}: {len(ids)} tokens, fewer than a chunk of {each.context}")
                continue
            cut = Cut(each.context)
            text = cut_into_chunks(ids, self._bos, self._vocab_size, cut, source.name, self._end)
            is_scored = text.chunks.scored[: each.context]  # of one chunk as of all others
            if each.scored == ALL:
                is_scored = np.arange(each.context) > 0
            for number, (tokens, inputs) in enumerate(zip(text.tokens, text.inputs, strict=True), 1):
                yield _Chunk(f"{source.name}: chunk {number}", tokens, inputs, is_scored)

    def _chats(self, each: TextClass, encoder: Encoder, notes: list[str]) -> tuple[list[_Chunk], str]:
        """Cut conversations; if the model's template takes less than half, all are rendered plainly."""
        templates = [
            each.template or own_template(self._vocab, talk.tools is not None) or PLAIN
            for talk in each.conversations
        ]
        chunks = list(self._rendered(each, templates, encoder, notes))
        n_talks = len(each.conversations)
        if 2 * len(chunks) < n_talks and each.template is None and PLAIN not in templates:
            taken = f"{len(chunks)} of {n_talks} conversations"
            notes.append(f"class {each.name!r} is rendered plainly: the model's template takes {taken}")
            templates = [PLAIN] * len(templates)
            chunks = list(self._rendered(each, templates, encoder, notes))
        return chunks, " and ".join(dict.fromkeys(template.name for template in templates))

    def _rendered(
        self, each: TextClass, templates: Sequence[Template], encoder: Encoder, notes: list[str]
    ) -> Iterator[_Chunk]:
        found = self._renderer.render(each.conversations, templates)
        for talk, rendered in zip(each.conversations, found, strict=True):
            if isinstance(rendered, str):
                notes.append(rendered)
                continue
            if rendered.missed:
                turns = ", ".join(str(number + 1) for number in rendered.missed)
                notes.append(f"{talk.place}: the words of message {turns} are not found in the rendering")
            chunk = self._chunk(each, talk, encoder.encode(rendered.text), rendered)
            if chunk is None:
                notes.append(f"{talk.place}: none of the first {each.context} tokens is the assistant's")
            else:
                yield chunk

    def _chunk(
        self, each: TextClass, talk: Conversation, ids: list[int], rendered: Rendered
    ) -> _Chunk | None:
        """Make the chunk of a conversation; None where nothing in it is scored."""
        is_scored: npt.NDArray[np.bool_] | None = np.ones(len(ids), np.bool_)
        if not self._passages:
            is_scored = _touched(_places(rendered.text, [self._pieces[number] for number in ids]), rendered)
        if is_scored is None:
            raise BadRequest(f"{talk.place}: the tokenizer does not spell what the template has made")
        if self._bos is not None and ids[:1] != [self._bos]:
            ids, is_scored = [self._bos, *ids], np.concatenate([[False], is_scored])
        ids, is_scored = ids[: each.context], is_scored[: each.context]
        is_scored = np.ones(len(ids), np.bool_) if each.scored == ALL else is_scored
        is_scored[:1] = False
        if not is_scored.any():
            return None
        text = cut_into_chunks(ids, None, self._vocab_size, Cut(len(ids)), talk.place, self._end)
        return _Chunk(talk.place, text.tokens[0], text.inputs[0], is_scored)


def _tenth(chunks: Sequence[_Chunk]) -> Sequence[_Chunk]:
    """Take every tenth chunk, and two at least where there are two."""
    chosen = chunks[_FIRST::_TENTH]
    if len(chosen) >= _FEWEST or len(chunks) < _FEWEST:
        return chosen or chunks
    return chunks[len(chunks) // 4], chunks[3 * len(chunks) // 4]


def _places(text: str, pieces: Sequence[bytes]) -> npt.NDArray[np.int64] | None:
    """Return where each token begins among the bytes of a text, and where the last one ends.

    pieces  what each token spells. One may have a space in front that SentencePiece has put there
    returns int64 (n_tokens + 1,), None where the tokens spell another text
    """
    spelling, at = text.encode(), 0
    places = [0]
    for piece in pieces:
        if not spelling.startswith(piece, at):
            piece = piece.removeprefix(b" ")
            if not spelling.startswith(piece, at):
                return None
        at += len(piece)
        places.append(at)
    return np.array(places) if at == len(spelling) else None


def _touched(places: npt.NDArray[np.int64] | None, rendered: Rendered) -> npt.NDArray[np.bool_] | None:
    """Find the tokens with a byte in one of a rendering's spans, bool (n_tokens,); None without places."""
    if places is None:
        return None
    found = np.zeros(len(places) - 1, np.bool_)
    for begin, end in rendered.spans:
        first = len(rendered.text[:begin].encode())
        last = first + len(rendered.text[begin:end].encode())
        found |= (places[1:] > first) & (places[:-1] < last) & (places[1:] > places[:-1])
    return found


def _joined(chunks: Sequence[_Chunk]) -> Chunks:
    lengths = [len(chunk.inputs) for chunk in chunks]
    return Chunks(
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        inputs=np.concatenate([chunk.inputs for chunk in chunks]),
        bounds=np.cumsum([0, *lengths]),
        scored=np.concatenate([chunk.scored for chunk in chunks]),
    )
