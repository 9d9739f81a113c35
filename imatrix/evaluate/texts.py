"""Texts that models are measured on, read as a model's tokens: one text, or the classes of a suite."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.files.named_files import read_input
from gguf_tools.format.values import Metadata
from imatrix.evaluate.evaluation import EvaluatedText
from imatrix.evaluate.options import SHORTEST_CHUNK
from imatrix.evaluate.suite.result import ALL
from imatrix.texts.spelling import spelled
from imatrix.texts.suite import Suite
from imatrix.texts.tokenise import tokenise
from imatrix.texts.tokens import Cut, Text, read_text


class Texts(Protocol):
    """Texts that are measured in one run, each by itself."""

    def read(self, vocab: Metadata, vocab_size: int) -> tuple[EvaluatedText, ...]:
        """Read them as a model's tokens.

        vocab       its keys tokenizer.*
        vocab_size  rows of its embedding
        raises      BadRequest for texts that can't be read, or of which nothing can be measured;
                    BadTokenizer for a tokenizer that is not supported
        """
        ...


@dataclass(frozen=True)
class OneText:
    """A text in a file.

    path  None where the base has tokens of its own
    """

    path: Path | None
    cut: Cut

    def read(self, vocab: Metadata, vocab_size: int) -> tuple[EvaluatedText, ...]:
        if self.path is None:
            raise BadArgument("no text; only a file of logits has its own")
        return (self.of(read_text(self.path, vocab, vocab_size, self.cut), vocab),)

    def of(self, text: Text, vocab: Metadata) -> EvaluatedText:
        """Describe the text, which has been read as `text`; raises BadArgument for short chunks."""
        if text.chunk_size < SHORTEST_CHUNK:
            raise BadArgument(f"a context of {text.chunk_size} tokens, expected {SHORTEST_CHUNK} or more")
        sha256 = None if self.path is None else hashlib.sha256(read_input(self.path)).hexdigest()
        return EvaluatedText(self.path, sha256, text.chunks, spelled(vocab))


@dataclass(frozen=True)
class SuiteTexts:
    """The classes of a suite."""

    suite: Suite

    def read(self, vocab: Metadata, vocab_size: int) -> tuple[EvaluatedText, ...]:
        pieces = spelled(vocab)
        classes = tokenise(self.suite, vocab, vocab_size)
        for each in classes:
            if each.name == ALL:
                raise BadRequest(f"class {ALL!r}: figures over all classes are called so; name it otherwise")
            if not each.chunks.n_scored:
                raise BadRequest(f"class {each.name!r}: no token is scored; are its chunks too short?")
        return tuple(EvaluatedText(None, each.sha256, each.chunks, pieces, each) for each in classes)
