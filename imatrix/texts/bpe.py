"""llama.cpp's BPE, made of tokenizer.* keys: a cutting into words, and merges inside each.

The tokenizers library does both. What it is told differs from a model's own tokenizer.json where llama.cpp
does; `convert/tokenizer/cuttings.py` has that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from convert.tokenizer.cuttings import Cutting
from gguf_tools.errors import BadTokenizer
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata
from gguf_tools.text import cut_short
from imatrix.texts.matched import cut_at_matches, items_of, matched_texts, token_texts

_SPACE = "▁"


class BytePairs:
    """A tokenizer made of tokenizer.* keys.

    cutting        how it cuts text into words
    parse_special  read the spelling of a control token as that token

    raises  BadTokenizer for lists of different lengths, or merges of what is no token
    """

    def __init__(self, vocab: Metadata, cutting: Cutting, *, parse_special: bool = False) -> None:
        texts = token_texts(vocab)
        self._ids = {text: number for number, text in enumerate(texts)}
        self._matched = matched_texts(texts, vocab, parse_special)
        self._cutting = cutting
        self._library = _build(self._ids, items_of(vocab, keys.TOKENIZER_MERGES), cutting)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS; what no token spells is left out."""
        ids: list[int] = []
        for part in cut_at_matches(text, self._matched, self._ids):
            if isinstance(part, int):
                ids.append(part)
            else:
                for run in self._runs(part):
                    whole = self._ids.get(run) if run.startswith("\n") else None
                    ids += [whole] if whole is not None else self._merged(run)
        return ids

    def _runs(self, text: str) -> Iterator[str]:
        """Yield the text as it is, or line ends apart from the rest where they count whole."""
        if not self._cutting.whole_line_ends:
            yield text
            return
        for run in re.finditer(r"\n+|[^\n]+", text):
            yield run.group()

    def _merged(self, text: str) -> list[int]:
        escaped = text.replace(" ", _SPACE) if self._cutting.escapes_spaces else text
        ids: list[int] = self._library.encode(escaped, add_special_tokens=False).ids
        return ids


def _build(ids: dict[str, int], merges: tuple[str, ...], cutting: Cutting) -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    try:
        library = Tokenizer(
            BPE(
                vocab=ids,
                merges=[_halves(merge) for merge in merges],
                ignore_merges=cutting.ignore_merges,
                byte_fallback=not cutting.is_byte_level,
            )
        )
    except Exception as cause:  # the library raises bare Exceptions
        why = cut_short(str(cause))
        raise BadTokenizer(f"the tokenizers library can't use the vocabulary: {why}") from cause
    between = "removed" if cutting.drops_spaces else "isolated"
    steps: list[Any] = [
        Split(Regex(regex), between, invert=cutting.drops_spaces) for regex in cutting.regexes
    ]
    if cutting.is_byte_level:
        steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    library.pre_tokenizer = Sequence(steps)
    return library


def _halves(merge: str) -> tuple[str, str]:
    """Return the two halves that a merge joins; the first may begin with a space."""
    space = merge.find(" ", 1)
    return merge[:space], merge[space + 1 :]
