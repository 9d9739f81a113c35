"""A text to learn from: a file, or a folder of classes of texts that are mixed in equal shares.

The folder is a suite's (see suite.py): every file and every folder in it is a class, and .jsonl are chats.
The texts of a class are put one after the other and cut into chunks of one size, so no chunk has two classes.
Chunks come in rounds of one from each class, as long as it has any. So the first n chunks, for any n, are
shared equally, and what short classes lack is made up by the others.

Of each class the chunks are taken from all over its text: the k-th is as far into it as the fraction of k
times the golden ratio says, which spreads any number of first ones evenly.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gguf_tools.files.named_files import read_corpus, read_input
from gguf_tools.format.values import Metadata
from imatrix.texts.tokens import Cut, Text, bos_of, cut_into_chunks, end_of, make_encoder

if TYPE_CHECKING:
    from imatrix.texts.suite import Suite

_GOLDEN = (5**0.5 - 1) / 2


def read_text(path: Path, vocab: Metadata, vocab_size: int, cut: Cut, *, passages: bool = False) -> Text:
    """Read a file, or the classes of a folder in equal shares, and cut it into chunks of tokens.

    A folder's own contexts, and what it has scored, don't matter here.

    vocab       the keys tokenizer.*
    vocab_size  rows of the embedding
    passages    whether chunks are passages: then each ends with the token that ends a text
    raises  BadRequest for a file that is not text, a file or a class that is too short, a token outside the
            vocabulary, and what `read_suite` raises; BadTokenizer for a tokenizer that is not supported
    """
    end = end_of(vocab) if passages else None
    if path.is_dir():
        return _mixed(path, vocab, vocab_size, cut, end)
    text = read_corpus(path)
    ids = make_encoder(vocab, parse_special=cut.parse_special).encode(text.removesuffix("\n"))
    found = cut_into_chunks(ids, bos_of(vocab), vocab_size, cut, str(path), end)
    return replace(found, sha256=hashlib.sha256(text.encode()).hexdigest())


def _mixed(path: Path, vocab: Metadata, vocab_size: int, cut: Cut, end: int | None) -> Text:
    from imatrix.texts.suite import read_suite
    from imatrix.texts.tokenise import class_tokens

    suite, notes = read_suite(path), list[str]()
    bos, whole = bos_of(vocab), Cut(cut.chunk_size)
    texts = {
        name: cut_into_chunks(ids if bos is None else ids[1:], bos, vocab_size, whole, str(path / name), end)
        for name, ids in class_tokens(suite, vocab, vocab_size, notes, parse_special=cut.parse_special)
    }
    rounds = sorted(
        (number, place, int(chunk))
        for place, text in enumerate(texts.values())
        for number, chunk in enumerate(_spread(text.n_chunks))
    )
    used = rounds[cut.chunks_of(len(rounds), str(path))]
    names, parts = list(texts), list(texts.values())
    return Text(
        np.stack([parts[place].tokens[chunk] for _, place, chunk in used]),
        np.stack([parts[place].inputs[chunk] for _, place, chunk in used]),
        tuple(names[place] for _, place, _ in used),
        tuple(notes),
        _suite_sha256(suite),
    )


def mixture_sha256(path: Path) -> str:
    """Compute the SHA-256 that `read_text` gives a text, without cutting it."""
    if path.is_dir():
        from imatrix.texts.suite import read_suite

        return _suite_sha256(read_suite(path))
    return hashlib.sha256(read_input(path)).hexdigest()


def _suite_sha256(suite: Suite) -> str:
    digest = hashlib.sha256()
    for each in suite.classes:
        template = "" if each.template is None else each.template.source
        for part in (each.name, each.read, template, *(text.sha256 for text in each.texts)):
            digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()


def _spread(n: int) -> npt.NDArray[np.int64]:
    """Order 0 to n - 1 so that the first few, however many, are spread evenly."""
    places = np.arange(n) * _GOLDEN % 1
    return np.argsort(np.argsort(places, kind="stable"), kind="stable")
